"""The transfer threads of a worker: they collate blocks into lent slabs, scatter filled ones, and
read peers' blocks.

They run beside the device thread, on blocks that no step writes: a prompt's finished chunks on one
side, blocks reserved for a handoff on the other.

The copies over each connection have lanes of their own: if one hangs, it holds up none of another
peer, nor of the peer's next connection. Where a slab can't be mapped, the next is gathered while
one is sent. What touches this worker's memory only has one lane. Slabs are replaced in another, as
their peers must hear of it.

On a device a job is queued behind the one before. The next of its lane is prepared meanwhile, and
then this one is waited for by its event and told of: in order, and by the same thread. One behind
which no other waits is waited for at once, as a prompt's first token may hang on it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from cluster.process.trace import NO_TRACE, Trace, Value
from cluster.worker.lanes import Lanes
from cluster.worker.peers import PeerLinks
from engine.core.step import KvMove
from engine.device.threads import use_threads
from kvpool.core.transfer.commands import (
    FetchPiece,
    PieceFetched,
    ReplaceSlab,
    ScatterSlab,
    SlabReplaced,
    SlabScattered,
    SlabWritten,
    WriteSlab,
)
from kvpool.core.transfer.messages import BlocksDigested, DigestBlocks, SlabFilled
from kvpool.core.transfer.pull import BlocksPulled, PullBlocks
from kvpool.core.transfer.slabs import HEADER_BYTES, SlabId
from kvpool.core.transfer.write import Side, SlabWrite
from kvpool.memory.collate import Slab, read_slab, write_slab
from kvpool.memory.digest import digest
from kvpool.memory.direct import fetch
from kvpool.memory.kv_memory import KvMemory
from kvpool.transport.endpoints import SharedRegion, scheme_of
from kvpool.transport.peer.base import Connection, RegionName
from kvpool.transport.send_buffers import SendBuffers
from kvrelay.errors import PeerError
from kvrelay.types import RequestKey

_Wait = Callable[[], None]
"""Returns when the device has done something."""
_Tell = Callable[[float], None]
"""Tells of a job that is done. Hears how long it took, in seconds, without the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Untold:
    """The device does it while its thread prepares the next. `memory` stays mapped meanwhile."""

    wait: _Wait
    tell: _Tell
    started_s: float
    memory: Slab


class _Thread(threading.local):
    """What a thread of a lane has of its own."""

    untold: _Untold | None = None
    told_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Send:
    """The first `nbytes` of `staging` go to the slab that was lent for `job`."""

    job: WriteSlab
    connection: Connection
    staging: SharedRegion
    nbytes: int
    gathered: _Wait
    gathered_s: float


Job = KvMove | PullBlocks | _Send
_OWN, _REGIONS = "own", "regions"
_Outcome = SlabWritten | SlabScattered | PieceFetched | SlabReplaced | BlocksPulled | BlocksDigested


