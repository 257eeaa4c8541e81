"""What a simulated worker has in place of connections to its peers and of its transfer thread.

The network between simulated workers, and the copies at its ends.

Every worker has one way out and one way in, each of the fabric's bandwidth; transfers take turns on
each, first come first served. A transfer that finds the receiver busy does not hold up its sender,
whose switch keeps it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.config.simulation import FabricSection as FabricConfig
from cluster.core.worker.events import CoreEvent
from cluster.sim.machines.clock import Clock
from kvpool.core.transfer.commands import (
    FetchPiece,
    FromPeer,
    LinkMeasured,
    PieceFetched,
    ReplaceSlab,
    ScatterSlab,
    SendPeer,
    SlabReplaced,
    SlabScattered,
    SlabWritten,
    WriteSlab,
)
from kvpool.core.transfer.link_cost import LinkCost
from kvpool.core.transfer.messages import (
    BlocksDigested,
    DigestBlocks,
    KvDigest,
    PeerHello,
    SlabFilled,
)
from kvpool.core.transfer.pull import BlocksPulled, PullBlocks
from kvrelay.counters import LinkState
from kvrelay.types import Incarnation


@dataclass(slots=True)
class Fabric:
    config: FabricConfig
    moved_bytes: int = 0
    _out_free_s: defaultdict[Incarnation, float] = field(default_factory=lambda: defaultdict(float))
    _in_free_s: defaultdict[Incarnation, float] = field(default_factory=lambda: defaultdict(float))
    _copies_free_s: defaultdict[Incarnation, float] = field(
        default_factory=lambda: defaultdict(float)
    )

    def move(self, source: Incarnation, target: Incarnation, nbytes: int, now_s: float) -> float:
        """When the last byte is there."""
        seconds = nbytes / self.config.bandwidth
        begun_s = max(now_s, self._out_free_s[source])
        self._out_free_s[source] = begun_s + seconds
        received_s = max(begun_s, self._in_free_s[target])
        self._in_free_s[target] = received_s + seconds
        self.moved_bytes += nbytes
        return received_s + seconds

    def copy(self, worker: Incarnation, nbytes: int, now_s: float) -> float:
        """When it is gathered, or scattered."""
        begun_s = max(now_s, self._copies_free_s[worker])
        self._copies_free_s[worker] = begun_s + nbytes / self.config.copy_bandwidth
        return self._copies_free_s[worker]

    def cost(self) -> LinkCost:
        """Of any link, as a worker would measure it."""
        return LinkCost(
            transport="simulated",
            latency_s=self.config.latency,
            bytes_per_s=self.config.bandwidth,
            descriptor_s=0.0,
            direct_bytes_per_s=self.config.bandwidth,
            gather_bytes_per_s=self.config.copy_bandwidth,
            scatter_bytes_per_s=self.config.copy_bandwidth,
            run_s=0.0,
        )


Post = Callable[[Sequence[CoreEvent]], None]


class SimLinks:
    """`posts` are the workers' own inboxes; messages between two arrive in order, those of one
    turn together."""

    def __init__(
        self, clock: Clock, fabric: Fabric, hello: PeerHello, posts: Mapping[Incarnation, Post]
    ) -> None:
        self.hello = hello
        self._clock = clock
        self._fabric = fabric
        self._latency_s = fabric.config.latency
        self._posts = posts
        self._met: set[Incarnation] = set()
        self.lost: set[Incarnation] = set()
        self.states: tuple[LinkState, ...] = ()
        self.outbox: dict[Incarnation, list[CoreEvent]] = {}

    def send(self, command: SendPeer) -> None:
        if command.peer not in self._met:
            self.meet(command.peer)
        self._put(command.peer, FromPeer(peer=self.hello.incarnation, message=command.message))

    def _put(self, peer: Incarnation, event: CoreEvent) -> None:
        self.outbox.setdefault(peer, []).append(event)

    def flush(self) -> None:
        """At the end of a turn."""
        for peer, events in self.outbox.items():
            self._clock.after(self._latency_s, self._posts[peer], events)
        self.outbox = {}

    def lose(self, peer: Incarnation) -> bool:
        """Whether it was known. What still comes of it isn't heard."""
        self.lost.add(peer)
        if peer not in self._met:
            return False
        self._met.remove(peer)
        self.outbox.pop(peer, None)
        self.states = tuple(state for state in self.states if state.peer != peer)
        return True

    def meet(self, peer: Incarnation) -> None:
        """Each side says hello once; the other knows what the link costs as soon as it hears it."""
        if peer in self._met:
            return
        self._met.add(peer)
        me, cost = self.hello.incarnation, self._fabric.cost()
        state = LinkState(
            peer=peer,
            transport="simulated",
            bytes_per_s=cost.bytes_per_s,
            latency_s=cost.latency_s,
        )
        self.states = (*self.states, state)
        self._put(peer, FromPeer(peer=me, message=self.hello))
        self._put(peer, LinkMeasured(peer=me, cost=cost))


