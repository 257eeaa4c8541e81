"""A worker of a simulated cluster: the real core and the real loop, over a pretended device."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from cluster.config.load import load_config
from cluster.core.desired import pool_of
from cluster.core.plan import worker_settings
from cluster.core.resolve import resolve
from cluster.core.settings import WorkerSettings
from cluster.core.worker.build import build_worker_core
from cluster.core.worker.core import WorkerCore
from cluster.core.worker.events import DropPeer, MoveJob
from cluster.sim.simulation import NOWHERE
from cluster.worker.events import Incoming, RunOnLoop
from cluster.worker.loop import WorkerLoop
from decode_worker.scheduler import DecodeScheduler
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.fetch.pool_stores import PoolStores
from kvpool.core.layout.layout import KvLayout
from kvpool.core.transfer.commands import (
    DropLink,
    FetchPiece,
    PieceFetched,
    ReplaceSlab,
    ScatterSlab,
    SendPeer,
    SlabReplaced,
    SlabScattered,
    SlabWritten,
    WriteSlab,
)
from kvpool.core.transfer.messages import (
    BlocksDigested,
    DigestBlocks,
    HandoffMode,
    PeerHello,
    SlabFilled,
)
from kvpool.core.transfer.piece import Piece
from kvpool.core.transfer.pool_map import KvFacts
from kvpool.core.transfer.pull import BlocksPulled, PullBlocks
from kvpool.core.transfer.slabs import HEADER_BYTES, SlabId, Staging
from kvpool.core.transfer.write import Side
from kvrelay.counters import LinkState
from kvrelay.messages import WorkerHello
from kvrelay.qos import QosTiers
from kvrelay.types import WIRE_VERSION, Incarnation, Role
from prefill_worker.scheduler import PrefillScheduler
from tests.sim.device import TIMES, Device
from tests.sim.model import LAYOUT, NAMES, SLAB_BYTES, TIERS, AnyWorth, Content, Memory
from tests.sim.simulation import LEASE_S

if TYPE_CHECKING:
    from tests.sim.peers import PeerNet
    from tests.sim.pool_links import SimulatedPoolLinks

MAX_RUNNING = 8
CHUNK_TOKENS = 12
LATE_SHARE = 0.1
"""How often a loop comes round late, so that several events wait for it."""
_CONFIG = resolve(load_config(None), NOWHERE)
_PLAIN = replace(
    worker_settings(_CONFIG, _CONFIG.workers[0], "w"),
    max_running_requests=MAX_RUNNING,
    canary_every=2,
    lease_ttl_s=LEASE_S,
)

Slab = tuple[int, Piece | None, Content]
"""lease, what is said to be in it, content"""
EMPTY: Slab = (0, None, [])


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How a worker is set up."""

    role: Role
    blocks: int
    slabs: int = 2
    slab_bytes: int = SLAB_BYTES
    layout: KvLayout = LAYOUT
    mode: HandoffMode = HandoffMode.PUSH
    max_model_len: int | None = None  # None: all blocks
    host: str = ""  # whose pool it uses
    staging_blocks: int = 2
    launches_ahead: bool = False
    prompt_steps: int = 1
    stages: int = 1
    chunk_tokens: int = CHUNK_TOKENS
    qos: QosTiers = TIERS

    @property
    def longest_tokens(self) -> int:
        return self.max_model_len or self.blocks * self.layout.block_size

    @property
    def may_be_ahead(self) -> int:
        return max(int(self.launches_ahead), self.prompt_steps - 1)

    def settings(self, name: str) -> WorkerSettings:
        return replace(
            _PLAIN,
            prefill_chunk_tokens=self.chunk_tokens,
            name=name,
            role=self.role,
            handoff=self.mode,
            qos=self.qos,
            pool_address=self.host or None,
        )