class Mover:
    """`regions[slab]` is the registered memory of this worker's own staging slabs."""

    def __init__(
        self,
        memory: KvMemory,
        links: PeerLinks,
        fingerprint: str,
        *,
        slabs: int,
        slab_bytes: int,
        post: Callable[[_Outcome], None],
        crashed: Callable[[BaseException], None],
        trace: Trace = NO_TRACE,
    ) -> None:
        self._memory = memory
        self._links = links
        self._fingerprint = fingerprint
        self._post = post
        self._trace = trace
        self._slab_bytes = slab_bytes
        self.regions: dict[SlabId, SharedRegion] = {
            SlabId(i): links.endpoints.register(self._slab_bytes) for i in range(slabs)
        }
        self._buffers = SendBuffers(links.endpoints, slab_bytes)
        self._thread = _Thread()
        self._lanes: Lanes[Job] = Lanes(
            "kvrelay-mover", self._move, crashed, rest=self._rest, around=self._beside
        )

    def put(self, job: Job) -> None:
        """Never waits."""
        self._lanes.put(self._lane_of(job), job)

    def close(self) -> None:
        """Drops the jobs that have not begun."""
        self._buffers.close()
        self._lanes.close()
        for region in self.regions.values():
            self._links.endpoints.deregister(region)
        self.regions.clear()

    def _lane_of(self, job: Job) -> str:
        match job:
            case _Send():
                return f"send {id(job.connection):x}"
            case WriteSlab(peer=peer) | FetchPiece(peer=peer) | PullBlocks(peer=peer):
                return self._links.line(peer)
            case ReplaceSlab():
                return _REGIONS
            case ScatterSlab() | DigestBlocks():
                return _OWN

    def _beside(self) -> AbstractContextManager[object]:
        use_threads(1)
        return self._memory.beside()

    def _move(self, job: Job) -> None:
        match job:
            case WriteSlab():
                self._write(job)
            case _Send():
                self._send(job)
            case ScatterSlab():
                self._scatter(job)
            case FetchPiece():
                self._fetch(job)
            case PullBlocks():
                self._pull(job)
            case DigestBlocks():
                self._tell_last()
                self._post(self._digest(job))
            case ReplaceSlab(slab_id=slab_id):
                self._post(self._replace(slab_id))

    def _tell(self, tell: _Tell, started_s: float, memory: Slab | None) -> None:
        """Once all that this thread has queued is done. `memory`: another one than the pool's that
        is copied from or to; where it is no device's, that is done already."""
        self._tell_last()
        if self._memory.queues and memory is not None and memory.is_cuda:
            wait = self._memory.mark()
            self._thread.untold = _Untold(wait=wait, tell=tell, started_s=started_s, memory=memory)
        else:
            self._memory.settle()
            self._told(tell, started_s)

    def _tell_last(self) -> None:
        """The thread's job before this one goes first."""
        untold, self._thread.untold = self._thread.untold, None
        if untold is not None:
            untold.wait()
            self._told(untold.tell, untold.started_s)

    def _rest(self) -> None:
        """No other job waits. Whoever asks the stream hears of its end sooner than an event
        tells."""
        if self._thread.untold is not None:
            self._memory.settle()
        self._tell_last()

    def _told(self, tell: _Tell, started_s: float) -> None:
        now_s = time.monotonic()
        tell(now_s - max(started_s, self._thread.told_s))
        self._thread.told_s = now_s

    def _write(self, job: WriteSlab) -> None:
        """Into the peer's slab, or into staging that is sent next."""
        started_s = time.monotonic()
        try:
            connection = self._links.connection(job.peer)
            window = connection.window(RegionName(job.lent.region))
            if window is None:
                self._tell_last()
                self.put(self._staged(job, connection, started_s))
                return
            self._gather(job, window)
        except PeerError as failure:
            self._tell(partial(self._tell_written, job, error=str(failure)), started_s, None)
        else:
            self._tell(partial(self._tell_filled, job), started_s, window)

    def _staged(self, job: WriteSlab, connection: Connection, started_s: float) -> _Send:
        staging = self._buffers.take(connection, HEADER_BYTES + job.write.nbytes)
        try:
            memory = staging.memory_on(scheme_of(connection.peer_address))
            nbytes = self._gather(job, memory)
        except PeerError:
            self._buffers.give_back(connection, staging)
            raise
        return _Send(
            job=job,
            connection=connection,
            staging=staging,
            nbytes=nbytes,
            gathered=self._memory.mark(),
            gathered_s=time.monotonic() - started_s,
        )

    def _gather(self, job: WriteSlab, slab: Slab) -> int:
        with self._trace.queued("gather", **_facts(job.lent.key, job.lent.piece, job.write)):
            return write_slab(
                self._memory,
                job.tables,
                job.piece,
                job.write,
                fingerprint=self._fingerprint,
                lease_id=job.lent.lease_id,
                window=slab,
            )

    def _send(self, send: _Send) -> None:
        started_s, error, job = time.monotonic(), None, send.job
        memory = send.staging.memory_on(scheme_of(send.connection.peer_address))
        try:
            with self._trace.span("write", **_facts(job.lent.key, job.lent.piece, job.write)):
                send.gathered()
                region = RegionName(job.lent.region)
                send.connection.write(region, 0, memory[: send.nbytes])
        except PeerError as failure:
            error = str(failure)
        self._buffers.give_back(send.connection, send.staging)
        seconds = send.gathered_s + time.monotonic() - started_s
        if error is None:
            self._tell_filled(job, seconds)
        else:
            self._tell_written(job, seconds, error)

    def _tell_filled(self, job: WriteSlab, seconds: float) -> None:
        """First the peer, who scatters it."""
        error, lent = None, job.lent
        filled = SlabFilled(
            key=lent.key, piece=lent.piece, slab_id=lent.slab_id, lease_id=lent.lease_id
        )
        try:
            self._links.notify(job.peer, filled)
        except PeerError as failure:
            error = str(failure)
        self._tell_written(job, seconds, error)

    def _tell_written(self, job: WriteSlab, seconds: float, error: str | None = None) -> None:
        self._post(
            SlabWritten(
                key=job.lent.key,
                piece=job.lent.piece,
                bytes=job.write.nbytes,
                seconds=seconds,
                error=error,
            )
        )

    def _scatter(self, job: ScatterSlab) -> None:
        started_s, error, filled = time.monotonic(), None, job.filled
        slab: Slab | None = None
        try:
            slab = self.regions[filled.slab_id].memory_on(self._links.scheme(job.peer))
            with self._trace.queued("scatter", **_facts(filled.key, filled.piece, job.write)):
                read_slab(
                    self._memory,
                    job.tables,
                    job.piece,
                    job.write,
                    fingerprint=self._fingerprint,
                    lease_id=filled.lease_id,
                    window=slab,
                )
        except PeerError as failure:
            error = str(failure)

        def tell(seconds: float) -> None:
            scattered = SlabScattered(
                key=filled.key,
                piece=filled.piece,
                slab_id=filled.slab_id,
                lease_id=filled.lease_id,
                bytes=job.write.nbytes,
                seconds=seconds,
                error=error,
            )
            self._post(scattered)

        self._tell(tell, started_s, slab)

    def _fetch(self, job: FetchPiece) -> None:
        started_s = time.monotonic()
        with self._trace.queued("fetch", **_facts(job.key, job.piece, job.write)):
            window, error = self._read(job)

        def tell(seconds: float) -> None:
            fetched = PieceFetched(
                key=job.key,
                piece=job.piece,
                bytes=job.write.nbytes,
                seconds=seconds,
                error=error,
            )
            self._post(fetched)

        self._tell(tell, started_s, window)

    def _pull(self, job: PullBlocks) -> None:
        started_s = time.monotonic()
        window, error = self._read(job)

        def tell(seconds: float) -> None:
            nbytes = job.write.nbytes
            self._post(BlocksPulled(pull=job.pull, bytes=nbytes, seconds=seconds, error=error))

        self._tell(tell, started_s, window)

    def _digest(self, job: DigestBlocks) -> BlocksDigested:
        with self._trace.span("digest", request=job.holder.key.request_id):
            digests = digest(self._memory, job.tables, job.span)
        return BlocksDigested(holder=job.holder, digests=digests)

    def _read(self, job: FetchPiece | PullBlocks) -> tuple[Slab | None, str | None]:
        """The peer's pool, if it is mapped; and why it failed, if it did."""
        window = None
        target = Side(tables=job.tables, block_size=self._memory.layout.block_size)
        try:
            connection = self._links.connection(job.peer)
            window = connection.window(RegionName(job.kv.region))
            if window is None:
                self._tell_last()  # this read returns when it is done
            fetch(self._memory, target, connection, job.kv, job.source, job.write)
        except PeerError as failure:
            return window, str(failure)
        return window, None

    def _replace(self, slab_id: SlabId) -> SlabReplaced:
        self._links.endpoints.deregister(self.regions[slab_id])
        self.regions[slab_id] = self._links.endpoints.register(self._slab_bytes)
        return SlabReplaced(slab_id=slab_id, region=self.regions[slab_id].name)


def _facts(key: RequestKey, piece: int, write: SlabWrite) -> dict[str, Value]:
    """What a trace says of a piece; `end` is the token that it goes up to."""
    return {
        "request": key.request_id,
        "piece": piece,
        "bytes": write.nbytes,
        "end": max(section.start + section.tokens for section in write.sections),
        "last_layer": write.last_layer,
    }