Copy = WriteSlab | ScatterSlab | FetchPiece | PullBlocks


class SimMover:
    """Gathers, sends, scatters and reads, in the time of the fabric. With `job_s` each job takes so
    long besides, and those with one peer wait for one another, as in a worker's lanes."""

    def __init__(
        self,
        clock: Clock,
        fabric: Fabric,
        me: Incarnation,
        posts: Mapping[Incarnation, Post],
        job_s: float | None = None,
    ) -> None:
        self._clock = clock
        self._fabric = fabric
        self._me = me
        self._posts = posts
        self._job_s = job_s
        self._lanes: defaultdict[Incarnation, deque[Copy]] = defaultdict(deque)
        self._copies: dict[type, Callable[[Any], float]] = {
            WriteSlab: self._write,
            ScatterSlab: self._scatter,
            FetchPiece: self._read,
            PullBlocks: self._read,
        }

    @property
    def executors(self) -> dict[type, Callable[[Any], None]]:
        """# job |-> who does it"""
        found: dict[type, Callable[[Any], None]] = dict.fromkeys(self._copies, self._put)
        return found | {DigestBlocks: self._digest, ReplaceSlab: self._replace}

    def _put(self, job: Copy) -> None:
        if self._job_s is None:
            self._copies[type(job)](job)
            return
        lane = self._me if isinstance(job, ScatterSlab) else job.peer
        self._lanes[lane].append(job)
        if len(self._lanes[lane]) == 1:
            self._clock.after(self._job_s, self._begin, lane)

    def _begin(self, lane: Incarnation) -> None:
        job = self._lanes[lane][0]
        self._clock.at(self._copies[type(job)](job), self._end, lane)

    def _end(self, lane: Incarnation) -> None:
        assert self._job_s is not None
        self._lanes[lane].popleft()
        if self._lanes[lane]:
            self._clock.after(self._job_s, self._begin, lane)

    def _digest(self, job: DigestBlocks) -> None:
        same = KvDigest(start=job.span.start, planes=())
        self._later(0.0, BlocksDigested(holder=job.holder, digests=(same,)))

    def _replace(self, job: ReplaceSlab) -> None:
        region = f"{self._me}-{job.slab_id}"
        self._later(0.0, SlabReplaced(slab_id=job.slab_id, region=region))

    def _later(self, at_s: float, event: CoreEvent) -> None:
        self._clock.at(max(at_s, self._clock.now_s), self._posts[self._me], (event,))

    def _write(self, job: WriteSlab) -> float:
        """When it is done, as of the others."""
        now_s, nbytes, lent = self._clock.now_s, job.write.nbytes, job.lent
        gathered_s = self._fabric.copy(self._me, nbytes, now_s)
        there_s = self._fabric.move(self._me, job.peer, nbytes, gathered_s)
        filled = SlabFilled(
            key=lent.key, piece=lent.piece, slab_id=lent.slab_id, lease_id=lent.lease_id
        )
        event = FromPeer(peer=self._me, message=filled)
        self._clock.at(there_s + self._fabric.config.latency, self._posts[job.peer], (event,))
        written = SlabWritten(key=lent.key, piece=lent.piece, bytes=nbytes, seconds=there_s - now_s)
        self._later(there_s, written)
        return there_s

    def _scatter(self, job: ScatterSlab) -> float:
        now_s, filled = self._clock.now_s, job.filled
        done_s = self._fabric.copy(self._me, job.write.nbytes, now_s)
        scattered = SlabScattered(
            key=filled.key,
            piece=filled.piece,
            slab_id=filled.slab_id,
            lease_id=filled.lease_id,
            bytes=job.write.nbytes,
            seconds=done_s - now_s,
        )
        self._later(done_s, scattered)
        return done_s

    def _read(self, job: FetchPiece | PullBlocks) -> float:
        now_s, nbytes = self._clock.now_s, job.write.nbytes
        asked_s = now_s + self._fabric.config.latency
        done_s = self._fabric.move(job.peer, self._me, nbytes, asked_s)
        seconds = done_s - now_s
        if isinstance(job, FetchPiece):
            self._later(
                done_s,
                PieceFetched(key=job.key, piece=job.piece, bytes=nbytes, seconds=seconds),
            )
        else:
            self._later(done_s, BlocksPulled(pull=job.pull, bytes=nbytes, seconds=seconds))
        return done_s
