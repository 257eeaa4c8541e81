"""The servers of a router: public ones for clients, internal ones for operators and workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from math import inf
from pathlib import Path

import grpc

from kvrelay.access.values import NO_ACCESS, Access, TlsFiles
from router.access.caller import NO_KEYS, KeySources
from router.access.door import Door
from router.carried.signing import ClusterKey
from router.chat.conversations import DEFAULT_KEPT, KeptBounds, KeptConversations
from router.chat.formats.choice import AUTO, formats_of
from router.core.state.generation import Dispatcher
from router.grpc_api.changes import Changes, OfProcesses
from router.grpc_api.movable import MovableStreams
from router.grpc_api.server import (
    AdminApi,
    Health,
    InferenceApi,
    create_internal_server,
    create_public_server,
)
from router.grpc_api.watches import Watches
from router.http.api import HttpApi
from router.http.event_stream import KEEP_ALIVE_S
from router.http_apps import create_internal_app, create_public_app
from router.live.http_protocol import HttpBounds
from router.live.listener import ListenAt, Listener, Ports
from router.live.metrics import RouterMetrics
from router.text.grammar.check import GrammarCheck
from router.text.request_fields import ONE_FOR_ALL, TierRules
from router.text.sampling import GenerationDefaults
from router.text.service import TextService
from router.text.tokenizer import TextTokenizer

HEALTH_PERIOD_S = 0.1
DRAIN_POLL_S = 0.02
HEARD_S = 1.0
"""So long after one router has told that it leaves, the others know it from the workers."""
INTERNAL_GRACE_S = 1.0
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Port 0: the system chooses. The internal ports want the token of `access`, but for /metrics
    where `open_metrics`. `cluster_key` signs what clients carry from router to router."""

    host: str
    http_port: int
    grpc_port: int
    max_body_bytes: int
    cluster: str
    internal_host: str = LOOPBACK
    internal_http_port: int = 0
    internal_grpc_port: int = 0
    public_metrics: bool = False
    open_metrics: bool = False
    access: Access = NO_ACCESS
    public_tls: TlsFiles | None = None
    tiers: TierRules = ONE_FOR_ALL
    cluster_key: bytes = field(default=b"", repr=False)
    keys: KeySources = NO_KEYS
    keep_alive_s: float = KEEP_ALIVE_S
    conversations: KeptBounds = DEFAULT_KEPT
    tool_format: str = AUTO
    reasoning_format: str = AUTO
    bounds: HttpBounds = field(default_factory=HttpBounds)

    @property
    def public(self) -> ListenAt:
        ports = Ports(http=self.http_port, grpc=self.grpc_port)
        return ListenAt(host=self.host, ports=ports, bounds=self.bounds, tls=self.public_tls)

    @property
    def internal(self) -> ListenAt:
        ports = Ports(http=self.internal_http_port, grpc=self.internal_grpc_port)
        return ListenAt(
            host=self.internal_host,
            ports=ports,
            kind="internal ",
            bounds=self.bounds,
            tls=self.access.serves,
        )