class Mover:
    """The transfer threads. A copy that `hangs` ends when the link that it began over does, and
    fails."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.hangs: Callable[[WriteSlab | FetchPiece | PullBlocks], bool] = lambda job: False
        self._hanging: dict[int | None, list[WriteSlab | FetchPiece | PullBlocks]] = {}
        self.moved_bytes = self.writes = self.fetches = self.pulls = self.hung = 0

    def put(self, job: MoveJob) -> None:
        if isinstance(job, WriteSlab | FetchPiece | PullBlocks) and self.hangs(job):
            link = self._worker.links.get(job.peer)
            self._hanging.setdefault(link, []).append(job)
            self.hung += 1
            return
        match job:
            case WriteSlab():
                self.writes += 1
                self._later(partial(self._write, job), peer=job.peer)
            case ScatterSlab():
                self._later(partial(self._scatter, job))
            case DigestBlocks():
                self._later(partial(self._digest, job))
            case ReplaceSlab(slab_id=slab_id):
                self._later(partial(self._replace, slab_id))
            case FetchPiece() | PullBlocks():
                self._fetch(job)

    def broken(self, link: int) -> None:
        """Its copies end, a little later."""
        for job in self._hanging.pop(link, []):
            self._later(partial(self._worker.post, _failed(job)), 0.5, job.peer)

    def _later(
        self, action: partial[None], scale_s: float = 0.01, peer: Incarnation | None = None
    ) -> None:
        name = self._worker.incarnation
        self._worker.net.by(name, f"mover {name} {peer}", action, scale_s)

    def _write(self, job: WriteSlab) -> None:
        worker, lent, error = self._worker, job.lent, None
        owner = worker.net.linked(worker, job.peer)
        if owner is None or lent.region not in owner.regions:
            error = "the region is gone"
        else:
            source = Side(tables=job.tables, block_size=worker.shape.layout.block_size)
            filled = owner.fill(job, worker.memory.take(job.write, source))
            self.moved_bytes += job.write.nbytes
            worker.net.send(worker, SendPeer(peer=job.peer, message=filled))
        nbytes = job.write.nbytes
        worker.post(
            SlabWritten(key=lent.key, piece=lent.piece, bytes=nbytes, seconds=0, error=error)
        )

    def _scatter(self, job: ScatterSlab) -> None:
        worker, filled = self._worker, job.filled
        lease, piece, content = worker.regions[worker.region_of(filled.slab_id)]
        assert lease == filled.lease_id, "someone wrote into a slab that was not lent to it"
        assert piece == job.piece, "another piece than was announced"
        side = Side(tables=job.tables, block_size=worker.shape.layout.block_size)
        worker.memory.put(job.write, side, content)
        worker.post(
            SlabScattered(
                key=filled.key,
                piece=filled.piece,
                slab_id=filled.slab_id,
                lease_id=filled.lease_id,
                bytes=job.write.nbytes,
                seconds=0,
            )
        )

    def _digest(self, job: DigestBlocks) -> None:
        digest = self._worker.memory.digest(job.tables, job.span)
        self._worker.post(BlocksDigested(holder=job.holder, digests=(digest,)))

    def _replace(self, slab_id: SlabId) -> None:
        worker = self._worker
        del worker.regions[worker.region_of(slab_id)]
        region = f"{worker.incarnation}-new-{worker.net.next_id()}"
        worker.regions[region] = EMPTY
        worker.post(SlabReplaced(slab_id=slab_id, region=region))

    def _fetch(self, job: FetchPiece | PullBlocks) -> None:
        """The reader maps the memory: it reads on, whatever becomes of the owner or the link. Each
        byte is what it was when it was read."""
        worker, read = self._worker, _Read(job)

        def begin() -> None:
            owner = worker.net.linked(worker, job.peer)
            if owner is not None:
                read.first_half(owner.memory)

        def end() -> None:
            if read.second_half(worker):
                self.moved_bytes += job.write.nbytes if isinstance(job, FetchPiece) else 0
                worker.post(_fetched(job, None))
            else:
                worker.post(_fetched(job, "it is gone"))

        self.fetches += isinstance(job, FetchPiece)
        self.pulls += isinstance(job, PullBlocks)
        self._later(partial(begin), peer=job.peer)
        self._later(partial(end), worker.net.random.choice([0.01, 0.1]), job.peer)


@dataclass(slots=True)
class _Read:
    job: FetchPiece | PullBlocks
    owner: Memory | None = None
    content: Content = field(default_factory=list)

    def first_half(self, owner: Memory) -> None:
        everything = owner.take(self.job.write, self.job.source)
        self.owner, self.content = owner, everything[: len(everything) // 2]

    def second_half(self, reader: Worker) -> bool:
        """False: there was nothing to read."""
        if self.owner is None:
            return False
        self.content += self.owner.take(self.job.write, self.job.source)[len(self.content) :]
        block_size = reader.shape.layout.block_size
        side = Side(tables=self.job.tables, block_size=block_size)
        reader.memory.put(self.job.write, side, self.content)
        return True


def _failed(job: WriteSlab | FetchPiece | PullBlocks) -> SlabWritten | PieceFetched | BlocksPulled:
    why = "its link is gone"
    if not isinstance(job, WriteSlab):
        return _fetched(job, why)
    lent = job.lent
    return SlabWritten(key=lent.key, piece=lent.piece, bytes=0, seconds=0, error=why)


def _fetched(job: FetchPiece | PullBlocks, error: str | None) -> PieceFetched | BlocksPulled:
    nbytes = job.write.nbytes
    if isinstance(job, PullBlocks):
        return BlocksPulled(pull=job.pull, bytes=nbytes, seconds=0, error=error)
    return PieceFetched(key=job.key, piece=job.piece, bytes=nbytes, seconds=0, error=error)


class Links:
    """The worker's ends of its connections to peers."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def send(self, command: SendPeer) -> None:
        self._worker.net.send(self._worker, command)

    def part(self, command: DropPeer) -> None:
        self._worker.net.cut(self._worker.incarnation, command.peer)

    def drop(self, command: DropLink) -> None:
        self._worker.net.drop(self._worker, command)

    def states(self) -> tuple[LinkState, ...]:
        return tuple(
            LinkState(peer=peer, transport="sim", bytes_per_s=1e6, latency_s=0.001)
            for peer in self._worker.links
        )


