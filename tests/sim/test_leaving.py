"""Random schedules in which workers drain one after the other, each replaced by another one: what
decodes moves, with all its choices. Every token is right, and nothing is left held by those that
have gone, nor by those that stay."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

import pytest

from cluster.worker.events import RunOnLoop
from kvpool.core.transfer.messages import HandoffMode
from kvpool.core.transfer.slabs import SlabState
from kvrelay.types import RequestSpec, Role
from router.core.request import Request, RequestState
from tests.sim.clients import Clients
from tests.sim.cluster import Cluster
from tests.sim.model import GEMMA, PLAIN, make_spec
from tests.sim.seeds import seeds
from tests.sim.test_cluster import disturb
from tests.sim.worker import Shape, Worker

ROUTERS = ("router-0", "router-1")
LONGEST_ANSWER = 60
EMPTY_S = 0.02
"""Between two looks whether a worker that drains is empty."""
GONE_S = 1.0
"""All routers have heard by then that it has ended."""
LONGEST_LEAVE_S = 2.0
"""The longest answers decode for more."""
PATIENCE_S = 60.0
"""After so long it is cut."""
P, D, B = Role.PREFILL, Role.DECODE, Role.BOTH


@dataclass(slots=True)
class Leaving:
    """`took_s`: of each worker that has left by itself. `cut`: how many have not."""

    cluster: Cluster
    took_s: list[float] = field(default_factory=list)
    cut: int = 0
    _names: count[int] = field(default_factory=partial(count, 100))

    def begin(self, role: Role | None = None) -> None:
        """Any worker, or one of this role; another one takes its place first."""
        there = [one for one in self.cluster.workers.values() if not one.core.draining]
        found = [one for one in there if role in (None, one.shape.role)]
        if not found:
            return
        worker = self.cluster.random.choice(found)
        self.cluster.start_worker(f"{worker.shape.role}-{next(self._names)}", worker.shape)
        self.cluster.let(worker.incarnation, lambda: self._drain(worker, self.cluster.now_s))

    def _drain(self, worker: Worker, since_s: float) -> None:
        worker.post(RunOnLoop(worker.core.drain))
        self._look(worker, since_s)

    def _look(self, worker: Worker, since_s: float) -> None:
        now_s = self.cluster.now_s
        if worker.core.empty:
            assert_empty(worker)
            self.took_s.append(now_s - since_s)
            self._end(worker)
        elif now_s - since_s > PATIENCE_S:
            self.cut += 1
            self.cluster.kill(worker.incarnation, for_good=True)
        else:
            look = partial(self._look, worker, since_s)
            self.cluster.at(now_s + EMPTY_S, partial(self.cluster.let, worker.incarnation, look))

    def _end(self, worker: Worker) -> None:
        """Its streams end behind all that it has said."""
        life = worker.incarnation
        for router in self.cluster.routers.values():
            if life in router.streams:
                router.streams[life].up(partial(router.withdraw, life))
        self.cluster.at(self.cluster.now_s + GONE_S, lambda: self.cluster.kill(life, for_good=True))


def assert_empty(worker: Worker) -> None:
    """Nobody holds a block there, but for pins, and peers that pull some of what is cached."""
    worker.core.validate()
    held = [one for one in worker.tables.held() if one.holder.side not in ("pinned", "pulled")]
    assert not held
    kept = {block for one in worker.tables.held() for block in one.tables[0]}
    assert worker.tables.device.available(0) + len(kept) == worker.tables.blocks
    slabs = worker.decode.reservations.slabs.counts()
    assert not slabs[SlabState.FILLED], slabs


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    return counting(monkeypatch)


def counting(patch: pytest.MonkeyPatch) -> Counter[str]:
    """# what happened to a request |-> how often"""
    counts: Counter[str] = Counter()
    move, again = Request.move, Request.try_again

    def moves(request: Request, spec: RequestSpec, *, led_away: bool) -> tuple[int, ...]:
        since = move(request, spec, led_away=led_away)
        counts["moved"] += 1
        counts["several moved"] += len(request.choices) > 1
        counts["tokens told with the commit"] += sum(since)
        counts["choices that had ended"] += bool(request.spec.finished_choices)
        return since

    def tries_again(request: Request, attempt: int) -> None:
        had_begun = request.led_away or request.state is RequestState.DECODING
        before = request.tries
        again(request, attempt)
        counts["tries of what had begun"] += request.tries > before and had_begun

    patch.setattr(Request, "move", moves)
    patch.setattr(Request, "try_again", tries_again)
    return counts


def world(
    seed: int, roles: tuple[Role, ...], mode: HandoffMode = HandoffMode.PUSH, *, blocks: int = 80
) -> tuple[Clients, Leaving]:
    clients = Clients(seed, 0, mode, routers=ROUTERS)
    layout = random.Random(seed).choice([PLAIN, GEMMA])
    for number, role in enumerate(roles):
        shape = Shape(role=role, blocks=blocks, mode=mode, layout=layout)
        clients.cluster.start_worker(f"{role}-{number}", shape)
    for number in range(16):
        spec = make_spec(clients.rng, number)
        sampling = replace(
            spec.sampling,
            max_tokens=clients.rng.randint(1, LONGEST_ANSWER),
            n=clients.rng.choice([1, 2, 3]),
        )
        clients.add(replace(spec, sampling=sampling, tpot_s=None), 2)
    return clients, Leaving(clients.cluster)


SHAPES = {"2p2d": (P, P, D, D), "1p3d": (P, D, D, D), "2b": (B, B)}


@pytest.mark.parametrize("seed", seeds(6, long=40))
@pytest.mark.parametrize("roles", SHAPES.values(), ids=SHAPES)
def test_one_after_the_other_leaves_and_nobody_notices(
    seed: int, roles: tuple[Role, ...], moved: Counter[str]
) -> None:
    clients, leaving = world(seed, roles)
    for number in range(4):
        role = clients.rng.choice(roles)
        clients.cluster.after(f"drain {number}", partial(leaving.begin, role), 0.8 + number)
    assert clients.finish() == {"done": len(clients.calls)}
    assert not leaving.cut and max(leaving.took_s) < LONGEST_LEAVE_S
    assert not moved["tries of what had begun"], "a message may be on its way to one that ends"


@pytest.mark.parametrize("mode", HandoffMode)
@pytest.mark.parametrize("seed", seeds(4, long=30))
def test_faults_while_workers_leave_lose_nothing(
    seed: int, mode: HandoffMode, moved: Counter[str]
) -> None:
    """Memory is short too: targets refuse, and sequences are preempted."""
    clients, leaving = world(
        seed, (P, P, D, D, B), mode, blocks=random.Random(seed).choice([30, 50])
    )
    for number in range(6):
        clients.cluster.after(f"drain {number}", leaving.begin, 0.5 + 0.3 * number)
    disturb(clients, moments=5)
    for request_id in clients.calls:
        if clients.rng.random() < 0.1:
            clients.cluster.after(f"abort {request_id}", partial(clients.abort, request_id), 2.0)
    assert set(clients.finish()) <= {"done", "aborted"}


def test_all_of_it_happens() -> None:
    """Else the tests above show nothing."""
    with pytest.MonkeyPatch.context() as patch:
        counts = counting(patch)
        for seed in range(3):
            for roles in SHAPES.values():
                test_one_after_the_other_leaves_and_nobody_notices(seed, roles, counts)
        assert counts["several moved"] > 10
        assert counts["moved"] > counts["several moved"]
        assert counts["tokens told with the commit"] and counts["choices that had ended"]