class RouterServers:
    """`add_internal` may add more services to the internal gRPC port before it opens. `changes`:
    of who controls the cluster; None: nobody does."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        checkpoint_dir: Path,
        tokenizer: TextTokenizer,
        served_model_name: str,
        options: ServerOptions,
        *,
        add_internal: Callable[[grpc.aio.Server], None] = lambda server: None,
        changes: Changes | None = None,
    ) -> None:
        self.service = TextService(
            dispatcher,
            tokenizer,
            model_name=served_model_name,
            defaults=GenerationDefaults.load(checkpoint_dir),
            metrics=RouterMetrics(served_model_name),
            tiers=options.tiers,
            key=ClusterKey(options.cluster_key),
            formats=formats_of(
                tokenizer.tool_template, options.tool_format, options.reasoning_format
            ),
            grammars=GrammarCheck(checkpoint_dir / "tokenizer.json"),
            door=Door(options.keys, cluster_key=options.cluster_key, tiers=options.tiers.tiers),
        )
        self._options = options
        self._add_internal = add_internal
        self._changes = changes or OfProcesses(dispatcher)
        self._health = Health(self.service)
        self._watches = Watches()
        self._movable = MovableStreams()
        self._left_s = inf
        self._public: Listener | None = None
        self._internal: Listener | None = None
        self._watching: asyncio.Task[None] | None = None
        self._following_keys: asyncio.Task[None] | None = None

    async def start(self) -> tuple[Ports, Ports]:
        """Public and internal ports. Raises ConfigError, and serves nothing, when one is busy."""
        api = self._http_api()
        inference = InferenceApi(
            self.service,
            self._movable,
            version=version("kvrelay"),
            cluster=self._options.cluster,
            most_characters=self._options.max_body_bytes,
        )
        public = create_public_server(inference, self._health, self._options.max_body_bytes)
        token, open_metrics = self._options.access.token, self._options.open_metrics
        admin = AdminApi(inference, self._watches, self._changes)
        internal = create_internal_server(admin, self._health, token)
        self._add_internal(internal)
        public_app = create_public_app(api, with_metrics=self._options.public_metrics)
        self._public = Listener(self._options.public, public_app, public)
        internal_app = create_internal_app(api, token, open_metrics=open_metrics)
        self._internal = Listener(self._options.internal, internal_app, internal)
        return await self._start(self._public, self._internal)

    async def leave(self) -> None:
        """Tells load balancers to send nothing more, and the workers. Requests are still taken."""
        if not self.service.leaving:
            self.service.leaving, self._left_s = True, time.monotonic()
            self.service.dispatcher.leave()
        await self._health.refresh()

    async def stop(self, grace_s: float) -> None:
        """Lets running requests finish for `grace_s`, then aborts them. New ones are refused until
        the ports close, when no request runs any more. The internal listener serves until then.
        Does nothing if it wasn't started."""
        left_s = grace_s
        if self._watching is not None:
            left_s = await self._drain(grace_s)
            self._watching.cancel()
            if self._following_keys is not None:
                self._following_keys.cancel()
            self._health.end_watches()
            self._watches.end()
        if self._public is not None and self._internal is not None:
            await self._public.stop(left_s)
            await self._internal.stop(INTERNAL_GRACE_S)
            self.service.refusals.close()
        await self.service.close()

    async def _drain(self, grace_s: float) -> float:
        """The seconds left of `grace_s` once no request runs."""
        deadline_s = time.monotonic() + grace_s
        await self.leave()
        self.service.draining = True
        while self.service.dispatcher.running_requests() and time.monotonic() < deadline_s:
            self._send_away()
            await asyncio.sleep(DRAIN_POLL_S)
        return max(0.0, deadline_s - time.monotonic())

    def _send_away(self) -> None:
        """Not where all routers leave: nobody would take what is sent away."""
        has_heard = time.monotonic() >= self._left_s + HEARD_S
        if has_heard and self.service.dispatcher.other_routers(self._left_s):
            self._movable.send_away()

    async def _start(self, public: Listener, internal: Listener) -> tuple[Ports, Ports]:
        try:
            ports = public.bind(), internal.bind()
        except BaseException:
            await self.stop(0.0)
            raise
        await self._health.refresh()
        await public.start()
        await internal.start()
        self._watching = asyncio.create_task(self._watch_health())
        self._following_keys = asyncio.create_task(self.service.door.watch())
        return ports

    def _http_api(self) -> HttpApi:
        return HttpApi(
            service=self.service,
            max_body_bytes=self._options.max_body_bytes,
            version=version("kvrelay"),
            started_s=time.time(),
            keep_alive_s=self._options.keep_alive_s,
            conversations=KeptConversations(self._options.conversations),
        )

    async def _watch_health(self) -> None:
        """Watchers of the health service get a change within the period."""
        while True:
            await self._health.refresh()
            await asyncio.sleep(HEALTH_PERIOD_S)
