"""A router and several workers without devices: the real cores, a virtual clock, random delays.

Workers die and come back as new incarnations, router streams and peer connections break at any
moment. What was on its way over a broken one is lost; the ends notice at different times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import count
from random import Random

from engine.step import Command, Emit, RunStep, StepDone, StepOutcome, StepWanted, Tick
from kvpool.handoff import (
    TO_PREFILL,
    FetchPiece,
    FromPeer,
    LayersWritten,
    LinkMeasured,
    PeerHello,
    PeerLost,
    ReplaceSlab,
    ScatterSlab,
    SendPeer,
    SlabWritten,
    WriteSlab,
)
from kvpool.peer_wire import decode, encode
from kvpool.slabs import SlabId
from kvpool.transfer_plan import Side
from kvrelay.messages import (
    Abort,
    Counters,
    Prefill,
    Released,
    ReserveRefused,
    Stop,
    ToWorker,
    WorkerEvent,
)
from kvrelay.types import Incarnation, Role
from kvrelay.wire import decode_event, decode_to_worker, encode_event, encode_to_worker
from router.core import RouterCore
from router.events import Command as RouterCommand
from router.events import Event as RouterEvent
from router.events import PairQuarantined, PairTrusted, Send, WorkerJoined, WorkerLost, WorkerSaid
from tests.sim.model import AnyWay
from tests.sim.simulation import Simulation
from tests.sim.worker import Fetch, Shape, Worker, fetched, make_worker


class Cluster(Simulation):
    """`on_command` gets what the router's core says to clients."""

    def __init__(self, seed: int, on_command: Callable[[RouterCommand], None]) -> None:
        super().__init__(seed)
        self.core = RouterCore()
        self.workers: dict[Incarnation, Worker] = {}
        self._on_command = on_command
        self._attached: dict[Incarnation, int] = {}  # the router's view: worker |-> stream
        self._broken: set[int] = set()  # streams and connections
        self._ids = count(1)
        self._lives = count()

    def on_tick(self) -> None:
        for worker in list(self.workers.values()):
            self._both(worker, Tick())

    def validate(self) -> None:
        self.core.validate()
        for worker in self.workers.values():
            worker.validate()

    # --- lives and links ------------------------------------------------------------------------

    def start_worker(self, name: str, shape: Shape) -> None:
        worker = make_worker(name, next(self._lives), shape)
        self.workers[worker.incarnation] = worker
        self.attach(worker.incarnation)

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
        self.after(f"notice {stream}", lambda: self._router_lost(incarnation, stream), 0.2)
        self.after(f"attach {stream}", lambda: self.attach(incarnation), 0.2)

    def kill(self, incarnation: Incarnation) -> None:
        """It comes back as another, before or after its peers and its router have noticed."""
        dead = self.workers.pop(incarnation, None)
        if dead is None:
            return
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
                self.after(
                    f"notice {mine} {link}",
                    lambda m=mine, t=theirs, i=link: self._lost(m, t, i),
                    0.1,
                )

    def _lost(self, mine: Incarnation, theirs: Incarnation, link: int) -> None:
        worker = self.workers.get(mine)
        if worker is not None and worker.links.get(theirs) == link:
            del worker.links[theirs]
            self._both(worker, PeerLost(peer=theirs, reason="lost"))

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
            self.after(f"to {stream}", lambda: self._arrive(incarnation, stream, message))

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

    def _both(self, worker: Worker, event: Abort | FromPeer | PeerLost | Tick) -> None:
        self._settle(worker, worker.prefill.handle(event, self.now_s))
        self._settle(worker, worker.decode.handle(event, self.now_s))

    def _settle(self, worker: Worker, commands: list[Command]) -> None:
        for command in commands:
            self._execute(worker, command)
        for side, scheduler in (("decode", worker.decode), ("prefill", worker.prefill)):
            if side not in worker.busy:
                for command in scheduler.handle(StepWanted(), self.now_s):
                    self._execute(worker, command)

    def _execute(self, worker: Worker, command: Command) -> None:
        match command:
            case Emit(events=events):
                self._emit(worker, events)
            case RunStep():
                self._run_step(worker, command)
            case SendPeer():
                self._send(worker, command)
            case WriteSlab():
                self._move(worker, lambda: self._write(worker, command))
            case ScatterSlab():
                self._move(worker, lambda: self._scatter(worker, command))
            case FetchPiece():
                self._fetch(worker, command)
            case ReplaceSlab(slab_id=slab_id):
                self._move(worker, lambda: self._replace(worker, slab_id))

    def _move(self, worker: Worker, action: Callable[[], None], scale_s: float = 0.01) -> None:
        def alive() -> None:
            if worker.incarnation in self.workers:
                action()

        self.after(f"mover {worker.incarnation}", alive, scale_s)

    def _run_step(self, worker: Worker, step: RunStep) -> None:
        side = "prefill" if worker.hello.role is Role.PREFILL else "decode"
        assert side not in worker.busy
        worker.busy.add(side)
        running = worker.memory.begin(step)
        scheduler = worker.prefill if side == "prefill" else worker.decode
        device = f"device {worker.incarnation}"

        def wrote(layer: int) -> None:
            if worker.incarnation in self.workers:
                running.write_up_to(layer)
                self._settle(worker, worker.prefill.handle(LayersWritten(layer), self.now_s))

        def done() -> None:
            if worker.incarnation in self.workers:
                event = StepDone(
                    outcome=StepOutcome(sampled=running.finish(), sketches=running.sketches()),
                    seconds=0.0,
                )
                worker.busy.discard(side)
                self._settle(worker, scheduler.handle(event, self.now_s))

        for layer in sorted(step.layer_marks):
            self.after(device, lambda at=layer: wrote(at), 0.02)
        self.after(device, done, 0.02)

    # --- between workers ------------------------------------------------------------------------

    def _send(self, worker: Worker, command: SendPeer) -> None:
        """As PeerLinks does: connects for a message with addresses, drops an answer without."""
        peer = command.peer
        if peer not in worker.links:
            if not command.addresses:
                return
            if peer not in self.workers:
                link = -next(self._ids)
                worker.links[peer] = link
                mine = worker.incarnation
                self.after(f"notice {mine} {link}", lambda: self._lost(mine, peer, link))
                self._broken.add(link)
                return
            worker.links[peer] = next(self._ids)
            self._send(worker, SendPeer(peer=peer, message=worker.peer_hello))
        link, payload = worker.links[peer], encode(command.message)
        self.after(
            f"{worker.incarnation} {link}",
            lambda: self._hear(worker.incarnation, peer, link, payload),
        )

    def _hear(self, sender: Incarnation, to: Incarnation, link: int, payload: bytes) -> None:
        worker = self.workers.get(to)
        if worker is None or link in self._broken:
            return
        if worker.links.get(sender) != link:
            worker.links[sender] = link
            self._send(worker, SendPeer(peer=sender, message=worker.peer_hello))
        event = FromPeer(peer=sender, message=decode(payload))
        if isinstance(event.message, PeerHello):
            self._both(worker, event)
            self._probe(worker, sender, link)
        else:
            to_prefill = isinstance(event.message, TO_PREFILL)
            scheduler = worker.prefill if to_prefill else worker.decode
            self._settle(worker, scheduler.handle(event, self.now_s))

    def _probe(self, worker: Worker, peer: Incarnation, link: int) -> None:
        """Some time later it knows what the link costs."""
        cost = AnyWay(Random(self.random.random()))
        event = LinkMeasured(peer=peer, cost=cost)  # type: ignore[arg-type]

        def measured() -> None:
            if worker.incarnation in self.workers and worker.links.get(peer) == link:
                self._settle(worker, worker.decode.handle(event, self.now_s))

        self.after(f"probe {worker.incarnation}", measured, 0.1)

    def _write(self, worker: Worker, job: WriteSlab) -> None:
        lent, error = job.lent, None
        owner = self.workers.get(job.peer)
        link = worker.links.get(job.peer)
        if (
            owner is None
            or link is None
            or link in self._broken
            or lent.region not in owner.regions
        ):
            error = "the region is gone"
        else:
            source = Side(tables=job.tables, block_size=worker.shape.layout.block_size)
            filled = owner.fill(job, worker.memory.take(job.write, source))
            self._send(worker, SendPeer(peer=job.peer, message=filled))
        written = SlabWritten(key=lent.key, piece=lent.piece, bytes=1, seconds=0, error=error)
        self._settle(worker, worker.prefill.handle(written, self.now_s))

    def _fetch(self, worker: Worker, job: FetchPiece) -> None:
        """The reader maps the memory: it reads on when the link breaks while it does."""
        fetch: Fetch | None = None

        def begin() -> None:
            nonlocal fetch
            owner, link = self.workers.get(job.peer), worker.links.get(job.peer)
            if owner is not None and link is not None:
                fetch = Fetch(reader=worker, owner=owner.memory, job=job)
                fetch.first_half()

        def end() -> None:
            event = fetched(job, "it is gone") if fetch is None else fetch.second_half()
            self._settle(worker, worker.decode.handle(event, self.now_s))

        self._move(worker, begin)
        self._move(worker, end, self.random.choice([0.01, 0.5]))

    def _scatter(self, worker: Worker, job: ScatterSlab) -> None:
        self._settle(worker, worker.decode.handle(worker.scatter(job), self.now_s))

    def _replace(self, worker: Worker, slab_id: SlabId) -> None:
        event = worker.replace(slab_id, f"{worker.incarnation}-new-{next(self._ids)}")
        self._settle(worker, worker.decode.handle(event, self.now_s))
