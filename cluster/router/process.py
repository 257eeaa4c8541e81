"""One router process: the dispatcher, its servers and the registry that workers join.

The same object serves as `kvrelay router` and inside a Ray actor.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import grpc

from cluster.core.settings import RouterSettings
from cluster.process.net import is_loopback
from engine.core.activity import Stage, StartActivity
from engine.model.checkpoint import find_text_files
from kvrelay.errors import ConfigError, InvalidRequest
from kvrelay.types import RequestSpec
from kvrelay.v1 import worker_pb2 as pb
from kvrelay.v1 import worker_pb2_grpc
from router.core.start import Beginning
from router.grpc_api.changes import Changes
from router.live.dispatcher import WorkerDispatcher
from router.live.link import WorkerLink
from router.live.listener import Ports
from router.live.recorder import Recorder
from router.server import RouterServers, ServerOptions
from router.text.preload import preload_specs
from router.text.request_fields import TierRules
from router.text.tokenizer import TextTokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterAddress:
    public: Ports
    internal: Ports


class RegistryService(worker_pb2_grpc.RegistryServicer):
    """A worker or pool node started with --join keeps this call open for as long as it lives.

    `only_router`: workers that join other routers too are refused.
    """

    def __init__(self, dispatcher: WorkerDispatcher, *, only_router: bool = False) -> None:
        self._dispatcher = dispatcher
        self._only_router = only_router
        self._closed = asyncio.Event()
        self._calls: Counter[str] = Counter()  # one may call again before its old call ends

    def close(self) -> None:
        """Ends every call; the workers then look for the next router."""
        self._closed.set()

    async def Register(  # noqa: N802
        self, requests: AsyncIterator[pb.RegisterRequest], context: grpc.aio.ServicerContext
    ) -> pb.RegisterResponse:
        joined: list[pb.RegisterRequest] = []
        refused: list[str] = []
        calls = (self._join(requests, joined, refused), self._closed.wait())
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            for request in joined:
                await self._leave(request)
        for reason in refused:
            log.error("%s", reason)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)
        return pb.RegisterResponse()

    async def _join(
        self,
        requests: AsyncIterator[pb.RegisterRequest],
        joined: list[pb.RegisterRequest],
        refused: list[str],
    ) -> None:
        async for request in requests:
            if (reason := self._refusal(request)) is not None:
                refused.append(reason)
                return
            self._calls[request.address] += 1
            joined.append(request)
            if request.is_pool_node:
                self._dispatcher.pools.add(request.address)
            else:
                self._dispatcher.add_worker(request.address)

    def _refusal(self, request: pb.RegisterRequest) -> str | None:
        routers = sorted({*request.routers})
        if not self._only_router or request.is_pool_node or len(routers) < 2:
            return None
        return (
            f"router.dispatch: shared_queue is for one router, and the worker at {request.address} "
            f"joins {', '.join(routers)}: give it one --join, or set router.dispatch: direct"
        )

    async def _leave(self, request: pb.RegisterRequest) -> None:
        self._calls[request.address] -= 1
        if self._calls[request.address]:
            return
        del self._calls[request.address]
        if request.is_pool_node:
            await self._dispatcher.pools.remove(request.address)
        else:
            await self._dispatcher.remove_worker(request.address)


class RouterProcess:
    """Start once, stop once. `changes`: of who controls the cluster; None: nobody does."""

    def __init__(self, settings: RouterSettings, changes: Changes | None = None) -> None:
        self._settings, self._changes = settings, changes
        self._hurried = asyncio.Event()
        self.activity = StartActivity(stage=Stage.STARTS)

    def _now_does(self, activity: StartActivity) -> None:
        self.activity = activity

    async def start(self) -> RouterAddress:
        """Serves on all ports. Raises ModelError (no tokenizer) or ConfigError (busy port)."""
        settings = self._settings
        folder = await asyncio.to_thread(
            find_text_files, settings.model, settings.revision, self._now_does
        )
        tokenizer = TextTokenizer.load(folder)
        options = _server_options(settings)
        self.dispatcher = WorkerDispatcher(
            _preloads(settings, tokenizer, options.cluster_key),
            settings.policies,
            settings.qos,
            directory_bytes=settings.directory_bytes,
            failover_patience_s=settings.failover_patience_s,
            detect_s=settings.detect_s,
            record=_recording(settings),
            access=settings.access,
        )
        self._registry = RegistryService(
            self.dispatcher, only_router=settings.policies.shared_queue
        )
        self._servers = RouterServers(
            self.dispatcher,
            folder,
            tokenizer,
            settings.served_model_name,
            options,
            add_internal=self._add_registry,
            changes=self._changes,
        )
        public, internal = await self._servers.start()
        tell_who_may_call(settings.host, guarded=settings.keys.guarded)
        return RouterAddress(public=public, internal=internal)

    def _add_registry(self, server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_RegistryServicer_to_server(self._registry, server)

    async def add_worker(self, address: str) -> WorkerLink:
        return self.dispatcher.add_worker(address)

    async def remove_worker(self, address: str) -> None:
        await self.dispatcher.remove_worker(address)

    async def add_pool_node(self, address: str) -> None:
        self.dispatcher.pools.add(address)

    async def remove_pool_node(self, address: str) -> None:
        await self.dispatcher.pools.remove(address)

    def hurry(self) -> None:
        """Ends the lame-duck phase, also before it has begun."""
        self._hurried.set()

    async def stop(self, *, drain_s: float, lame_duck_s: float = 0.0) -> None:
        """Tells load balancers to leave, and still takes requests for `lame_duck_s`. Then accepts
        no new ones, finishes running ones for up to `drain_s`, and closes everything."""
        if lame_duck_s and not self._hurried.is_set():
            await self._servers.leave()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._hurried.wait(), lame_duck_s)
        await asyncio.gather(self._servers.stop(drain_s), self._release_workers(drain_s))
        await self.dispatcher.close()

    async def _release_workers(self, drain_s: float) -> None:
        """Once no request runs: open calls would delay the servers for all of `drain_s`."""
        deadline_s = time.monotonic() + drain_s
        while self.dispatcher.running_requests() and time.monotonic() < deadline_s:
            await asyncio.sleep(0.02)
        self._registry.close()


def _server_options(settings: RouterSettings) -> ServerOptions:
    return ServerOptions(
        host=settings.host,
        http_port=settings.http_port,
        grpc_port=settings.grpc_port,
        internal_host=settings.internal_host,
        internal_http_port=settings.internal_http_port,
        internal_grpc_port=settings.internal_grpc_port,
        public_metrics=settings.public_metrics,
        open_metrics=settings.open_metrics,
        access=settings.access,
        public_tls=settings.public_tls,
        max_body_bytes=settings.max_body_bytes,
        cluster=settings.name,
        tiers=TierRules(tiers=settings.qos, match=settings.tier_match),
        cluster_key=settings.cluster_key,
        keys=settings.keys,
        conversations=settings.conversations,
        tool_format=settings.tool_format,
        reasoning_format=settings.reasoning_format,
    )


def tell_who_may_call(host: str, *, guarded: bool) -> None:
    if guarded:
        log.info("only calls with an API key are served")
    elif is_loopback(host):
        log.info("there are no API keys, so only this machine is served (router.host: %s)", host)
    else:
        log.warning(
            "there are no API keys, and router.host is %s: whoever reaches it is served; set "
            "router.api_keys, or --api-key",
            host,
        )


def _recording(settings: RouterSettings) -> Callable[[Beginning], Recorder] | None:
    if settings.record is None:
        return None
    return partial(Recorder, Path(settings.record), settings.record_bytes)


def _preloads(
    settings: RouterSettings, tokenizer: TextTokenizer, cluster_key: bytes
) -> tuple[RequestSpec, ...]:
    texts = [
        replace(one, tenant=settings.keys.space_of(cluster_key, one.tenant))
        for one in settings.preload
    ]
    try:
        return preload_specs(texts, tokenizer)
    except InvalidRequest as error:
        raise ConfigError(f"preload: {error}") from error
