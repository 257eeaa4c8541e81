"""A simulated worker: the loop, schedulers and blocks of a real one, over executors that only take
their time."""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.core.qos import prefill_order, tier_shares
from cluster.core.settings import WorkerSettings
from cluster.sim.clock import Clock
from cluster.sim.device import SimDevice
from cluster.sim.links import Fabric, Post, SimLinks, SimMover
from cluster.sim.trace import Answers
from cluster.worker.build import open_caches
from cluster.worker.events import Incoming
from cluster.worker.loop import WorkerLoop
from decode_worker.batch import Batch
from decode_worker.reservations import Reservations
from decode_worker.scheduler import DecodeScheduler
from engine.core.correction import StepPace
from engine.core.step_times import LinearTimes, StepTimes
from kvpool.core.blocks.leases import LeaseTable
from kvpool.core.blocks.pool import BlockState
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.fetch.openings import Openings
from kvpool.core.layout.block_names import BlockNames
from kvpool.core.layout.layout import KvLayout
from kvpool.core.transfer.commands import FromPeer, LinkMeasured, PeerLost
from kvpool.core.transfer.messages import HandoffMode, PeerHello
from kvpool.core.transfer.pool_map import KvFacts
from kvpool.core.transfer.slabs import SlabId, SlabPool, SlabState, Staging, plan_staging
from kvrelay.messages import WorkerHello
from kvrelay.types import WIRE_VERSION, Incarnation, StepCoefficients
from prefill_worker.scheduler import PrefillScheduler

