"""The loop of a pool node: one thread owns the core and executes its commands."""

from __future__ import annotations

import logging
import queue
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

from cluster.config.types import format_size
from cluster.core.processes import pool_process
from cluster.core.settings import PoolNodeSettings
from cluster.pool_node.disk import PoolDisk
from cluster.pool_node.report import pool_report
from cluster.pool_node.service import LineOpened, ReportAsked, RouterLine, ServiceEvent
from cluster.pool_node.workers import Gone, Heard, PoolWorkers
from cluster.process.net import host_id
from kvpool.core.blocks.eviction import open_policy
from kvpool.core.node.events import (
    DropRouter,
    DropWorker,
    FromPoolWorker,
    PoolCommand,
    PoolEvent,
    PoolTick,
    PoolWorkerJoined,
    PoolWorkerLost,
    ReadSlots,
    RouterCall,
    RouterCalled,
    RouterHungUp,
    RouterTook,
    SlotsRead,
    SlotsWritten,
    TellRouter,
    TellWorker,
    WriteSlots,
)
from kvpool.core.node.host_tier import HostTier
from kvpool.core.node.messages import FromPool, PoolFormat, PoolHello, PoolRefused, PoolWelcome
from kvpool.core.node.restored import restore
from kvpool.core.node.tier_blocks import TierBlocks
from kvpool.disk.files import DiskFiles
from kvpool.transport.peer.base import Connection
from kvrelay.errors import ConfigError
from kvrelay.messages import PoolUpdate
from kvrelay.types import WIRE_VERSION, Incarnation
from kvrelay.v1.pool_node_pb2 import PoolReport

log = logging.getLogger(__name__)

