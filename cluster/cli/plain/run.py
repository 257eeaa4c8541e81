"""`kvrelay router`, `worker`, `pool-node` and `controller` as ordinary processes, without Ray.

A worker or pool node registers with each router by a call that stays open. When a router goes away,
it tries again. SIGTERM or SIGINT drains and exits; after SIGTERM a router first tells load
balancers to leave it. Each process imports only what it needs: a router doesn't wait for torch.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rich.console import Console

from cluster.cli.plain.joins import addresses_of, registrations
from cluster.cli.plain.ready_file import ready_file as showing_ready
from cluster.core.elastic.rules import RoleRules
from cluster.core.settings import PoolNodeSettings, RouterSettings, WorkerSettings
from cluster.process.bars import DownloadBars
from cluster.process.born import ledger_of_process
from engine.core.activity import Stage, StartActivity
from kvrelay.access.values import Access
from kvrelay.gc_pauses import freeze, paused
from kvrelay.v1 import worker_pb2

if TYPE_CHECKING:
    from cluster.worker.process import WorkerProcess


log = logging.getLogger(__name__)

EXIT_INTERRUPTED = 130
SHOW_S = 0.25


def say(text: str) -> None:
    """In one piece with its newline: lines of the log come beside it, from other threads."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


class Active(Protocol):
    activity: StartActivity


class Stoppable(Protocol):
    async def stop(self, *, drain_s: float) -> None: ...


async def run_router(settings: RouterSettings, *, drain_s: float) -> None:
    """Serve until SIGTERM or SIGINT, then drain."""
    from cluster.router.process import RouterProcess

    router = RouterProcess(settings)
    stopping = _Stopping(router.hurry)
    async with showing(settings.process, router):
        address = await router.start()
    freeze()
    internal = settings.internal_host
    tls = "" if settings.public_tls is None else ", with TLS"
    internal_tls = "" if settings.access.serves is None else ", with TLS"
    say(f"HTTP on {settings.host}:{address.public.http}{tls}")
    say(f"gRPC on {settings.host}:{address.public.grpc}{tls}")
    say(f"internal HTTP on {internal}:{address.internal.http}{internal_tls}")
    say(f"internal gRPC on {internal}:{address.internal.grpc}{internal_tls}")
    await stopping.wait()
    await router.stop(drain_s=drain_s, lame_duck_s=settings.lame_duck_s)


async def run_worker(
    settings: WorkerSettings, *, join: Sequence[str], drain_s: float, ready_file: Path | None = None
) -> None:
    """Serve until SIGTERM or SIGINT. `ready_file` is there from when a router has joined it until
    it drains, or a router refuses it. Raises the error that made the worker stop by itself."""
    with paused():
        from cluster.worker.last_words import LastWords
        from cluster.worker.process import WorkerProcess

    stopping = _Stopping()
    words = LastWords(settings.host, settings.port_range)
    routers = partial(addresses_of, join)
    with showing_ready(ready_file) as ready:
        worker = WorkerProcess(settings, words, ledger_of_process(), routers, ready.show)
        async with showing(settings.name, worker):
            telling = asyncio.create_task(_tell_choice(worker))
            address = await worker.start()
        await telling
        freeze()
        say(f"{settings.role} worker on {address}")
        request = worker_pb2.RegisterRequest(address=address, routers=join)
        registered = registrations(join, request, settings.access)
        await _first_of([stopping.wait(), worker.wait_closed(), *registered], worker, drain_s)


async def run_pool_node(settings: PoolNodeSettings, *, join: Sequence[str], drain_s: float) -> None:
    """Serve until SIGTERM or SIGINT. Raises the error that made the node stop by itself."""
    from cluster.pool_node.node import PoolNode

    stopping = _Stopping()
    node = PoolNode(settings)
    addresses = await node.start()
    freeze()
    for address in addresses.links:
        say(f"pool node of {settings.name} on {address}")
    say(f"internal gRPC on {addresses.reports}")
    request = worker_pb2.RegisterRequest(address=addresses.reports, is_pool_node=True, routers=join)
    registered = registrations(join, request, settings.access)
    await _first_of([stopping.wait(), node.wait_closed(), *registered], node, drain_s)


def run_controller(join: Sequence[str], rules: RoleRules, access: Access) -> None:
    """Keep the roles of the workers of these routers until SIGTERM or SIGINT."""
    from cluster.elastic.keeper import Keeper
    from cluster.elastic.owners import ProcessesOfTheirOwn
    from cluster.watch.latest import LatestReports

    routers = partial(addresses_of, join)
    owner = ProcessesOfTheirOwn(role_rules=rules, routers=routers, access=access)
    keeper = Keeper(routers=routers, owner=owner, reports=LatestReports(access))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: keeper.stop())
    say(f"roles follow the offered work at {', '.join(join)}")
    keeper.run()


@asynccontextmanager
async def showing(
    name: str, process: Active, console: Console | None = None
) -> AsyncIterator[None]:
    """Logs each stage of a process that starts; a download has a progress bar on a terminal."""
    bars = DownloadBars(console=console or Console(stderr=True))
    task = asyncio.create_task(_show(name, process, bars))
    try:
        yield
    finally:
        task.cancel()
        bars.close()


async def _show(name: str, process: Active, bars: DownloadBars) -> None:
    said = Stage.STARTS
    while True:
        now = process.activity
        if now.stage is not said:
            said = now.stage
            log.info("%s", now.stage)
        bars.show({name: now} if now.stage is Stage.DOWNLOADS else {})
        await asyncio.sleep(SHOW_S)


async def _tell_choice(worker: WorkerProcess) -> None:
    """Logged before the model is loaded, which can take minutes."""
    while not worker.chosen:
        await asyncio.sleep(SHOW_S)
    log.info("%s", worker.chosen)


async def _first_of(
    waits: Sequence[Coroutine[None, None, object]], served: Stoppable, drain_s: float
) -> None:
    """Waits for the first task to end, stops the process, and raises the task's error."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    await served.stop(drain_s=drain_s)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    for task in done:
        task.result()


class _Stopping(asyncio.Event):
    """Set by the first signal. `hurry` is called at Ctrl-C, or a second signal; a second Ctrl-C
    ends the process at once."""

    def __init__(self, hurry: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._hurry = hurry
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._told)
        loop.add_signal_handler(signal.SIGINT, self._interrupted)

    def _told(self) -> None:
        if self.is_set():
            self._hurry()
        self.set()

    def _interrupted(self) -> None:
        if self.is_set():
            os._exit(EXIT_INTERRUPTED)
        self._hurry()
        self.set()
