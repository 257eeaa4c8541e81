"""The clients of a simulated cluster, their way from router to router, and what must hold at the
end."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial

from kvpool.core.transfer.messages import HandoffMode
from kvpool.core.transfer.slabs import SlabState
from kvrelay.errors import KvrelayError, Refused, RequestFailedError
from kvrelay.types import NO_OBJECTIVES, Objectives, RequestSpec
from router.core.events import Admit, Command, Deliver, Fail, Refuse
from router.core.policy.choice import DEFAULT_POLICIES, Policies
from tests.sim.calls import GONE, Call, Face
from tests.sim.cluster import Cluster
from tests.sim.model import make_spec
from tests.sim.routers import RouterLife
from tests.sim.simulation import TICK_S
from tests.sim.waits import who_waits

PING_S = 4.0
"""A client that has heard nothing of its router for so long takes it for gone."""


class Clients:
    def __init__(
        self,
        seed: int,
        requests: int,
        mode: HandoffMode = HandoffMode.PUSH,
        policies: Policies = DEFAULT_POLICIES,
        *,
        routers: Sequence[str] = ("router-0",),
        starts: bool = True,
        tick_s: float = TICK_S,
    ) -> None:
        """`starts`: nobody else starts the routers."""
        self.mode = mode
        self.rng = random.Random(seed)
        self.cluster = Cluster(seed, self.hear, policies, tick_s=tick_s)
        self.cluster.router_died = self._router_died
        self.calls: dict[str, Call] = {}
        self.faces: defaultdict[RouterLife, dict[str, Face]] = defaultdict(dict)
        self.addresses = [*routers]
        for name in self.addresses if starts else ():
            self.cluster.start_router(name)
        for number in range(requests):
            self.add(make_spec(self.rng, number), 2)

    def add(
        self,
        spec: RequestSpec,
        longest_delay_s: float,
        objectives: Objectives = NO_OBJECTIVES,
    ) -> None:
        wanted = range(spec.sampling.n)
        cut = {c: self.rng.randint(1, 6) for c in wanted if self.rng.random() < 0.2}
        self.calls[spec.key.request_id] = Call(spec=spec, cut=cut, objectives=objectives)
        self.submit(spec.key.request_id, self.rng.uniform(0, longest_delay_s))

    def submit(self, request_id: str, delay_s: float) -> None:
        """Some time later, at any router."""
        call = self.calls[request_id]
        call.routers = call.so_far.routers = len(self.addresses)
        call.at = self.rng.randrange(len(self.addresses))
        self._send(call, delay_s)

    def abort(self, request_id: str) -> None:
        """Its client leaves."""
        call = self.calls[request_id]
        if call.ended is None:
            call.ended = "aborted"
            self._hang_up(call)

    # --- at a router ----------------------------------------------------------------------------

    def hear(self, router: RouterLife, command: Command) -> None:
        assert isinstance(command, Admit | Refuse | Deliver | Fail)
        face = self.faces[router][command.request_id]
        match command:
            case Admit():
                assert not face.admitted
                face.admitted = True
            case Refuse(refusal=refusal):
                face.refuse(refusal)
            case Deliver():
                face.deliver(command)
            case Fail(reason=reason, message=message):
                face.end(RequestFailedError(reason, message))

    # --- between routers ------------------------------------------------------------------------

    def _send(self, call: Call, delay_s: float) -> None:
        send = partial(self._connect, call)
        self.cluster.after(f"client {call.spec.key.request_id}", send, max(delay_s, 1e-6))

    def _connect(self, call: Call) -> None:
        if call.ended is not None:
            return
        router = self.cluster.routers.get(self.addresses[call.at % len(self.addresses)])
        if router is None:
            self.over(call, GONE)
            return
        call.face = Face(self, call, router, self.cluster.next_id())
        call.face.up(call.face.begin)
        self._watch(call.face)

    def _watch(self, face: Face) -> None:
        """A router that stands still is noticed, since it answers no ping."""
        if self.cluster.is_stopped(face.router.incarnation):
            patience_s = PING_S + self.rng.uniform(0, PING_S / 2)
            at_s = self.cluster.now_s + patience_s
            self.cluster.at(at_s, partial(self._pinged, face))

    def router_stopped(self, router: RouterLife) -> None:
        for face in self.connected(router):
            self._watch(face)

    def connected(self, router: RouterLife) -> list[Face]:
        """In the order of their calls."""
        faces = [call.face for call in self.calls.values() if call.face is not None]
        return [face for face in faces if face.router is router]

    def _pinged(self, face: Face) -> None:
        if face.call.face is face and self.cluster.is_stopped(face.router.incarnation):
            self._lost(face)

    def _router_died(self, router: RouterLife) -> None:
        """What it has sent last may arrive, or not."""
        for face in self.connected(router):
            face.is_mute = self.rng.random() < 0.5
            self.cluster.after(f"down {face.number}", partial(self._lost, face), 0.05)
        self.faces.pop(router, None)

    def _lost(self, face: Face) -> None:
        if face.call.face is face:
            self._hang_up(face.call)
            self.over(face.call, GONE)

    def _hang_up(self, call: Call) -> None:
        """Its router hears of it soon, or only when the client is back long since."""
        if call.face is not None:
            is_late = call.so_far.has_begun and self.rng.random() < 0.3
            call.face.up(call.face.hang_up, 5.0 if is_late else 0.01)
            call.face = None

    def over(self, call: Call, error: KvrelayError | None) -> None:
        """Its stream has ended: it is whole, or goes on somewhere else, or comes again."""
        call.face = None
        if call.ended is not None:
            return
        if error is None or call.so_far.is_whole(call.request):
            call.ended = "done"
            return
        is_refused = isinstance(error, Refused)
        if is_refused and not call.so_far.has_begun:
            call.refusals += 1
            if call.gives_up(error):
                call.ended = f"refused: {error}"
                return
        if not is_refused and error is not GONE:
            call.ended = f"failed: {error}"
            return
        self._come_again(call, error)

    def _come_again(self, call: Call, error: KvrelayError) -> None:
        delay_s = call.delay_s(error, self.cluster.now_s)
        if delay_s is None:
            call.ended = f"failed: no router, or hopeless: {error}"
            return
        call.at += error is GONE or call.so_far.has_begun or self.rng.random() < 0.3
        self._send(call, delay_s)

    # --- the end --------------------------------------------------------------------------------

    @property
    def all_ended(self) -> bool:
        return all(call.ended is not None for call in self.calls.values())

    def finish(self) -> Counter[str]:
        """Run to the end and check all that must hold then; how the requests ended."""
        self.cluster.run()
        return self.conclude()

    def conclude(self) -> Counter[str]:
        self.cluster.settle()
        for router in self.cluster.routers.values():
            assert not router.core.state.requests, who_waits(self.cluster)
            assert_router_idle(router)
            assert not self.faces[router]
        for call in self.calls.values():
            assert call.ended is not None, f"{call.spec.key} never ended"
            call.check()
        assert_nothing_held(self.cluster)
        return Counter(call.ended or "" for call in self.calls.values())


def assert_router_idle(router: RouterLife) -> None:
    """It has booked nothing any more, and no promise is claimed."""
    state = router.core.state
    for view in state.workers.values():
        booked = {*view.outlook, *view.queue, *view.unreleased}
        assert not booked, f"{router.incarnation} has booked {booked} at {view.incarnation}"
    assert not state.moves.pending and not state.dispatch.waiting
    assert not len(state.waiting) and not state.promises.claimed


def assert_nothing_held(cluster: Cluster) -> None:
    for worker in cluster.workers.values():
        worker.core.validate()
        assert not worker.held(), worker.held()
        pinned = {b for held in worker.tables.held() for b in held.tables[0]}
        assert worker.tables.device.available(0) + len(pinned) == worker.tables.blocks
        assert worker.pool is None or worker.pool.stores.idle, worker.incarnation
        slabs = worker.decode.reservations.slabs
        assert slabs.counts()[SlabState.FREE] == slabs.count, slabs.held(cluster.now_s)
        assert worker.decode.sequences == 0
        assert worker.prefill.jobs.handing_over == len(worker.prefill.queue) == 0
        assert worker.core.idle
        assert not len(worker.core.copies), "a copy has not ended"
    for host in cluster.pools.hosts.values():
        assert host.node is not None
        counts = host.node.core.books.counts()
        states = ("granted", "fenced", "loading", "disk_waiting")
        assert not any(counts[state] for state in states), counts
        assert host.node.core.idle
