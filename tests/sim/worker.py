"""A worker of a simulated cluster: the real cores, and what its process would hold."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

from cluster.worker.streams import Preloads
from decode_worker.batch import Batch
from decode_worker.reservations import Reservations
from decode_worker.running_set import TierShares
from decode_worker.scheduler import DecodeScheduler
from engine.core.prompt_order import Order
from engine.core.step_times import LinearTimes
from kvpool.core.blocks.leases import LeaseTable
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.fetch.openings import Openings
from kvpool.core.fetch.pool_fetch import Restores
from kvpool.core.fetch.write_behind import WriteBehind
from kvpool.core.layout.layout import KvLayout
from kvpool.core.transfer.commands import (
    FetchPiece,
    PieceFetched,
    ScatterSlab,
    SlabReplaced,
    SlabScattered,
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
from kvpool.core.transfer.slabs import SlabId, SlabPool
from kvpool.core.transfer.write import Side
from kvrelay.messages import WorkerHello
from kvrelay.types import WIRE_VERSION, Incarnation, RequestKey, Role, StepCoefficients
from prefill_worker.scheduler import PrefillScheduler
from tests.sim.model import LAYOUT, SLAB_BYTES, TIERS, AnyWorth, Content, Memory
from tests.sim.pool_side import PoolSide
from tests.sim.simulation import LEASE_S

MAX_RUNNING = 8
TIMES = LinearTimes(prefill_token_s=0.005, decode_knots=((1, 0.01), (8, 0.08)))
CANARY_EVERY = 2

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

    @property
    def longest_tokens(self) -> int:
        return self.max_model_len or self.blocks * self.layout.block_size


@dataclass(slots=True)
class Worker:
    """One process life. `routes` is what its loop keeps: # key |-> the stream it came over"""

    shape: Shape
    hello: WorkerHello
    openings: Openings
    prefill: PrefillScheduler
    decode: DecodeScheduler
    memory: Memory
    preloads: Preloads
    pool: PoolSide | None = None
    routes: dict[RequestKey, int] = field(default_factory=dict)
    streams: set[int] = field(default_factory=set)
    links: dict[Incarnation, int] = field(default_factory=dict)  # peer |-> connection
    regions: dict[str, Slab] = field(default_factory=dict)  # of its own slabs
    stepping: PrefillScheduler | DecodeScheduler | None = None
    turns: deque[PrefillScheduler | DecodeScheduler] = field(init=False)

    def __post_init__(self) -> None:
        self.turns = deque([self.decode, self.prefill])

    @property
    def incarnation(self) -> Incarnation:
        return self.hello.incarnation

    @property
    def tables(self) -> BlockTables:
        return self.openings.tables

    @property
    def peer_hello(self) -> PeerHello:
        facts = KvFacts(
            dtype=self.shape.layout.dtype,
            block_size=self.shape.layout.block_size,
            blocks=self.shape.blocks,
            slab_bytes=self.shape.slab_bytes,
            region="pool",
        )
        return PeerHello(
            wire_version=WIRE_VERSION,
            incarnation=self.incarnation,
            fingerprint="f",
            kv=facts,
        )

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

    def digest(self, job: DigestBlocks) -> BlocksDigested:
        digest = self.memory.digest(job.tables, job.span)
        return BlocksDigested(holder=job.holder, digests=(digest,))

    def scatter(self, job: ScatterSlab) -> SlabScattered:
        filled = job.filled
        lease, piece, content = self.regions[
            self.decode.reservations.grants.regions[filled.slab_id]
        ]
        assert lease == filled.lease_id, "someone wrote into a slab that was not lent to it"
        assert piece == job.piece, "another piece than was announced"
        side = Side(tables=job.tables, block_size=self.shape.layout.block_size)
        self.memory.put(job.write, side, content)
        return SlabScattered(
            key=filled.key,
            piece=filled.piece,
            slab_id=filled.slab_id,
            lease_id=filled.lease_id,
            bytes=job.write.nbytes,
            seconds=0,
        )

    def _region_of(self, slab_id: SlabId) -> str:
        return self.decode.reservations.grants.regions[slab_id]

    def replace(self, slab_id: SlabId, region: str) -> SlabReplaced:
        del self.regions[self._region_of(slab_id)]
        self.regions[region] = EMPTY
        return SlabReplaced(slab_id=slab_id, region=region)

    def validate(self) -> None:
        if self.openings.restores is not None:
            self.openings.restores.validate()
        self.prefill.validate()
        self.decode.validate()


@dataclass(slots=True)
class Fetch:
    """A read of a peer's blocks under way: each byte is what it was when it was read."""

    reader: Worker
    owner: Memory
    job: FetchPiece
    content: Content = field(default_factory=list)

    def first_half(self) -> None:
        everything = self.owner.take(self.job.write, self.job.source)
        self.content = everything[: len(everything) // 2]

    def second_half(self) -> PieceFetched:
        self.content += self.owner.take(self.job.write, self.job.source)[len(self.content) :]
        block_size = self.reader.shape.layout.block_size
        side = Side(tables=self.job.tables, block_size=block_size)
        self.reader.memory.put(self.job.write, side, self.content)
        return fetched(self.job)


def fetched(job: FetchPiece, error: str | None = None) -> PieceFetched:
    return PieceFetched(
        key=job.key, piece=job.piece, bytes=job.write.nbytes, seconds=0, error=error
    )


def make_worker(name: str, life: int, shape: Shape) -> Worker:
    incarnation = Incarnation(f"{name}.{life}")
    tables = BlockTables(shape.layout, shape.blocks)
    openings = _openings(tables, shape, life)
    regions = {SlabId(i): f"{incarnation}-{i}" for i in range(shape.slabs)}
    reservations = Reservations(
        tables=tables,
        slabs=SlabPool(shape.slab_bytes, shape.slabs),
        regions=regions,
        leases=LeaseTable(LEASE_S),
        mode=shape.mode,
    )
    hello = WorkerHello(
        name=name,
        incarnation=incarnation,
        role=shape.role,
        device="cpu",
        transport="sim",
        transfer_addresses=(f"sim:{incarnation}",),
        fingerprint="f",
        architecture="Hash",
        block_size=shape.layout.block_size,
        total_blocks=shape.blocks,
        max_model_len=shape.longest_tokens,
        max_running_requests=MAX_RUNNING,
        prefill_chunk_tokens=12,
        vocab_size=50,
        step_times=StepCoefficients(),
    )
    return Worker(
        shape=shape,
        hello=hello,
        openings=openings,
        preloads=Preloads(tables, shape.longest_tokens),
        prefill=PrefillScheduler(
            openings=openings,
            chunk_tokens=12,
            mode=shape.mode,
            canary_every=CANARY_EVERY,
            order=Order(qos=TIERS, times=TIMES),
        ),
        decode=DecodeScheduler(
            reservations=reservations,
            batch=Batch(
                openings=openings,
                chunk_tokens=12,
                shares=TierShares(slots=MAX_RUNNING, qos=TIERS),
                times=TIMES,
            ),
        ),
        memory=Memory(shape.layout),
        regions=dict.fromkeys(regions.values(), EMPTY),
    )


def _openings(tables: BlockTables, shape: Shape, life: int) -> Openings:
    if not shape.host:
        return Openings(tables=tables)
    tables.cache.reports = True
    cost = AnyWorth(tables.layout.block_size, rng=Random(life))
    return Openings(
        tables=tables,
        restores=Restores(tables=tables, cost=cost),
        write_behind=WriteBehind(tables),
    )