TICK_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Accept nothing new; the loop ends when no operation is under way, or after `drain_s`."""

    drain_s: float


@dataclass(frozen=True, slots=True)
class HeartbeatAsked:
    """A heartbeat is asked for."""

    answer: Future[None]


@dataclass(frozen=True, slots=True)
class DiskCrashed:
    """The disk thread died of a bug, so the pool node ends too."""

    error: BaseException


NodeEvent = (
    Heard | Gone | SlotsWritten | SlotsRead | Drain | ServiceEvent | HeartbeatAsked | DiskCrashed
)
PoolInbox = queue.SimpleQueue[NodeEvent]


class PoolLoop:
    """`files` are open already; None without a disk tier."""

    def __init__(
        self,
        settings: PoolNodeSettings,
        incarnation: Incarnation,
        workers: PoolWorkers,
        files: DiskFiles | None,
        inbox: PoolInbox,
    ) -> None:
        self._settings = settings
        self._incarnation = incarnation
        self._workers = workers
        self._files = files
        self._inbox = inbox
        self._format: PoolFormat | None = None
        self._on_disk: TierBlocks | None = None
        self._disk: PoolDisk | None = None
        self._core: HostTier | None = None
        self._worker_of: dict[Connection, Incarnation] = {}
        self._connection_of: dict[Incarnation, Connection] = {}
        self._lines: dict[RouterCall, RouterLine] = {}
        self._ends_s: float | None = None
        self._next_tick_s = 0.0

    def load(self) -> None:
        """Reads the blocks that an earlier process left on disk. Raises ConfigError."""
        if self._files is None:
            return
        found = self._files.found_format()
        if found is None:
            log.info("nothing on disk yet in %s", self._settings.disk)
            return
        self._on_disk = self._open_disk(self._files, found)
        self._format = found
        size = format_size(self._on_disk.cached * found.block_bytes)
        log.info("%d blocks (%s) on disk, of %s", self._on_disk.cached, size, found)

    def run(self) -> None:
        """Runs until drained. Raises the error of a thread beside it."""
        while not self._is_over():
            timeout_s = max(0.0, self._next_tick_s - time.monotonic())
            with suppress(queue.Empty):
                self._settle(self._inbox.get(timeout=timeout_s))
            if time.monotonic() >= self._next_tick_s:
                self._next_tick_s = time.monotonic() + TICK_S
                self._decide(PoolTick())

    def close(self) -> None:
        if self._disk is not None:
            self._disk.close()
        elif self._files is not None:
            self._files.close()
        if self._core is not None:
            counts = self._core.books.counts()
            log.info(
                "stopped: %d blocks in memory are gone, %d on disk stay",
                counts["cached"],
                counts["disk_cached"],
            )

    def _is_over(self) -> bool:
        if self._ends_s is None:
            return False
        return self._core is None or self._core.idle or time.monotonic() >= self._ends_s

    def _settle(self, event: NodeEvent) -> None:
        match event:
            case Heard(connection=connection, message=PoolHello() as hello):
                self._greeted(connection, hello, event.region)
            case Heard():
                self._heard(event)
            case Gone(connection=connection, reason=reason):
                self._gone(connection, reason)
            case LineOpened(line=line):
                self._lines[line.call] = line
                self._decide(RouterCalled(router=line.call))
            case RouterHungUp(router=router):
                self._lines.pop(router, None)
                self._decide(event)
            case SlotsWritten() | SlotsRead() | RouterTook():
                self._decide(event)
            case Drain(drain_s=drain_s):
                self._ends_s = time.monotonic() + drain_s
                if self._core is not None:
                    self._core.draining = True
            case ReportAsked(answer=answer):
                if answer.set_running_or_notify_cancel():
                    answer.set_result(self._report())
            case HeartbeatAsked(answer=life):
                life.set_result(None)
            case DiskCrashed(error=error):
                raise error
            case _:
                assert_never(event)

    def _report(self) -> PoolReport:
        now_s = time.monotonic()
        name = pool_process(host_id())
        return pool_report(name, self._incarnation, self._format, self._core, self._on_disk, now_s)

    # --- workers --------------------------------------------------------------------------------

    def _greeted(self, connection: Connection, hello: PoolHello, region: str) -> None:
        reason = self._refusal(hello)
        if reason is not None:
            log.warning("worker %s refused: %s", hello.incarnation, reason)
            self._workers.tell(connection, PoolRefused(reason=reason))
            self._workers.drop(connection)
            return
        before = self._connection_of.get(hello.incarnation)
        if before is not None:
            self._workers.drop(before)
            self._gone(before, "it connected again")
        self._worker_of[connection] = hello.incarnation
        self._connection_of[hello.incarnation] = connection
        welcome = PoolWelcome(
            wire_version=WIRE_VERSION,
            incarnation=self._incarnation,
            region=region,
            lease_ttl_s=self._settings.lease_ttl_s,
            addresses=self._workers.far_addresses,
        )
        self._workers.tell(connection, welcome)
        log.info("worker %s joined (%s)", hello.incarnation, connection.peer_address)
        self._decide(PoolWorkerJoined(worker=hello.incarnation, looks_up=hello.looks_up))

    def _refusal(self, hello: PoolHello) -> str | None:
        if hello.wire_version != WIRE_VERSION:
            return f"it speaks wire version {hello.wire_version}, the pool node {WIRE_VERSION}"
        if self._ends_s is not None:
            return "the pool node is stopping"
        try:
            self._learn(hello.format)
        except ConfigError as error:
            return str(error)
        if hello.format != self._format:
            return f"its blocks are {hello.format}, the pool node's {self._format}"
        return None

    def _heard(self, event: Heard) -> None:
        worker = self._worker_of.get(event.connection)
        if worker is None or isinstance(event.message, FromPool):
            self._break_with(event.connection, "a message that a worker doesn't send")
            return
        self._decide(FromPoolWorker(worker=worker, message=event.message))

    def _break_with(self, connection: Connection, reason: str) -> None:
        log.warning("%s broke the protocol (%s): dropped", connection.peer_address, reason)
        self._workers.drop(connection)
        self._gone(connection, reason)

    def _gone(self, connection: Connection, reason: str) -> None:
        worker = self._worker_of.pop(connection, None)
        if worker is not None and self._connection_of.get(worker) is connection:
            del self._connection_of[worker]
            log.info("worker %s left: %s", worker, reason)
            self._decide(PoolWorkerLost(worker=worker))

    # --- the core and its disk ------------------------------------------------------------------

    def _learn(self, format_: PoolFormat) -> None:
        """The first worker determines the format of the blocks, and waiting routers learn it.
        Raises ConfigError, which changes nothing."""
        if self._core is not None:
            return
        host_bytes = self._settings.host_bytes
        assert host_bytes is not None, "settled"
        places = host_bytes // format_.block_bytes
        if not places:
            raise ConfigError(
                f"pool.host_memory: {host_bytes} bytes, but one block takes {format_.block_bytes}"
            )
        policy = open_policy(self._settings.policy)
        host = TierBlocks(places, policy)
        self._core = HostTier(
            host, self._disk_blocks(format_), lease_ttl_s=self._settings.lease_ttl_s
        )
        self._format = format_
        log.info("room for %d blocks in memory, of %s", places, format_)
        for router in self._lines:
            self._decide(RouterCalled(router=router))

    def _disk_blocks(self, format_: PoolFormat) -> TierBlocks:
        if self._files is None:
            return TierBlocks(0, open_policy(self._settings.policy))
        if self._on_disk is None or self._format != format_:
            if self._on_disk is not None:
                log.warning("the disk held %s: deleted", self._format)
            self._on_disk = self._format = None
            self._files.clear()
            self._on_disk = self._open_disk(self._files, format_)
        self._disk = PoolDisk(
            self._files,
            self._workers.memory,
            format_.block_bytes,
            post=self._inbox.put,
            crashed=lambda error: self._inbox.put(DiskCrashed(error)),
        )
        log.info("room for %d blocks on disk in %s", self._on_disk.count, self._settings.disk)
        return self._on_disk

    def _open_disk(self, files: DiskFiles, format_: PoolFormat) -> TierBlocks:
        blocks = TierBlocks(files.open(format_), open_policy(self._settings.policy))
        restore(blocks, files.scan())
        return blocks

    def _decide(self, event: PoolEvent) -> None:
        if self._core is not None:
            for command in self._core.handle(event, time.monotonic()):
                self._obey(command)

    def _obey(self, command: PoolCommand) -> None:
        match command:
            case TellWorker(worker=worker, message=message):
                if worker in self._connection_of:
                    self._workers.tell(self._connection_of[worker], message)
            case DropWorker(worker=worker, reason=reason):
                self._break_with(self._connection_of[worker], reason)
            case TellRouter(router=router):
                self._lines[router].tell(self._update(command))
            case DropRouter(router=router, reason=reason):
                log.warning("a router is dropped: %s", reason)
                self._lines[router].drop(reason)
            case WriteSlots() | ReadSlots():
                assert self._disk is not None
                self._disk.put(command)
            case _:
                assert_never(command)

    def _update(self, command: TellRouter) -> PoolUpdate:
        return PoolUpdate(
            sequence=command.sequence,
            node=self._incarnation,
            addresses=self._workers.far_addresses,
            workers=command.workers,
            blocks=command.blocks,
        )


def open_files(settings: PoolNodeSettings) -> DiskFiles | None:
    """Raises ConfigError."""
    if settings.disk is None:
        return None
    return DiskFiles(Path(settings.disk).expanduser(), settings.disk_bytes)