class Worker:
    """One process life."""

    def __init__(self, net: PeerNet, name: str, life: int, shape: Shape) -> None:
        self.net, self.shape = net, shape
        self.incarnation = Incarnation(f"{name}.{life}")
        self.memory = Memory(shape.layout)
        self.links: dict[Incarnation, int] = {}  # peer |-> connection
        regions = {SlabId(i): f"{self.incarnation}-{i}" for i in range(shape.slabs)}
        self.regions: dict[str, Slab] = dict.fromkeys(regions.values(), EMPTY)
        self.core = self._core(name, life, regions)
        self.hello = self._hello(name)
        self.device, self.mover = Device(self, shape.stages), Mover(self)
        self.pool: SimulatedPoolLinks | None = net.open_pool(self)
        self._inbox: queue.SimpleQueue[Incoming] = queue.SimpleQueue()
        self._turn_is_due = self._is_valid = False
        self.loop = WorkerLoop(
            self.core,
            self.device,
            Links(self),
            self.mover,
            self.pool,
            self._inbox,
            clock=lambda: net.now_s,
        )

    def _core(self, name: str, life: int, regions: dict[SlabId, str]) -> WorkerCore:
        shape = self.shape
        slab_bytes = HEADER_BYTES + shape.slab_bytes
        return build_worker_core(
            shape.settings(name),
            shape.layout,
            shape.blocks,
            NAMES,
            TIMES,
            Staging(slabs=shape.slabs, slab_bytes=slab_bytes, reason="small"),
            regions,
            max_model_len=shape.longest_tokens,
            cost=AnyWorth(shape.layout.block_size, rng=Random(life)),
            pool_stores=PoolStores(
                max_waiting_blocks=16, batch_blocks=4, max_stores=2, patience_s=5.0
            ),
            launches_ahead=shape.launches_ahead,
            prompt_steps=shape.prompt_steps,
        )

    def _hello(self, name: str) -> WorkerHello:
        layout = self.shape.layout
        return WorkerHello(
            name=name,
            pool=pool_of(name),
            incarnation=self.incarnation,
            role=self.shape.role,
            device="cpu",
            transport="sim",
            transfer_addresses=(f"sim:{self.incarnation}",),
            fingerprint=NAMES.fingerprint,
            architecture="Hash",
            block_size=layout.block_size,
            total_blocks=self.shape.blocks,
            max_model_len=self.shape.longest_tokens,
            max_running_requests=MAX_RUNNING,
            prefill_chunk_tokens=self.shape.chunk_tokens,
            mixed_chunk_tokens=CHUNK_TOKENS,
            vocab_size=50,
            physical_format=NAMES.physical_format,
            step_times=TIMES,
            handoff_by_pool=self.shape.mode is HandoffMode.POOL,
            kv_token_bytes=layout.bytes_per_token,
        )

    @property
    def peer_hello(self) -> PeerHello:
        layout = self.shape.layout
        facts = KvFacts(
            dtype=layout.dtype,
            block_size=layout.block_size,
            blocks=self.shape.blocks,
            slab_bytes=self.shape.slab_bytes,
            region="pool",
        )
        return PeerHello(
            wire_version=WIRE_VERSION,
            incarnation=self.incarnation,
            fingerprint=NAMES.fingerprint,
            kv=facts,
        )

    @property
    def tables(self) -> BlockTables:
        return self.core.tables

    @property
    def prefill(self) -> PrefillScheduler:
        return self.core.prefill

    @property
    def decode(self) -> DecodeScheduler:
        return self.core.decode

    # --- its loop -------------------------------------------------------------------------------

    def post(self, event: Incoming) -> None:
        """The loop comes round at once, or a little later, when more events may have come."""
        self._inbox.put(event)
        if self._turn_is_due:
            return
        if self.net.random.random() < LATE_SHARE:
            self._turn_is_due = True
            self.net.by(self.incarnation, f"loop {self.incarnation}", self._turn)
        else:
            self._turn()

    def _turn(self) -> None:
        self._turn_is_due = self._is_valid = False
        self.loop.turn()
        assert self._inbox.empty(), "the loop left events behind"

    def validate(self) -> None:
        """What must hold, if anything has happened since it was looked at."""
        if not self._is_valid:
            self.core.validate()
            self._is_valid = True

    def tick(self) -> None:
        """Time has passed without an event."""
        self.post(RunOnLoop(lambda: None))

    # --- its memory -----------------------------------------------------------------------------

    def region_of(self, slab_id: SlabId) -> str:
        return self.decode.reservations.grants.regions[slab_id]

    def fill(self, job: WriteSlab, content: Content) -> SlabFilled:
        """A peer writes."""
        lent = job.lent
        lease = self.decode.reservations.slabs._leases.get(lent.slab_id)
        assert lease is not None, "a slab was freed under its writer"
        assert lease.lease_id == lent.lease_id, "a slab was lent again under its writer"
        assert job.write.nbytes <= self.shape.slab_bytes
        self.regions[lent.region] = (lent.lease_id, job.piece, content)
        return SlabFilled(
            key=lent.key, piece=lent.piece, slab_id=lent.slab_id, lease_id=lent.lease_id
        )

    def held(self) -> Sequence[object]:
        """Who holds blocks, but for what is pinned."""
        return [one.holder for one in self.tables.held() if one.holder.side != "pinned"]
