"""A worker of a simulated cluster: the real cores, and what its process would hold."""

from __future__ import annotations

from dataclasses import dataclass, field

from decode_worker.batch import Batch
from decode_worker.receiver import Receiver
from decode_worker.scheduler import DecodeScheduler
from kvpool.handoff import ScatterSlab, SlabFilled, SlabReplaced, SlabScattered, WriteSlab
from kvpool.leases import LeaseTable
from kvpool.slabs import SlabId, SlabPool
from kvpool.tables import BlockTables
from kvrelay.messages import WorkerHello
from kvrelay.types import Incarnation, RequestKey, Role
from prefill_worker.scheduler import PrefillScheduler
from tests.sim.model import BLOCK, LAYOUT, SLAB_TOKENS, Content, Memory
from tests.sim.simulation import LEASE_S

MAX_RUNNING = 8

Slab = tuple[int, int, Content]
"""lease, first position, content"""
EMPTY: Slab = (0, 0, [])


@dataclass(slots=True)
class Worker:
    """One process life. `routes` is what its loop keeps: # key |-> the stream it came over"""

    hello: WorkerHello
    tables: BlockTables
    prefill: PrefillScheduler
    decode: DecodeScheduler
    memory: Memory = field(default_factory=Memory)
    routes: dict[RequestKey, int] = field(default_factory=dict)
    streams: set[int] = field(default_factory=set)
    links: dict[Incarnation, int] = field(default_factory=dict)  # peer |-> connection
    regions: dict[str, Slab] = field(default_factory=dict)  # of its own slabs
    busy: set[str] = field(default_factory=set)

    @property
    def incarnation(self) -> Incarnation:
        return self.hello.incarnation

    def fill(self, job: WriteSlab, content: Content) -> SlabFilled:
        """A peer writes."""
        lent = job.lent
        lease = self.decode.receiver.slabs._leases.get(lent.slab_id)
        assert lease is not None, "a slab was freed under its writer"
        assert lease.lease_id == lent.lease_id, "a slab was lent again under its writer"
        self.regions[lent.region] = (lent.lease_id, job.start, content)
        return SlabFilled(
            key=lent.key, piece=lent.piece, slab_id=lent.slab_id, lease_id=lent.lease_id
        )

    def scatter(self, job: ScatterSlab) -> SlabScattered:
        filled = job.filled
        lease, start, content = self.regions[self.decode.receiver.regions[filled.slab_id]]
        assert lease == filled.lease_id, "someone wrote into a slab that was not lent to it"
        self.memory.put(job.tables, start, content)
        return SlabScattered(
            key=filled.key,
            piece=filled.piece,
            slab_id=filled.slab_id,
            lease_id=filled.lease_id,
            bytes=1,
            seconds=0,
        )

    def replace(self, slab_id: SlabId, region: str) -> SlabReplaced:
        del self.regions[self.decode.receiver.regions[slab_id]]
        self.regions[region] = EMPTY
        return SlabReplaced(slab_id=slab_id, region=region)

    def validate(self) -> None:
        self.prefill.validate()
        self.decode.validate()


def make_worker(name: str, role: Role, life: int, *, blocks: int, slabs: int) -> Worker:
    incarnation = Incarnation(f"{name}.{life}")
    tables = BlockTables(LAYOUT, blocks)
    regions = {SlabId(i): f"{incarnation}-{i}" for i in range(slabs)}
    receiver = Receiver(
        tables=tables,
        slabs=SlabPool(SLAB_TOKENS * LAYOUT.bytes_per_token, slabs),
        regions=regions,
        leases=LeaseTable(LEASE_S),
    )
    hello = WorkerHello(
        name=name,
        incarnation=incarnation,
        role=role,
        device="cpu",
        transport="sim",
        transfer_address=f"sim:{incarnation}",
        fingerprint="f",
        architecture="Hash",
        block_size=BLOCK,
        total_blocks=blocks,
        max_model_len=blocks * BLOCK,
        max_running_requests=MAX_RUNNING,
        prefill_chunk_tokens=12,
        vocab_size=50,
    )
    return Worker(
        hello=hello,
        tables=tables,
        prefill=PrefillScheduler(tables=tables, chunk_tokens=12, slab_tokens=SLAB_TOKENS),
        decode=DecodeScheduler(
            receiver=receiver,
            batch=Batch(tables=tables, chunk_tokens=12),
            max_running=MAX_RUNNING,
        ),
        regions=dict.fromkeys(regions.values(), EMPTY),
    )
