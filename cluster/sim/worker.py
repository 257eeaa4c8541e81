"""A simulated worker: the core of a real one, over executors that only take their time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.core.settings import WorkerSettings
from cluster.core.worker.build import build_worker_core
from cluster.core.worker.core import WorkerCore
from cluster.core.worker.events import CoreEvent, DropPeer, SendToRouter, WorkerCommand
from cluster.sim.device import SimDevice
from cluster.sim.machines.clock import Clock
from cluster.sim.machines.links import Fabric, Post, SimLinks, SimMover
from cluster.sim.machines.node_links import SimNodeLinks
from cluster.sim.machines.noise import StepNoise
from cluster.sim.machines.pool_node import SimPoolNode
from cluster.sim.trace import Answers
from engine.core.step import RunStep
from engine.core.step_times import LinearTimes, StepTimes
from kvpool.core.blocks.pool import BlockState
from kvpool.core.layout.block_names import BlockNames
from kvpool.core.layout.layout import KvLayout
from kvpool.core.node.messages import PoolFormat
from kvpool.core.transfer.commands import DropLink, FromPeer, LinkMeasured, PeerLost, SendPeer
from kvpool.core.transfer.messages import HandoffMode, PeerHello
from kvpool.core.transfer.pool_map import KvFacts
from kvpool.core.transfer.slabs import SlabId, SlabState, Staging, plan_staging
from kvrelay.messages import WorkerHello
from kvrelay.types import WIRE_VERSION, Incarnation, Role, StepCoefficients

FINGERPRINT = "simulated"
_POOL_TICK_S = 1.0
"""Workers lose patience with a silent pool node after a few of these."""
_OF_PEERS = frozenset((FromPeer, LinkMeasured, PeerLost))


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What a simulated worker runs on. Its steps take `times`, times what `noise` makes for it
    (None: exactly), and it tells of `told`. A turn of its loop takes `turn_s`, and a job of a
    transfer thread `job_s` beside its bytes (None: no time). A pipeline has several `stages`.
    `prompt_steps` of prompts are on the device at once, at least one for each stage."""

    times: StepTimes
    told: StepCoefficients
    layout: KvLayout
    blocks: int
    max_model_len: int
    most_steps: int
    noise: Callable[[], StepNoise] | None = None
    turn_s: float | None = None
    job_s: float | None = None
    prompt_steps: int = 1
    stages: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What all workers share; `posts` lead to each, and `nodes` are the pool nodes."""

    clock: Clock
    fabric: Fabric
    answers: Answers
    posts: Mapping[Incarnation, Post]
    nodes: Mapping[Incarnation, SimPoolNode]


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
        self._tick_s = settings.lease_ttl_s / 3
        self._ticking = False
        self._inbox: list[CoreEvent] = []
        self._turning = False
        self.device = SimDevice(
            around.clock,
            hardware.times,
            around.answers,
            _layers(hardware.layout),
            self.hear,
            None if hardware.noise is None else hardware.noise(),
            hardware.stages,
        )
        staging = plan_staging(
            hardware.layout,
            slabs=settings.staging_slabs,
            chunk_tokens=settings.prefill_chunk_tokens,
            total_bytes=settings.staging_bytes,
            on_cpu=False,
        )
        self.core = self._core(settings, staging)
        self.links = SimLinks(around.clock, around.fabric, self._peer_hello(staging), around.posts)
        mover = SimMover(
            around.clock, around.fabric, self.incarnation, around.posts, hardware.job_s
        )
        self._executors: dict[type, Callable[[Any], None]] = mover.executors | {
            RunStep: self.device.submit,
            SendPeer: self.links.send,
            DropLink: _ignore,
            DropPeer: _ignore,
            SendToRouter: _tell,
        }
        self.node_links = self._node_links(around) if settings.pool_address is not None else None
        self.hello = self._hello(settings)

    # --- what happens ---------------------------------------------------------------------------

    def hear(self, events: Sequence[CoreEvent], in_time: bool = False) -> None:
        """All that comes at once: one turn. Where turns take time, what comes meanwhile belongs to
        the next one (`in_time`: its time has passed)."""
        if self.hardware.turn_s is not None and not in_time:
            self._put_off(events, self.hardware.turn_s)
            return
        if self.is_dead:
            return
        for event in events:
            if type(event) not in _OF_PEERS or self._is_heard(event):
                commands = self.core.handle(event, self._clock.now_s)
                if commands:
                    self._execute(commands)
        self._act()

    def _put_off(self, events: Sequence[CoreEvent], turn_s: float) -> None:
        self._inbox += events
        if not self._turning:
            self._turning = True
            self._clock.after(turn_s, self._take_turn)

    def _take_turn(self, _: None) -> None:
        events, self._inbox, self._turning = self._inbox, [], False
        self.hear(events, in_time=True)

    def _is_heard(self, event: CoreEvent) -> bool:
        """Nothing more of a peer that is lost."""
        match event:
            case FromPeer(peer=peer, message=message):
                if peer in self.links.lost:
                    return False
                if isinstance(message, PeerHello):
                    self.links.meet(peer)
            case LinkMeasured(peer=peer):
                return peer not in self.links.lost
            case PeerLost(peer=peer):
                return self.links.lose(peer)
            case _:
                pass
        return True

    def die(self) -> None:
        """Nothing comes of what it was about to do."""
        self.is_dead = True
        if self.node_links is not None:
            self.node_links.die()

    def _execute(self, commands: Iterable[WorkerCommand]) -> None:
        for command in commands:
            self._executors[type(command)](command)

    def _act(self) -> None:
        core, now_s = self.core, self._clock.now_s
        if commands := core.proceed(now_s):
            self._execute(commands)
        if core.has_news:
            self._execute(core.report(self.links.states, now_s))
        if self.links.outbox:
            self.links.flush()
        if self.device.steps_running > 1 and self._is_wanted_otherwise:
            self.device.cut()
        if not self._ticking and not core.idle:
            self._ticking = True
            self._clock.after(self._tick_s, self._tick)

    @property
    def _is_wanted_otherwise(self) -> bool:
        """The next step is not to be as the one that runs."""
        decode, prefill = self.core.decode, self.core.prefill
        settled = decode.batch.running_set.is_settled and not decode.asking
        return not settled or prefill.has_work

    def _tick(self, _: None) -> None:
        """Only while there is something that could end by itself."""
        self._ticking = False
        if self.is_dead:
            return
        self._execute(self.core.tick(self.links.states, self._clock.now_s))
        self._act()

    # --- what it is made of ---------------------------------------------------------------------

    def _core(self, settings: WorkerSettings, staging: Staging) -> WorkerCore:
        layout = self.hardware.layout
        return build_worker_core(
            settings,
            layout,
            self.hardware.blocks,
            BlockNames(fingerprint=FINGERPRINT, physical_format=layout.physical_format()),
            LinearTimes.of(self.hardware.told),
            staging,
            {SlabId(i): f"{self.incarnation}-{i}" for i in range(staging.slabs)},
            max_model_len=self.hardware.max_model_len,
            most_steps=self.hardware.most_steps,
            prompt_steps=max(self.hardware.prompt_steps, self.hardware.stages),
        )

    def _node_links(self, around: Surroundings) -> SimNodeLinks:
        layout = self.hardware.layout
        links = SimNodeLinks(
            around.clock,
            around.fabric,
            self.incarnation,
            PoolFormat(
                fingerprint=FINGERPRINT,
                physical_format=layout.physical_format(),
                block_bytes=layout.bytes_per_block,
            ),
            around.nodes,
            self.hear,
        )
        self._executors |= links.executors
        self._tick_s = min(self._tick_s, _POOL_TICK_S)
        return links

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
            pool=settings.pool,
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
            prefill_chunk_tokens=settings.prefill_chunk_tokens,
            mixed_chunk_tokens=settings.chunk_tokens(Role.DECODE),
            vocab_size=2**32,
            step_times=self.hardware.told,
            handoff_by_pool=settings.handoff == HandoffMode.POOL,
            takes=settings.takes,
            physical_format=self.hardware.layout.physical_format(),
            kv_token_bytes=self.hardware.layout.bytes_per_block // self.hardware.layout.block_size,
        )

    # --- at the end -----------------------------------------------------------------------------

    def assert_nothing_held(self) -> None:
        self.core.validate()
        tables, slabs = self.core.tables, self.core.decode.reservations.slabs
        held = [str(one.holder) for one in tables.held()]
        assert not held, f"{self.incarnation} holds {held}"
        counts = tables.counts()
        assert counts[BlockState.FREE] + counts[BlockState.CACHED] == tables.blocks
        assert slabs.counts()[SlabState.FREE] == slabs.count, "a slab is lent"
        assert self.core.idle, f"{self.incarnation} has requests"
        pool = self.core.lookup.pool
        assert pool is None or pool.nodes.stores.idle, f"{self.incarnation} waits for its pool node"


def _ignore(_: DropLink | DropPeer) -> None:
    """No simulated worker is silent, and no copy hangs: many may share the network."""


def _tell(command: SendToRouter) -> None:
    command.stream.send(command.events, command.counters, command.blocks)


def _layers(layout: KvLayout) -> int:
    return sum(len(group.layers) for group in layout.groups)
