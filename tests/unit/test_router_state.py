"""Between two events, all that a router holds belongs to exactly one request in a fitting state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvrelay.qos import LadderRules, QosTier, QosTiers
from kvrelay.types import Incarnation, Objectives, Role
from router.core.core import RouterCore
from router.core.events import Aborted
from router.core.load.prefill_queue import Ahead
from router.core.migration import Moving
from router.core.promises.promises import Promise
from router.core.promises.refusal import NO_CAPACITY
from router.core.promises.work import Promised
from router.core.request import TRANSITIONS, Request, RequestState
from router.core.router_state import RouterState
from router.core.shared_queue import open_shared_queue
from router.core.state.waiting import WaitingLine
from router.core.workers import Workers
from tests.unit.router_kit import key, request, reserved, says, split, submit, tokens
from tests.unit.router_world import SETTLE_S, World

P, D = Incarnation("p"), Incarnation("d")
LONG = tuple(range(20))
SPLIT = (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)
TIERS = QosTiers(
    tiers=(
        QosTier(name="gold", share=0.25, objectives=Objectives(ttft_s=0.5, tpot_s=0.25)),
        QosTier(name="free", priority=1, patience_s=0.5, capped_tokens=4),
    ),
    default="free",
    ladder=LadderRules(hold_s=0.5, calm_s=1),
)


def plain() -> RouterState:
    return RouterState()


def shared() -> RouterState:
    workers = Workers()
    return RouterState(workers=workers, dispatch=open_shared_queue(workers, TIERS), tiers=TIERS)


def moving() -> RouterState:
    return RouterState(moves=Moving())


def leaving() -> RouterState:
    return RouterState(moves=Moving(hot_spots=False))


def tiers() -> RouterState:
    state = RouterState(tiers=TIERS)
    state.promises.claims.first.value = 1.0
    return state


SCHEDULES = {
    "plain": (plain, SPLIT, 8),
    "both": (plain, (Role.BOTH, Role.BOTH), 8),
    "alone": (plain, (Role.BOTH,), 8),
    "pair": (plain, (Role.PREFILL, Role.DECODE), 8),
    "mixed": (plain, (*SPLIT, Role.BOTH), 8),
    "shared": (shared, SPLIT, 8),
    "moves": (moving, SPLIT, 60),
    "tiers": (tiers, SPLIT, 8),
    "drains": (leaving, (*SPLIT, Role.BOTH), 60),
}
ROUTERS = {"drains": 2}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_laws_hold_after_every_event(name: str, seed: int) -> None:
    open_state, roles, most = SCHEDULES[name]
    states = [open_state() for _ in range(ROUTERS.get(name, 1))]
    world = World(seed, *states, pressed=name == "moves")
    for role in roles:
        world.join(role)
    for number in range(60):
        n, max_tokens = world.random.choice(((1, most), (1, most), (2, most), (1, 0)))
        asked = request(str(number), n=n, max_tokens=max_tokens)
        tier = world.random.choice(("", "gold")) if name in ("tiers", "shared") else ""
        if name == "shared":
            asked = replace(asked, prompt_ids=LONG)  # they wait for each other
        world.submit(replace(asked, qos_tier=tier))
        for _ in range(world.random.randrange(12)):
            world.answer()
        drains = 0.12 if name == "drains" else 0.04
        for chance, happens in ((0.15, world.disturb), (0.06, world.kill), (drains, world.drain)):
            if world.random.random() < chance:
                happens()
        world.leave()
    world.finish()


@pytest.mark.parametrize("roles", [SPLIT, (Role.BOTH, Role.BOTH)], ids=["split", "both"])
def test_workers_that_drain_cost_no_request_anything(roles: tuple[Role, ...]) -> None:
    """Two routers; targets refuse now and then. All tokens come once, none by another try. Only who
    has asked a worker that is gone must ask another one."""
    moves: Counter[int] = Counter()
    again = Request.try_again

    def tries_again(request: Request, attempt: int) -> None:
        before, was_asked = request.tries, request.state is RequestState.ASKED
        again(request, attempt)
        assert request.tries == before or was_asked, request.story

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Request, "try_again", tries_again)
        for seed in range(12):
            world = World(seed, leaving(), leaving(), fails=False)
            for core in world.cores:
                core.state.failover_patience_s = SETTLE_S / 2
            for role in roles:
                world.join(role)
            for number in range(40):
                n = world.random.choice((1, 2, 3))
                world.submit(request(str(number), n=n, max_tokens=60))
                for _ in range(world.random.randrange(16)):
                    world.answer()
                if world.random.random() < 0.2:
                    world.drain()
                world.leave()
            world.finish()
            assert {*world.ended.values()} <= {"done", "refused"}
            moves += world.moves
    assert min(moves[n] for n in (1, 2, 3)) > 10, moves


def test_schedules_reach_every_transition() -> None:
    """Of the table: no transition is in it that never happens."""
    seen: set[tuple[RequestState, RequestState]] = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("router.core.request.Request.enter", recording(seen))
        for name in SCHEDULES:
            for seed in (*range(10), 21):
                test_the_laws_hold_after_every_event(name, seed)
    allowed = {(one, then) for one, after in TRANSITIONS.items() for then in after}
    assert seen == allowed


def recording(seen: set[tuple[RequestState, RequestState]]) -> Callable[..., None]:
    enter = Request.enter

    def recorded(request: Request, state: RequestState) -> None:
        seen.add((request.state, state))
        enter(request, state)

    return recorded


def test_a_transition_that_is_not_in_the_table_is_refused() -> None:
    core = split()
    submit(core)
    says(core, "d", reserved())
    with pytest.raises(AssertionError, match=r"r \(attempt 0\) can't go from prefilling to asked"):
        core.state.requests["r"].enter(RequestState.ASKED)


# --- each law can be broken -----------------------------------------------------------------------


def running() -> RouterCore:
    core = split()
    submit(core)
    says(core, "d", reserved())
    core.validate()
    return core


def break_state(state: RouterState) -> None:
    state.requests["r"].state = RequestState.SEEKING


def break_waiting(state: RouterState) -> None:
    state.requests["r"].state = RequestState.WAITING


def break_room(state: RouterState) -> None:
    state.waiting.try_wait("nobody", WaitingLine(0, ""), NO_CAPACITY, 5.0, 2)


def break_line(state: RouterState) -> None:
    state.waiting.displaced.add(WaitingLine(0, "", frozenset()))


def break_turn(state: RouterState) -> None:
    """In the waiting room, though it has its slot."""
    state.waiting.try_wait("r", WaitingLine(0, ""), NO_CAPACITY, 5.0, 2)
    state.waiting.take_next(9.0)


def break_queue(state: RouterState) -> None:
    state.requests["r"].state = RequestState.QUEUED


def break_request(state: RouterState) -> None:
    """Forgotten, but for its slots."""
    del state.requests["r"]


def break_slot(state: RouterState) -> None:
    """Owned twice."""
    state.workers[D].unreleased.add(key())


def break_entry(state: RouterState) -> None:
    state.workers[P].queue.add(key("other"), Ahead(seconds=1, tokens=1), 2)


def break_released(state: RouterState) -> None:
    state.workers[P].unreleased.add(key("other"))


def break_worker(state: RouterState) -> None:
    state.workers.leave(P)


def break_promise(state: RouterState) -> None:
    """Claimed, and not counted."""
    work = Promised(prefill_s=1)
    promise = Promise(promise_id=1, digest=1, due_s=1, work=work)
    state.requests["r"].promise = promise


@pytest.mark.parametrize(
    "broken",
    [
        *(break_state, break_waiting, break_room, break_line, break_turn, break_queue),
        *(break_request, break_slot, break_entry, break_released, break_worker, break_promise),
    ],
)
def test_a_broken_law_is_noticed(broken: Callable[[RouterState], None]) -> None:
    core = running()
    broken(core.state)
    with pytest.raises(AssertionError):
        core.validate()


def test_slots_of_those_that_have_left_are_named() -> None:
    core = running()
    says(core, "p", tokens(0, 10))
    core.handle(Aborted(request_id="r"), 3)
    assert core.state.workers[D].unreleased == {key()}
    core.validate()
