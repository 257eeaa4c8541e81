"""One worker process: engine, block tables, both schedulers, transfer thread and gRPC face.

The same object serves as `kvrelay worker` and inside a Ray actor. Four threads: the event loop
(gRPC), the loop's thread (all decisions), the device thread (the model), the transfer thread
(collation).
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from concurrent.futures import Future

from cluster.auto import settle
from cluster.grpc_server import bind_port, grpc_server
from cluster.kv_report import kv_report
from cluster.settings import WorkerSettings
from cluster.worker.activity_log import PERIOD_S, ActivityLog
from cluster.worker.events import Call, Close, Incoming
from cluster.worker.parts import WorkerParts, build_worker
from cluster.worker.service import WorkerService
from engine.activity import Activity, Stage
from engine.threads import run_apart, use_threads
from kvrelay.v1 import worker_pb2 as pb
from kvrelay.v1 import worker_pb2_grpc

log = logging.getLogger(__name__)


class WorkerProcess:
    """Start once, stop once. `wait_closed` tells when, and why, the worker has stopped. While it
    starts, `activity` is what it does now; `chosen` says which device and transports it took."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._inbox: queue.SimpleQueue[Incoming] = queue.SimpleQueue()
        self._closed: Future[None] = Future()
        self._parts: WorkerParts | None = None
        self.activity = Activity(stage=Stage.STARTS)
        self.chosen = ""
        self._logging: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Load the model and serve; "HOST:PORT" of the gRPC server.

        Raises ModelError or ConfigError.
        """
        self._thread = threading.Thread(target=self._run, name="kvrelay-loop", daemon=True)
        started: Future[WorkerParts] = Future()
        self._started = started
        self._thread.start()
        parts = await asyncio.wrap_future(started)
        self._parts = parts
        self._server = grpc_server()
        service = WorkerService(parts.hello, self._inbox, self._report)
        worker_pb2_grpc.add_WorkerServicer_to_server(service, self._server)
        host = self._settings.host
        port = bind_port(self._server, host, self._settings.port_range)
        await self._server.start()
        self._logging = asyncio.create_task(self._log_activity(parts))
        return f"{host}:{port}"

    async def stop(self, *, drain_s: float) -> None:
        """Refuse new work, finish what runs for up to `drain_s`, then release everything."""
        parts = self._parts
        if parts is None:
            return
        self._parts = None
        if self._logging is not None:
            self._logging.cancel()
        parts.loop.draining = True
        deadline_s = time.monotonic() + drain_s
        while time.monotonic() < deadline_s and self._thread.is_alive() and not parts.loop.idle:
            await asyncio.sleep(0.02)
        await self._server.stop(grace=None)
        self._inbox.put(Close())
        await asyncio.to_thread(self._thread.join)

    async def answer(self) -> None:
        """Returns once the loop has come round: nothing hangs."""
        turned: Future[None] = Future()
        self._inbox.put(Call(lambda: turned.set_result(None)))
        await asyncio.wrap_future(turned)

    async def wait_closed(self) -> None:
        """Returns once stopped; raises what the worker died of."""
        await asyncio.shield(asyncio.wrap_future(self._closed))

    async def _log_activity(self, parts: WorkerParts) -> None:
        """The loop reads its own counters, between two events."""
        activity = ActivityLog(parts.hello.total_blocks)

        def tell() -> None:
            line = activity.line(parts.loop.counters(), time.monotonic())
            if line is not None:
                log.info("%s", line)

        while True:
            self._inbox.put(Call(tell))
            await asyncio.sleep(PERIOD_S)

    # --- loop thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            parts = run_apart(self._build)
        except BaseException as error:
            self._started.set_exception(error)
            self._closed.set_result(None)
            return
        self._started.set_result(parts)
        use_threads(1)  # the device's thread has the cores
        try:
            parts.loop.run()
            self._closed.set_result(None)
        except BaseException as error:
            log.exception("worker %s died", self._settings.name)
            self._closed.set_exception(error)
        finally:
            parts.close()

    def _build(self) -> WorkerParts:
        settings, self.chosen = settle(self._settings)
        return build_worker(settings, self._inbox, self._now_does)

    def _now_does(self, activity: Activity) -> None:
        self.activity = activity

    def _report(self) -> pb.DebugKvResponse:
        """Taken by the loop between two events, so it is consistent."""
        answer: Future[pb.DebugKvResponse] = Future()
        parts = self._parts
        if parts is None:
            return pb.DebugKvResponse(worker=self._settings.name)
        receiver = parts.loop.decode.receiver

        def take() -> None:
            now_s = time.monotonic()
            reports = parts.loop.reports
            answer.set_result(kv_report(parts.hello, parts.tables, receiver, reports, now_s))

        self._inbox.put(Call(take))
        return answer.result(timeout=30)
