"""Both public faces in the running event loop: HTTP by an embedded uvicorn, and gRPC."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import grpc
import uvicorn

from kvrelay.errors import ConfigError
from router.generation import Dispatcher
from router.grpc_api.face import Health, InferenceFace, create_grpc_server
from router.http.app import create_app
from router.http.face import HttpFace
from router.metrics import RouterMetrics
from router.ports import bracketed, listen
from router.sampling_defaults import GenerationDefaults
from router.serving import TextService
from router.tier_rules import ONE_FOR_ALL, TierRules
from router.tokenizer import TextTokenizer

HEALTH_PERIOD_S = 0.1
DRAIN_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class FaceOptions:
    """Port 0: the system chooses."""

    host: str
    http_port: int
    grpc_port: int
    max_body_bytes: int
    cluster: str
    tiers: TierRules = ONE_FOR_ALL


class EmbeddedUvicorn(uvicorn.Server):
    """Signals belong to the process that embeds it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Faces:
    """`add_services` may add more services to the gRPC port before it opens."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        checkpoint_dir: Path,
        tokenizer: TextTokenizer,
        served_model_name: str,
        options: FaceOptions,
        *,
        add_services: Callable[[grpc.aio.Server], None] = lambda server: None,
    ) -> None:
        """`add_services` may put more services on the gRPC server, beside the public one."""
        self._options = options
        self._add_services = add_services
        self.service = TextService(
            dispatcher,
            tokenizer,
            model_name=served_model_name,
            defaults=GenerationDefaults.load(checkpoint_dir),
            metrics=RouterMetrics(dispatcher, served_model_name),
            tiers=options.tiers,
        )
        self._health = Health(self.service)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> tuple[int, int]:
        """(HTTP port, gRPC port). Raises ConfigError, and starts nothing, when one is busy."""
        listener = listen("HTTP", self._options.host, self._options.http_port)
        try:
            grpc_port = await self._start_grpc()
        except BaseException:
            listener.close()
            raise
        self._http = self._http_server()
        self._tasks = [
            asyncio.create_task(self._http.serve(sockets=[listener])),
            asyncio.create_task(self._watch_health()),
        ]
        while not self._http.started:
            if self._tasks[0].done():
                await self._tasks[0]
            await asyncio.sleep(0.001)
        return listener.getsockname()[1], grpc_port

    async def stop(self, grace_s: float) -> None:
        """Lets running requests finish for `grace_s`, then aborts them. New ones are refused until
        the ports close, which is when nothing runs any more.

        Nothing happens when it wasn't started.
        """
        if not self._tasks:
            return
        left_s = await self._drain(grace_s)
        serving, watching = self._tasks
        watching.cancel()
        self._http.config.timeout_graceful_shutdown = math.ceil(left_s)
        self._http.should_exit = True
        await asyncio.gather(self._grpc.stop(left_s), serving, watching, return_exceptions=True)
        if self._http.server_state.tasks:
            await asyncio.wait(self._http.server_state.tasks)

    async def _drain(self, grace_s: float) -> float:
        """The seconds that are left of `grace_s` once nothing runs."""
        deadline_s = time.monotonic() + grace_s
        self.service.draining = True
        while self.service.dispatcher.running_requests() and time.monotonic() < deadline_s:
            await asyncio.sleep(DRAIN_POLL_S)
        return max(0.0, deadline_s - time.monotonic())

    async def _start_grpc(self) -> int:
        options = self._options
        face = InferenceFace(self.service, version=version("kvrelay"), cluster=options.cluster)
        self._grpc = create_grpc_server(face, self._health, options.max_body_bytes)
        self._add_services(self._grpc)
        await self._health.refresh()
        listen("gRPC", options.host, options.grpc_port).close()  # gRPC itself gives no reason
        address = bracketed(options.host, options.grpc_port)
        try:
            port = self._grpc.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"the gRPC port {address}: {error}") from error
        await self._grpc.start()
        return port

    def _http_server(self) -> uvicorn.Server:
        face = HttpFace(
            service=self.service,
            max_body_bytes=self._options.max_body_bytes,
            version=version("kvrelay"),
            started_s=time.time(),
        )
        config = uvicorn.Config(
            create_app(face),
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            http="httptools",
            ws="none",
        )
        return EmbeddedUvicorn(config)

    async def _watch_health(self) -> None:
        """Those who Watch the health service hear of a change within the period."""
        while True:
            await self._health.refresh()
            await asyncio.sleep(HEALTH_PERIOD_S)
