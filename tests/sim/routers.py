"""The routers of a simulated cluster. Each is one process life: the real core, its streams to the
workers, and its watch over those that are silent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from cluster.core.worker.events import FromRouter, RouterJoined, RouterLost
from kvrelay.counters import Counters
from kvrelay.messages import BlockChanges, Generate, Reserve, ToWorker, WorkerEvent, WorkerHello
from kvrelay.types import Incarnation
from kvrelay.wire import decode_event, decode_to_worker, encode_event, encode_to_worker
from router.core.events import (
    Command,
    Event,
    LadderStepped,
    PairQuarantined,
    PairTrusted,
    Send,
    TimePassed,
    WorkerJoined,
    WorkerLost,
    WorkerSaid,
    WorkerSuspected,
)
from router.core.faults.silence import Silence
from router.core.request import Request, RequestState
from router.core.start import Beginning, begin
from router.core.state.worker_view import WorkerView, check_joins

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster


@dataclass(eq=False, slots=True)
class Stream:
    """Between a worker and a router. `joined`: the worker has said hello. `is_deaf`: nothing comes
    to the worker any more; `is_mute`: nothing comes from it."""

    router: RouterLife
    worker: Incarnation
    number: int
    joined: bool = False
    is_deaf: bool = False
    is_mute: bool = False

    def send(
        self,
        events: Sequence[WorkerEvent],
        counters: Counters,
        blocks: Sequence[BlockChanges] = (),
    ) -> None:
        cluster, worker = self.router.cluster, self.worker
        sent = [encode_event(event, cluster.now_s) for event in events]

        def arrive() -> None:
            said = tuple([decode_event(event, cluster.now_s) for event in sent])
            self.router.heard(
                self,
                WorkerSaid(
                    incarnation=worker, events=said, counters=counters, blocks=tuple(blocks)
                ),
            )

        self.up(arrive)

    def up(self, action: Callable[[], None]) -> None:
        """By the router, some time later."""
        self.router.cluster.by(self.router.incarnation, f"from {self.number}", action)

    def down(self, action: Callable[[], None], scale_s: float = 0.01) -> None:
        """By the worker, some time later."""
        self.router.cluster.by(self.worker, f"to {self.number}", action, scale_s)

    def end(self, scale_s: float = 0.2) -> None:
        """The worker notices some time later that it has ended."""

        def notice() -> None:
            self.router.cluster.workers[self.worker].post(RouterLost(self))

        self.down(notice, scale_s)


class RouterLife:
    """`on_command` gets what the core says to clients."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        life: int,
        beginning: Beginning,
        on_command: Callable[[RouterLife, Command], None],
    ) -> None:
        self.cluster, self.name = cluster, name
        self.incarnation = Incarnation(f"{name}.{life}")
        self.core = begin(beginning)
        self.streams: dict[Incarnation, Stream] = {}
        self.announced: set[Incarnation] = set()
        self.counts: Counter[str] = Counter()
        self._silence = Silence(now_s=cluster.now_s)
        self._on_command = on_command

    # --- workers --------------------------------------------------------------------------------

    def announce(self, worker: Incarnation) -> None:
        self.announced.add(worker)
        self.attach(worker)

    def withdraw(self, worker: Incarnation) -> None:
        self.announced.discard(worker)
        self.lose(worker)

    def attach(self, worker: Incarnation) -> None:
        there = self.cluster.workers.get(worker)
        if there is None or worker in self.streams or worker not in self.announced:
            return
        stream = self.streams[worker] = Stream(self, worker, self.cluster.next_id())

        def greet() -> None:
            there.post(RouterJoined(stream))

        stream.down(partial(self._say_hello, stream, there.hello))
        stream.down(greet)

    def _say_hello(self, stream: Stream, hello: WorkerHello) -> None:
        stream.up(lambda: self._joined(stream, hello))

    def _joined(self, stream: Stream, hello: WorkerHello) -> None:
        if self.streams.get(stream.worker) is not stream or stream.is_mute:
            return
        check_joins(hello, (view.hello for view in self.core.state.workers.values()))
        stream.joined = True
        self._silence.joined(stream.worker)
        self.handle(WorkerJoined(hello=hello))

    def lose(self, worker: Incarnation, *, was_silent: bool = False) -> Stream | None:
        """Its stream has ended; it attaches again unless the worker was withdrawn."""
        stream = self.streams.pop(worker, None)
        if stream is None:
            return None
        self._silence.left(worker)
        if stream.joined:
            self.handle(WorkerLost(incarnation=worker, was_silent=was_silent))
        again = partial(self.attach, worker)
        self.cluster.by(self.incarnation, f"attach {stream.number}", again, 0.2)
        return stream

    def heard(self, stream: Stream, said: WorkerSaid) -> None:
        if self.streams.get(stream.worker) is stream and not stream.is_mute:
            assert stream.joined
            self._silence.heard(stream.worker)
            self.handle(said)

    def look(self) -> None:
        """As the dispatcher does several times a second."""
        suspects, lost = self._silence.look(self.cluster.now_s)
        for worker in suspects:
            self.counts["suspected workers"] += 1
            self.handle(WorkerSuspected(incarnation=worker))
        for worker in lost:
            self.counts["silent workers"] += 1
            stream = self.lose(worker, was_silent=True)
            assert stream is not None
            stream.end()
        if self.core.state.waiting and not self.core.state.workers:
            self.handle(TimePassed())

    # --- the core -------------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        displaced = self.displaced()
        commands = [*self.core.handle(event, self.cluster.now_s)]
        self._check_turns(commands, displaced)
        for command in commands:
            match command:
                case Send(worker=worker, message=message):
                    self.tell(worker, decode_to_worker(encode_to_worker(message)))
                case PairQuarantined():
                    self.counts["quarantined pairs"] += 1
                case PairTrusted() | LadderStepped():
                    pass  # for the log
                case _:
                    self._on_command(self, command)

    def tell(self, worker: Incarnation, message: ToWorker) -> None:
        stream = self.streams.get(worker)
        if stream is None:
            return

        def arrive() -> None:
            if not stream.is_deaf:
                self.cluster.workers[worker].post(FromRouter(stream, message))

        stream.down(arrive)

    def displaced(self) -> list[Request]:
        """Those that were admitted and wait for room."""
        state = self.core.state
        waiting = (state.requests[name] for name in state.waiting)
        return [one for one in waiting if one.admitted and one.state is RequestState.WAITING]

    def _check_turns(self, commands: Sequence[Command], displaced: list[Request]) -> None:
        later: Counter[Incarnation] = Counter()  # places that further ones get
        for command in reversed(commands):
            match command:
                case Send(worker=worker, message=Reserve() | Generate() as message):
                    request = self.core.state.requests.get(message.spec.key.request_id)
                    if request is not None:
                        self._check_turn(worker, request, displaced, later[worker])
                        later[worker] += len(request.choices)

    def _check_turn(
        self, worker: Incarnation, newcomer: Request, displaced: list[Request], later: int
    ) -> None:
        """No newcomer gets a place that a displaced request of its tier or a better one needs, that
        has waited for room and waits on. Those of other routers are only counted."""
        view = self.core.state.workers[worker]
        if newcomer.admitted:
            return
        self.counts["newcomers placed while displaced requests wait"] += bool(displaced)
        late = [one for one in displaced if _goes_before(one, newcomer, view)]
        needed = sum(not choice.finished for one in late for choice in one.choices)
        has_room = not late or view.free_places + later >= needed
        assert has_room, f"{newcomer.key} goes to {worker} before {late[0].key}, which waits"
        others = (one for other in self.cluster.routers.values() for one in other.displaced())
        self.counts["newcomers placed before displaced requests of another router"] += any(
            _goes_before(one, newcomer, view) for one in others
        )

    def validate(self) -> None:
        self.core.validate()


def _goes_before(request: Request, newcomer: Request, view: WorkerView) -> bool:
    """It waits, its tier is not a lower one, and the worker could hold it."""
    sampling = request.submitted.sampling
    longest = len(request.submitted.prompt_ids) + sampling.max_tokens
    return (
        request.state is RequestState.WAITING
        and request.tier.priority <= newcomer.tier.priority
        and longest <= view.hello.max_model_len
        and sampling.n <= view.hello.max_running_requests
        and not (view.draining or view.suspect)
    )
