"""A router and several workers without devices: the real cores and loops, a virtual clock, random
delays.

Workers die and come back as new incarnations, router streams and peer connections break at any
moment. What was on its way over a broken one is lost; the ends notice at different times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from cluster.core.worker.events import FromRouter, RouterJoined, RouterLost
from kvrelay.messages import BlockChanges, Counters, Preload, ToWorker, WorkerEvent
from kvrelay.types import Incarnation, RequestSpec
from kvrelay.wire import decode_event, decode_to_worker, encode_event, encode_to_worker
from router.core.events import Command as RouterCommand
from router.core.events import Event as RouterEvent
from router.core.events import (
    LadderStepped,
    PairQuarantined,
    PairTrusted,
    Send,
    WorkerJoined,
    WorkerLost,
    WorkerSaid,
)
from router.core.policy.choice import DEFAULT_POLICIES, Policies
from router.core.start import Beginning, begin
from tests.sim.model import TIERS
from tests.sim.peers import PeerNet
from tests.sim.pool_links import SimulatedPoolLinks
from tests.sim.pool_net import PoolNet
from tests.sim.worker import Shape, Worker


@dataclass(eq=False, slots=True)
class Stream:
    """From one worker to the router."""

    cluster: Cluster
    worker: Incarnation
    number: int

    def send(
        self,
        events: Sequence[WorkerEvent],
        counters: Counters,
        blocks: Sequence[BlockChanges] = (),
    ) -> None:
        now_s = self.cluster.now_s
        sent = [encode_event(event, now_s) for event in events]

        def arrive() -> None:
            said = tuple(decode_event(event, self.cluster.now_s) for event in sent)
            self.cluster.heard(
                self,
                WorkerSaid(
                    incarnation=self.worker, events=said, counters=counters, blocks=tuple(blocks)
                ),
            )

        self.cluster.after(f"from {self.number}", arrive)


class Cluster(PeerNet):
    """`on_command` gets what the router's core says to clients."""

    def __init__(
        self,
        seed: int,
        on_command: Callable[[RouterCommand], None],
        policies: Policies = DEFAULT_POLICIES,
    ) -> None:
        super().__init__(seed)
        self.core = begin(Beginning(seed=seed, policies=policies, tiers=TIERS))
        self.pools = PoolNet(self, self.to_router)
        self._on_command = on_command
        self._attached: dict[Incarnation, Stream] = {}  # the router's view
        self._lives = count()

    def on_tick(self) -> None:
        self.pools.tick()
        super().on_tick()

    def validate(self) -> None:
        self.core.validate()
        super().validate()
        self.pools.validate()

    # --- lives and links ------------------------------------------------------------------------

    def start_worker(self, name: str, shape: Shape) -> None:
        self.attach(self.add_worker(name, next(self._lives), shape).incarnation)

    def open_pool(self, worker: Worker) -> SimulatedPoolLinks | None:
        return self.pools.join(worker) if worker.shape.host else None

    def attach(self, incarnation: Incarnation) -> None:
        if incarnation not in self.workers or incarnation in self._attached:
            return
        stream = self._attached[incarnation] = Stream(self, incarnation, self.next_id())
        self._post_later(stream, RouterJoined(stream))
        self.to_router(WorkerJoined(hello=self.workers[incarnation].hello))

    def break_stream(self, incarnation: Incarnation) -> None:
        """The router notices at once and attaches again; the worker notices some time later."""
        stream = self._attached.get(incarnation)
        if stream is None:
            return
        self._lose_stream(incarnation)
        worker = self.workers[incarnation]
        notice = partial(worker.post, RouterLost(stream))
        self.by(incarnation, f"notice {stream.number}", notice, 0.2)
        self.after(f"attach {stream.number}", lambda: self.attach(incarnation), 0.2)

    def kill(self, incarnation: Incarnation, *, for_good: bool = False) -> None:
        """It comes back as another, before or after its peers and its router have noticed."""
        dead = self.workers.pop(incarnation, None)
        if dead is None:
            return
        self.die(incarnation)
        self.pools.worker_died(incarnation)
        self.after(f"router misses {incarnation}", lambda: self._lose_stream(incarnation), 0.2)
        for peer in list(dead.links):
            self.cut(incarnation, peer)
        if not for_good:
            again = partial(self.start_worker, dead.hello.name, dead.shape)
            self.after(f"restart {incarnation}", again, 0.5)

    def _lose_stream(self, incarnation: Incarnation) -> None:
        stream = self._attached.pop(incarnation, None)
        if stream is not None:
            self._broken.add(stream.number)
            self.to_router(WorkerLost(incarnation=incarnation))

    def preload(self, incarnation: Incarnation, spec: RequestSpec) -> None:
        """The router wants this prompt computed and pinned."""
        self._to_worker(incarnation, Preload(spec=spec))

    # --- router ---------------------------------------------------------------------------------

    def to_router(self, event: RouterEvent) -> None:
        for command in self.core.handle(event, self.now_s):
            match command:
                case Send(worker=worker, message=message):
                    self._to_worker(worker, decode_to_worker(encode_to_worker(message)))
                case PairQuarantined() | PairTrusted() | LadderStepped():
                    pass  # for the log
                case _:
                    self._on_command(command)

    def heard(self, stream: Stream, said: WorkerSaid) -> None:
        if self._attached.get(stream.worker) is stream:
            self.to_router(said)

    def _to_worker(self, incarnation: Incarnation, message: ToWorker) -> None:
        stream = self._attached.get(incarnation)
        if stream is not None:
            self._post_later(stream, FromRouter(stream, message))

    def _post_later(self, stream: Stream, event: FromRouter | RouterJoined) -> None:
        worker = self.workers.get(stream.worker)

        def arrive() -> None:
            if worker is not None and stream.number not in self._broken:
                worker.post(event)

        self.by(stream.worker, f"to {stream.number}", arrive)
