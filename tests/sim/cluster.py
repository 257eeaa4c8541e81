"""A router and several workers without devices: the real cores, a virtual clock, random delays.

Workers die and come back as new incarnations, router streams and peer connections break at any
moment. What was on its way over a broken one is lost; the ends notice at different times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

from cluster.worker.pool.news import PoolNews
from cluster.worker.pool.turns import PoolOutcome
from decode_worker.scheduler import DecodeScheduler
from engine.core.step import Command, Emit, RunStep, StepDone, StepOutcome, StepWanted, Tick
from kvpool.core.fetch.pool_fetch import Restored
from kvpool.core.transfer.commands import (
    FetchPiece,
    LayersWritten,
    ReplaceSlab,
    ScatterSlab,
    SendPeer,
    WriteSlab,
)
from kvpool.core.transfer.messages import DigestBlocks, HandoffMode
from kvrelay.messages import (
    Abort,
    Counters,
    Generate,
    Prefill,
    Released,
    ReserveRefused,
    Stop,
    ToWorker,
    WorkerEvent,
)
from kvrelay.types import Incarnation, RequestSpec
from kvrelay.wire import decode_event, decode_to_worker, encode_event, encode_to_worker
from prefill_worker.scheduler import PrefillScheduler
from router.core.core import RouterCore
from router.core.events import Command as RouterCommand
from router.core.events import Event as RouterEvent
from router.core.events import (
    PairQuarantined,
    PairTrusted,
    Send,
    WorkerJoined,
    WorkerLost,
    WorkerSaid,
)
from router.core.policy.admission import Capacity
from router.core.router_state import RouterState
from tests.sim.peers import PeerFabric
from tests.sim.pool_net import PoolNet
from tests.sim.pool_side import PoolSide
from tests.sim.worker import Shape, Worker, make_worker


class Cluster(PeerFabric):
    """`on_command` gets what the router's core says to clients."""

    def __init__(self, seed: int, on_command: Callable[[RouterCommand], None]) -> None:
        super().__init__(seed)
        self.core = RouterCore(RouterState(admitting=Capacity()))
        self.pools = PoolNet(self)
        self._on_command = on_command
        self._attached: dict[Incarnation, int] = {}  # the router's view: worker |-> stream
        self._lives = count()

    def on_tick(self) -> None:
        self.pools.tick()
        for worker in list(self.workers.values()):
            self.let(worker.incarnation, lambda w=worker: self._tick(w))

    def _tick(self, worker: Worker) -> None:
        self._both(worker, Tick())
        if worker.pool is not None:
            self._pooled(worker, worker.pool.turns.tick())
            self._settle(worker, [])
        for stream in worker.streams:
            self._say(worker, stream, [])

    def validate(self) -> None:
        self.core.validate()
        for worker in self.workers.values():
            worker.validate()
        self.pools.validate()

    # --- lives and links ------------------------------------------------------------------------

    def start_worker(self, name: str, shape: Shape) -> None:
        worker = make_worker(name, next(self._lives), shape)
        self.workers[worker.incarnation] = worker
        self.born(worker.incarnation)
        if shape.host:
            worker.pool = self._pool_side(worker, shape.host)
        self.attach(worker.incarnation)

    def _pool_side(self, worker: Worker, host: str) -> PoolSide:
        side = PoolSide(
            self,
            worker.memory,
            worker.openings,
            incarnation=worker.incarnation,
            host=host,
            staging=worker.shape.staging_blocks,
            confirms=worker.shape.mode is HandoffMode.POOL,
            on_news=lambda news: self._pool_news(worker, news),
            send=self.pools.send,
        )
        self.pools.join(side)
        return side

    def attach(self, incarnation: Incarnation) -> None:
        worker = self.workers.get(incarnation)
        if worker is None or incarnation in self._attached:
            return
        stream = next(self._ids)
        worker.streams.add(stream)
        self._attached[incarnation] = stream
        self.to_router(WorkerJoined(hello=worker.hello))

    def break_stream(self, incarnation: Incarnation) -> None:
        """The router notices at once and attaches again; the worker notices some time later."""
        stream = self._attached.get(incarnation)
        if stream is None:
            return
        self._lose_stream(incarnation)
        notice = partial(self._router_lost, incarnation, stream)
        self.by(incarnation, f"notice {stream}", notice, 0.2)
        self.after(f"attach {stream}", lambda: self.attach(incarnation), 0.2)

    def kill(self, incarnation: Incarnation) -> None:
        """It comes back as another, before or after its peers and its router have noticed."""
        dead = self.workers.pop(incarnation, None)
        if dead is None:
            return
        self.die(incarnation)
        self.pools.worker_died(incarnation)
        self.after(f"router misses {incarnation}", lambda: self._lose_stream(incarnation), 0.2)
        for peer in list(dead.links):
            self.cut(incarnation, peer)
        self.after(
            f"restart {incarnation}", lambda: self.start_worker(dead.hello.name, dead.shape), 0.5
        )

    def cut(self, one: Incarnation, other: Incarnation) -> None:
        """Break the connection of two workers; each side notices in its own time."""
        for mine, theirs in ((one, other), (other, one)):
            worker = self.workers.get(mine)
            if worker is not None and theirs in worker.links:
                link = worker.links[theirs]
                self._broken.add(link)
                notice = partial(self._lost, mine, theirs, link)
                self.by(mine, f"notice {mine} {link}", notice, 0.1)

    def _lose_stream(self, incarnation: Incarnation) -> None:
        stream = self._attached.pop(incarnation, None)
        if stream is not None:
            self._broken.add(stream)
            self.to_router(WorkerLost(incarnation=incarnation))

    def _router_lost(self, incarnation: Incarnation, stream: int) -> None:
        worker = self.workers.get(incarnation)
        if worker is None:
            return
        worker.streams.discard(stream)
        for key in [key for key, owner in worker.routes.items() if owner == stream]:
            self._both(worker, Abort(key=key))

    def preload(self, incarnation: Incarnation, spec: RequestSpec) -> None:
        """Compute a prompt and pin it; no router hears of it."""
        worker = self.workers.get(incarnation)
        if worker is not None and worker.preloads.begin(spec):
            worker.routes[spec.key] = 0
            self._settle(worker, worker.decode.handle(Generate(spec=spec), self.now_s))

    # --- router ---------------------------------------------------------------------------------

    def to_router(self, event: RouterEvent) -> None:
        for command in self.core.handle(event, self.now_s):
            match command:
                case Send(worker=worker, message=message):
                    self._to_worker(worker, decode_to_worker(encode_to_worker(message)))
                case PairQuarantined() | PairTrusted():
                    pass  # for the log
                case _:
                    self._on_command(command)

    def _to_worker(self, incarnation: Incarnation, message: ToWorker) -> None:
        stream = self._attached.get(incarnation)
        if stream is not None:
            arrive = partial(self._arrive, incarnation, stream, message)
            self.by(incarnation, f"to {stream}", arrive)

    def _arrive(self, incarnation: Incarnation, stream: int, message: ToWorker) -> None:
        """As WorkerLoop routes it."""
        worker = self.workers.get(incarnation)
        if worker is None or stream in self._broken or stream not in worker.streams:
            return
        if isinstance(message, Abort | Stop):
            if worker.routes.get(message.key) != stream:
                return
            if isinstance(message, Abort):
                self._both(worker, message)
                return
        else:
            assert message.spec.key not in worker.routes, "a key came twice"
            worker.routes[message.spec.key] = stream
        scheduler = worker.prefill if isinstance(message, Prefill) else worker.decode
        self._settle(worker, scheduler.handle(message, self.now_s))  # type: ignore[arg-type]

    def _emit(self, worker: Worker, events: tuple[WorkerEvent, ...]) -> None:
        by_stream: dict[int, list[WorkerEvent]] = defaultdict(list)
        for event in events:
            by_stream[worker.routes[event.key]].append(event)
            if isinstance(event, Released | ReserveRefused):
                del worker.routes[event.key]
                worker.preloads.ended(event, self.now_s)
        for stream, batch in by_stream.items():
            self._say(worker, stream, batch)

    def _say(self, worker: Worker, stream: int, events: list[WorkerEvent]) -> None:
        sent = [encode_event(event, self.now_s) for event in events]
        counters = Counters(running=worker.decode.sequences)

        def arrive() -> None:
            if self._attached.get(worker.incarnation) == stream:
                said = tuple(decode_event(event, self.now_s) for event in sent)
                self.to_router(
                    WorkerSaid(incarnation=worker.incarnation, events=said, counters=counters)
                )

        self.after(f"from {stream}", arrive)

    # --- workers --------------------------------------------------------------------------------

    def _settle(self, worker: Worker, commands: Sequence[Command]) -> None:
        """As a turn of WorkerLoop does."""
        self._execute_all(worker, commands)
        self._start_steps(worker)
        while worker.pool is not None and self._pooled(worker, worker.pool.turns.turn()):
            self._start_steps(worker)

    def _start_steps(self, worker: Worker) -> None:
        """The schedulers take turns at the device."""
        for scheduler in list(worker.turns):
            if worker.stepping is None:
                worker.turns.rotate(-1)
                for command in scheduler.handle(StepWanted(), self.now_s):
                    if isinstance(command, RunStep):
                        self._run_step(worker, command, scheduler)
                    else:
                        self._execute(worker, command)

    def _pooled(self, worker: Worker, outcomes: Sequence[PoolOutcome]) -> bool:
        """Whether a step may be possible now that was not."""
        for event in outcomes:
            if isinstance(event, Restored) and event.holder.side != "prefill":
                self._execute_all(worker, worker.decode.handle(event, self.now_s))
            else:
                self._execute_all(worker, worker.prefill.handle(event, self.now_s))
        return any(isinstance(event, Restored) for event in outcomes)

    def _pool_news(self, worker: Worker, news: PoolNews) -> None:
        assert worker.pool is not None
        self._pooled(worker, worker.pool.turns.handle(news))
        self._settle(worker, [])

    def _execute_all(self, worker: Worker, commands: Sequence[Command]) -> None:
        for command in commands:
            self._execute(worker, command)

    def _execute(self, worker: Worker, command: Command) -> None:
        match command:
            case Emit(events=events):
                self._emit(worker, events)
            case SendPeer():
                self._send(worker, command)
            case WriteSlab():
                self._move(worker, lambda: self._write(worker, command))
            case ScatterSlab():
                self._move(worker, lambda: self._scatter(worker, command))
            case FetchPiece():
                self._fetch(worker, command)
            case DigestBlocks():
                self._move(worker, lambda: self._digest(worker, command))
            case ReplaceSlab(slab_id=slab_id):
                self._move(worker, lambda: self._replace(worker, slab_id))

    def _run_step(
        self, worker: Worker, step: RunStep, scheduler: PrefillScheduler | DecodeScheduler
    ) -> None:
        worker.stepping = scheduler
        running = worker.memory.begin(step)
        device = f"device {worker.incarnation}"

        def wrote(layer: int) -> None:
            running.write_up_to(layer)
            self._settle(worker, worker.prefill.handle(LayersWritten(layer), self.now_s))

        def done() -> None:
            outcome = StepOutcome(sampled=running.finish())
            event = StepDone(outcome=outcome, seconds=0.0)
            worker.stepping = None
            self._settle(worker, scheduler.handle(event, self.now_s))

        for layer in sorted(step.layer_marks):
            self.by(worker.incarnation, device, partial(wrote, layer), 0.02)
        self.by(worker.incarnation, device, done, 0.02)
