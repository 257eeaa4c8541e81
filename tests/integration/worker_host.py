"""A process that starts and stops workers on command, so that many models share one start-up.

Each command is answered: by the worker's address, or by why it failed. It ends when no one commands
it any more.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, assert_never

import uvloop

from cluster.core.settings import WorkerSettings
from cluster.worker.last_words import LastWords
from cluster.worker.process import WorkerProcess
from engine.core.step import StepBatch, StepOutcome
from engine.device.layer_marks import LayerMarks
from kvpool.core.blocks.device_blocks import Place
from kvpool.core.fetch.client_events import OWN_NODE, BlocksStored, StoreBlocks
from kvpool.core.layout.layout import NO_BLOCK, Tables
from kvpool.memory.host import HostBlocks
from kvpool.memory.kv_memory import KvMemory
from kvpool.transport.peer.exposure import Check
from kvpool.transport.rdma.one_sided import OneSidedPeer


@dataclass(frozen=True, slots=True)
class Start:
    settings: WorkerSettings


@dataclass(frozen=True, slots=True)
class Stop:
    address: str
    drain_s: float


@dataclass(frozen=True, slots=True)
class Damage:
    """The KV of so many pieces that this worker receives from now on is wrong, though every
    checksum was right."""

    address: str
    pieces: int


@dataclass(frozen=True, slots=True)
class Hang:
    """This worker's next step never ends; it is given up after `least_s`."""

    address: str
    least_s: float


@dataclass(frozen=True, slots=True)
class SlowStores:
    """Whatever this worker stores in its pool node takes so long from now on."""

    address: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Stall:
    """From now on no copy of this process over NIXL or UCX moves a byte, though its connection
    lives."""


@dataclass(frozen=True, slots=True)
class Poison:
    """A step with this token in it ends this worker's process, as `how` says: raises, segfault or
    killed."""

    address: str
    token: int
    how: str


@dataclass(frozen=True, slots=True)
class Failed:
    reason: str


DYING: set[asyncio.Task[None]] = set()
"""One for each worker."""

Command = Start | Stop | Damage | Hang | Poison | SlowStores | Stall


def serve(commands: Connection) -> None:
    warnings.simplefilter("ignore")
    uvloop.run(_serve(commands))


async def _serve(commands: Connection) -> None:
    workers: dict[str, WorkerProcess] = {}
    with suppress(EOFError):
        while True:
            command = await asyncio.to_thread(commands.recv)
            commands.send(await answer(command, workers))
    for worker in workers.values():
        await worker.stop(drain_s=0)


async def answer(command: Command, workers: dict[str, WorkerProcess]) -> str | Failed:
    match command:
        case Start(settings=settings):
            words = LastWords(settings.host, settings.port_range)
            return await start(WorkerProcess(settings, words), workers)
        case Stop(address=address, drain_s=drain_s):
            await workers.pop(address).stop(drain_s=drain_s)
            return address
        case Damage(address=address, pieces=pieces):
            damage(workers[address], pieces)
            return address
        case Hang(address=address, least_s=least_s):
            hang(workers[address], least_s)
            return address
        case Poison(address=address):
            poison(workers[address], command)
            return address
        case SlowStores(address=address, seconds=seconds):
            slow_stores(workers[address], seconds)
            return address
        case Stall():
            OneSidedPeer.write = OneSidedPeer.read = stall  # type: ignore[method-assign]
            return ""
        case _:
            assert_never(command)


def stall(peer: OneSidedPeer, copies: object, check: Check) -> None:
    while True:
        check()
        time.sleep(0.01)


async def start(worker: WorkerProcess, workers: dict[str, WorkerProcess]) -> str | Failed:
    try:
        address = await worker.start()
    except Exception as error:
        return Failed(f"{type(error).__name__}: {error}")
    workers[address] = worker
    DYING.add(asyncio.ensure_future(end_with(worker)))
    return address


async def end_with(worker: WorkerProcess) -> None:
    """The process of a worker that has died ends with it."""
    try:
        await worker.wait_closed()
    except Exception:
        await worker.stop(drain_s=0)
        os._exit(1)


def damage(worker: WorkerProcess, pieces: int) -> None:
    """Behind the back of the product: its transfer thread's last move leaves wrong bytes."""
    assert worker._parts is not None
    mover, pools = worker._parts.mover, worker._parts.pools
    left = iter(range(pieces))

    def spoiling(move: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def spoil(job: Any) -> Any:
            moved = move(job)
            if next(left, None) is not None:
                spoil_first_block(mover._memory, job.tables)
            return moved

        return spoil

    if pools is not None:
        spoil_fetches(pools._movers[OWN_NODE]._blocks, left)
    mover._scatter = spoiling(type(mover)._scatter.__get__(mover))  # type: ignore[method-assign]
    mover._fetch = spoiling(type(mover)._fetch.__get__(mover))  # type: ignore[method-assign]


def hang(worker: WorkerProcess, least_s: float) -> None:
    assert worker._parts is not None
    worker._parts.watchdog.watch.least_s = least_s
    worker._parts.device._engine.run = lambda *_: threading.Event().wait()  # type: ignore[method-assign, assignment, return-value]


def slow_stores(worker: WorkerProcess, seconds: float) -> None:
    assert worker._parts is not None and worker._parts.pools is not None
    mover = worker._parts.pools._movers[OWN_NODE]
    store = mover._store

    def slowly(job: StoreBlocks) -> BlocksStored:
        time.sleep(seconds)
        return store(job)

    mover._store = slowly  # type: ignore[method-assign]


def poison(worker: WorkerProcess, command: Poison) -> None:
    assert worker._parts is not None
    engine = worker._parts.device._engine
    run = engine.run

    def die_of_it(batch: StepBatch, marks: LayerMarks | None = None) -> StepOutcome:
        if any(command.token in one.token_ids for one in batch.slices):
            die(command.how)
        return run(batch, marks)

    engine.run = die_of_it  # type: ignore[method-assign]


def die(how: str) -> None:
    if how == "raises":
        raise IndexError("no such expert")
    os.kill(os.getpid(), signal.SIGSEGV if how == "segfault" else signal.SIGKILL)


def spoil_fetches(blocks: HostBlocks, left: Iterator[int]) -> None:
    """What comes from the pool node, a batch of blocks at a time."""
    scatter = type(blocks).scatter.__get__(blocks)

    def spoil(places: Sequence[Place]) -> None:
        scatter(places)
        if next(left, None) is not None:
            spoil_first_block(blocks._memory, tuple(zip(*places, strict=True)))

    blocks.scatter = spoil  # type: ignore[method-assign]


def spoil_first_block(memory: KvMemory, tables: Tables) -> None:
    """In every layer, of the blocks that are held."""
    size = memory.layout.block_size
    for planes, table in zip(memory.planes, tables, strict=True):
        first = next(block for block in table if block != NO_BLOCK)
        for plane in planes:
            plane[:, first * size : (first + 1) * size].add_(1)