FINGERPRINT = "simulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What a simulated worker runs on. Its steps take `times`, and it tells of `told`."""

    times: StepTimes
    told: StepCoefficients
    layout: KvLayout
    blocks: int
    max_model_len: int
    most_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What all workers share; `posts` lead to each."""

    clock: Clock
    fabric: Fabric
    answers: Answers
    posts: Mapping[Incarnation, Post]


class SimWorker:
    def __init__(
        self, settings: WorkerSettings, hardware: Hardware, around: Surroundings, life: int = 0
    ) -> None:
        """`life`: how often one of this name has died before."""
        self.settings = settings
        self.name = settings.name
        self.incarnation = Incarnation(f"{settings.name}.{life}" if life else settings.name)
        self.is_dead = False
        self.hardware = hardware
        self._clock = around.clock
        self._lease_ttl_s = settings.lease_ttl_s
        self._ticking = False
        self.device = SimDevice(
            around.clock, hardware.times, around.answers, _layers(hardware.layout), self.hear
        )
        staging = plan_staging(
            hardware.layout,
            slabs=settings.staging_slabs,
            chunk_tokens=settings.prefill_chunk_tokens,
            total_bytes=settings.staging_bytes,
            on_cpu=False,
        )
        self.loop = self._loop(settings, staging)
        self.links = SimLinks(around.clock, around.fabric, self._peer_hello(staging), around.posts)
        mover = SimMover(around.clock, around.fabric, self.incarnation, around.posts)
        self.loop.attach(self.links, mover, None)
        self.hello = self._hello(settings)

    # --- what happens ---------------------------------------------------------------------------

    def hear(self, events: Sequence[Incoming]) -> None:
        """All that comes at once: one turn of the loop."""
        if self.is_dead:
            return
        for event in events:
            if self._is_heard(event):
                self.loop.settle(event)
        self._act()

    def _is_heard(self, event: Incoming) -> bool:
        """Nothing more of a peer that is lost."""
        match event:
            case FromPeer(peer=peer, message=message):
                if self.links.is_lost(peer):
                    return False
                if isinstance(message, PeerHello):
                    self.links.meet(peer)
            case LinkMeasured(peer=peer):
                return not self.links.is_lost(peer)
            case PeerLost(peer=peer):
                return self.links.lose(peer)
            case _:
                pass
        return True

    def die(self) -> None:
        """Nothing comes of what it was about to do."""
        self.is_dead = True

    def _act(self) -> None:
        self.loop.act()
        self.links.flush()
        if self.device.runs_ahead and self._is_wanted_otherwise:
            self.device.cut()
        if not self._ticking and not self.loop.idle:
            self._ticking = True
            self._clock.after(self._lease_ttl_s / 3, self._tick)

    @property
    def _is_wanted_otherwise(self) -> bool:
        """The next step is not to be as the one that runs."""
        decode, prefill = self.loop.decode, self.loop.prefill
        settled = decode.batch.running_set.is_settled and not decode.asking
        return not settled or prefill.has_work

    def _tick(self, _: None) -> None:
        """Only while there is something that could end by itself."""
        self._ticking = False
        if self.is_dead:
            return
        self.loop.tick()
        self._act()

    # --- what it is made of ---------------------------------------------------------------------

    def _loop(self, settings: WorkerSettings, staging: Staging) -> WorkerLoop:
        layout = self.hardware.layout
        names = BlockNames(fingerprint=FINGERPRINT, physical_format=layout.physical_format())
        tables = BlockTables(
            layout,
            self.hardware.blocks,
            names=names,
            caching=settings.prefix_caching,
            policy=settings.eviction,
        )
        openings = open_caches(settings, tables, staging)
        pace = StepPace(LinearTimes.of(self.hardware.told))
        prefill = PrefillScheduler(
            openings=openings,
            chunk_tokens=settings.prefill_chunk_tokens,
            mode=HandoffMode(settings.handoff),
            order=prefill_order(settings, pace),
        )
        return WorkerLoop(
            self.device,
            openings,
            prefill,
            self._decode(settings, staging, openings, pace),
            queue.SimpleQueue(),
            max_model_len=self.hardware.max_model_len,
            pace=pace,
            most_steps=self.hardware.most_steps,
            clock=lambda: self._clock.now_s,
        )

    def _decode(
        self, settings: WorkerSettings, staging: Staging, openings: Openings, times: StepTimes
    ) -> DecodeScheduler:
        reservations = Reservations(
            tables=openings.tables,
            slabs=SlabPool(staging.payload_bytes, staging.slabs),
            regions={SlabId(i): f"{self.incarnation}-{i}" for i in range(staging.slabs)},
            leases=LeaseTable(settings.lease_ttl_s),
            mode=HandoffMode(settings.handoff),
        )
        batch = Batch(
            openings=openings,
            chunk_tokens=settings.own_chunk_tokens,
            shares=tier_shares(settings),
            times=times,
        )
        return DecodeScheduler(reservations=reservations, batch=batch)

    def _peer_hello(self, staging: Staging) -> PeerHello:
        layout = self.hardware.layout
        return PeerHello(
            wire_version=WIRE_VERSION,
            incarnation=self.incarnation,
            fingerprint=FINGERPRINT,
            kv=KvFacts(
                dtype=layout.dtype,
                block_size=layout.block_size,
                blocks=self.hardware.blocks,
                slab_bytes=staging.payload_bytes,
                region=f"{self.incarnation}-pool",
            ),
            name=self.incarnation,
        )

    def _hello(self, settings: WorkerSettings) -> WorkerHello:
        return WorkerHello(
            name=settings.name,
            incarnation=self.incarnation,
            role=settings.role,
            device="simulated",
            transport="simulated",
            transfer_addresses=(f"simulated:{self.incarnation}",),
            fingerprint=FINGERPRINT,
            architecture="simulated",
            block_size=self.hardware.layout.block_size,
            total_blocks=self.hardware.blocks,
            max_model_len=self.hardware.max_model_len,
            max_running_requests=settings.max_running_requests,
            prefill_chunk_tokens=settings.own_chunk_tokens,
            vocab_size=2**32,
            step_times=self.hardware.told,
            physical_format=self.hardware.layout.physical_format(),
            kv_token_bytes=self.hardware.layout.bytes_per_block // self.hardware.layout.block_size,
        )

    # --- at the end -----------------------------------------------------------------------------

    def validate(self) -> None:
        self.loop.prefill.validate()
        self.loop.decode.validate()

    def assert_nothing_held(self) -> None:
        self.validate()
        tables, slabs = self.loop.decode.batch.tables, self.loop.decode.reservations.slabs
        held = [str(one.holder) for one in tables.held()]
        assert not held, f"{self.incarnation} holds {held}"
        counts = tables.counts()
        assert counts[BlockState.FREE] + counts[BlockState.CACHED] == tables.blocks
        assert slabs.counts()[SlabState.FREE] == slabs.count, "a slab is lent"
        assert self.loop.idle, f"{self.incarnation} has requests"


def _layers(layout: KvLayout) -> int:
    return sum(len(group.layers) for group in layout.groups)
