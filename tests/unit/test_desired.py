"""Processes follow the desired state: counts, settings, roles, drains, and any history of all
that."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from cluster.core.desired import Desired
from cluster.core.members import Former, Kept
from cluster.core.supervision import (
    Announce,
    DesiredChanged,
    DesiredPool,
    DrainAsked,
    Lost,
    NodesDrain,
    Phase,
    Placed,
    ProcessJoined,
    ProcessKind,
    ProcessStopped,
    Remove,
    RoleAsked,
    RoleRefused,
    RoleTaken,
    Serving,
    SetRole,
    Start,
    State,
    StopAsked,
    StopProcess,
    SupervisionTick,
    SupervisorCommand,
    Withdraw,
)
from cluster.core.supervisor import Supervisor
from engine.core.activity import Stage
from kvrelay.types import Role
from tests.unit.desired_world import World
from tests.unit.test_supervisor import (
    HERE,
    LIMITS,
    ROUTER,
    SECOND,
    THERE,
    D,
    P,
    act,
    does,
    pools,
    ready,
    serve,
    start,
)

D1 = "decode-1"


def drains(commands: list[SupervisorCommand]) -> list[str]:
    return [command.name for command in commands if isinstance(command, StopProcess)]


def change(core: Supervisor, desired: Desired, now_s: float = 0.0) -> list[SupervisorCommand]:
    return act(core, DesiredChanged(desired), now_s)


def two_decodes() -> Supervisor:
    core = ready()
    change(core, pools(decode=2))
    assert act(core, SupervisionTick()) == [start(D1, 1)]
    serve(core, D1)
    return core


# --- counts ---------------------------------------------------------------------------------------


def test_ready_once_each_half_of_a_request_can_be_served() -> None:
    core = Supervisor(pools(decode=3, prefill=2), LIMITS, 0.0)
    act(core, SupervisionTick())
    serve(core, ROUTER, "decode-2")
    assert core.phase is Phase.STARTING
    serve(core, "prefill-1")
    assert (core.phase, core.is_settled()) == (Phase.READY, False)
    serve(core, P, D, D1)
    assert core.is_settled()


def test_a_pool_that_grows_starts_the_next_numbers() -> None:
    core = ready()
    assert change(core, pools(decode=3)) == []
    assert not core.is_settled()
    assert act(core, SupervisionTick()) == [start(D1, 1), start("decode-2", 1)]
    serve(core, D1, "decode-2")
    assert core.is_settled()


def test_a_pool_that_shrinks_drains_its_last_ones_and_routers_hear_that_they_are_gone() -> None:
    core = two_decodes()
    assert change(core, pools()) == [StopProcess(D1, drain=True)]
    assert core.workers[D1].state is State.DRAINING
    assert act(core, SupervisionTick()) == []
    assert act(core, ProcessStopped(name=D1)) == [Withdraw(ROUTER, "decode-1's")]
    assert core.is_settled()


def test_a_pool_that_shrinks_lets_go_first_what_does_not_serve() -> None:
    core = two_decodes()
    act(core, Lost(name=D, life=1, reason="crashed"), 1.0)
    assert change(core, pools()) == [StopProcess(D, drain=False)]
    act(core, ProcessStopped(name=D), 1.0)
    assert [*core.workers] == [P, D1]


def test_one_that_drains_is_not_started_again_when_it_closes() -> None:
    core = two_decodes()
    change(core, pools())
    assert act(core, Lost(name=D1, life=1, reason="it closed"), 1.0) == []
    act(core, ProcessStopped(name=D1), 1.0)
    assert act(core, SupervisionTick(), 100.0) == []


def test_a_name_that_comes_again_has_another_life() -> None:
    core = two_decodes()
    change(core, pools())
    act(core, ProcessStopped(name=D1))
    change(core, pools(decode=2))
    assert act(core, SupervisionTick()) == [start(D1, 2)]
    assert act(core, Serving(name=D1, life=1, address="old")) == []
    assert core.workers[D1].state is State.STARTING


# --- other settings ------------------------------------------------------------------------------


def test_settings_that_change_replace_workers_one_by_one_each_after_its_successor() -> None:
    core = two_decodes()
    newer = {**pools(decode=2), "decode": replace(pools(decode=2)["decode"], revision="2")}
    assert change(core, newer) == []
    assert act(core, SupervisionTick()) == [start("decode-2", 1)]
    assert drains(act(core, SupervisionTick(), 5.0)) == [], "it does not serve yet"
    serve(core, "decode-2")
    assert act(core, SupervisionTick(), 6.0) == [StopProcess(D, drain=True)]
    assert act(core, SupervisionTick(), 7.0) == [start("decode-3", 1)]
    act(core, ProcessStopped(name=D), 7.0)
    serve(core, "decode-3")
    assert act(core, SupervisionTick(), 8.0) == [StopProcess(D1, drain=True)]
    act(core, ProcessStopped(name=D1), 8.0)
    assert core.is_settled()
    assert [*core.workers] == [P, "decode-2", "decode-3"]


def test_without_room_for_one_more_an_old_one_leaves_first() -> None:
    core = ready()
    newer = {**pools(), "prefill": replace(pools()["prefill"], revision="2")}
    change(core, newer)
    assert act(core, SupervisionTick()) == [start("prefill-1", 1)]
    act(core, does("prefill-1", Stage.WAITS), 1.0)
    assert act(core, SupervisionTick(), 1.5) == [StopProcess(P, drain=True)]
    assert act(core, SupervisionTick(), 2.0) == []
    act(core, ProcessStopped(name=P), 3.0)
    serve(core, "prefill-1")
    assert core.is_settled()


def test_a_successor_that_can_not_start_costs_no_worker() -> None:
    core, now_s = ready(), 0.0
    change(core, {**pools(), "prefill": replace(pools()["prefill"], revision="2")})
    for life in range(1, 20):
        now_s += 60.0
        assert act(core, SupervisionTick(), now_s) == [start("prefill-1", life)]
        failed = Lost(name="prefill-1", life=life, reason="no such dtype", fatal=True)
        assert act(core, failed, now_s) == [Remove("prefill-1")]
    assert (core.phase, core.workers[P].state) == (Phase.READY, State.SERVING)
    assert change(core, pools(), now_s) == [StopProcess("prefill-1", drain=False)]
    act(core, ProcessStopped(name="prefill-1"), now_s)
    assert core.is_settled()


def test_one_that_was_lost_comes_back_with_the_settings_of_today() -> None:
    core = ready()
    act(core, Lost(name=D, life=1, reason="crashed"), 1.0)
    change(core, {**pools(), "decode": replace(pools()["decode"], revision="2")}, 1.0)
    assert act(core, SupervisionTick(), 2.0) == [start(D, 2)]
    serve(core, D, life=2)
    assert core.is_settled()


def test_routers_are_replaced_in_their_place_one_after_the_other() -> None:
    core = Supervisor(pools(routers=2), LIMITS, 0.0)
    act(core, SupervisionTick())
    serve(core, ROUTER, P, SECOND, D)
    newer = {**pools(), "router": DesiredPool(kind=ProcessKind.ROUTER, count=2, revision="2")}
    assert change(core, newer) == [StopProcess(ROUTER, drain=True, lame_duck=True)]
    assert act(core, SupervisionTick(), 1.0) == []
    act(core, ProcessStopped(name=ROUTER), 2.0)
    assert act(core, SupervisionTick(), 2.5) == [start(ROUTER, 2)]
    assert drains(act(core, SupervisionTick(), 3.0)) == []
    again = act(core, Serving(name=ROUTER, life=2, address="r2"), 3.0)
    assert again == [Announce(ROUTER, P, 1, "prefill-0's"), Announce(ROUTER, D, 1, "decode-0's")]
    assert act(core, SupervisionTick(), 4.0) == [], "it does not know its workers yet"
    for name in (P, D):
        act(core, ProcessJoined(name=name, life=1, router=ROUTER), 5.0)
    assert act(core, SupervisionTick(), 6.0) == [StopProcess(SECOND, drain=True, lame_duck=True)]


def test_a_pool_that_shall_be_no_more_goes_when_the_others_serve() -> None:
    core = ready()
    other = {**pools(), "fast": replace(pools()["decode"], revision="9")}
    del other["decode"]
    assert change(core, other) == []
    assert act(core, SupervisionTick()) == [Start("fast-0", 1, None, Role.DECODE)]
    assert drains(act(core, SupervisionTick(), 5.0)) == []
    serve(core, "fast-0")
    assert act(core, SupervisionTick(), 6.0) == [StopProcess(D, drain=True)]
    act(core, ProcessStopped(name=D), 7.0)
    assert core.is_settled()


# --- one that is asked to leave ------------------------------------------------------------------


def test_one_that_is_drained_is_replaced_at_once() -> None:
    core = two_decodes()
    assert act(core, DrainAsked(name=D)) == [StopProcess(D, drain=True)]
    assert act(core, DrainAsked(name=D)) == []
    assert act(core, SupervisionTick()) == [start("decode-2", 1)]
    act(core, ProcessStopped(name=D))
    serve(core, "decode-2")
    assert core.is_settled()


def test_one_that_is_drained_for_good_makes_its_pool_smaller() -> None:
    core = two_decodes()
    assert act(core, DrainAsked(name=D, replace=False)) == [StopProcess(D, drain=True)]
    assert act(core, SupervisionTick()) == []
    act(core, ProcessStopped(name=D))
    assert core.is_settled()
    assert core.members.desired["decode"].count == 1


def test_those_on_a_node_that_drains_leave_and_others_replace_them() -> None:
    core = two_decodes()
    for name, home in ((P, HERE), (D, THERE), (D1, HERE), (ROUTER, THERE)):
        act(core, Placed(name=name, life=1, home=home))
    leaves = [StopProcess(ROUTER, drain=True, lame_duck=True)]
    assert act(core, NodesDrain({THERE.node: 30.0})) == leaves
    act(core, ProcessStopped(name=ROUTER))
    assert act(core, SupervisionTick()) == [start(ROUTER, 2), start("decode-2", 1)]
    assert act(core, NodesDrain({THERE.node: 29.0}), 1.0) == []
    act(core, Serving(name=ROUTER, life=2, address="r2"))
    for name in (P, D, D1):
        act(core, ProcessJoined(name=name, life=1, router=ROUTER))
    serve(core, "decode-2")
    assert act(core, SupervisionTick(), 8.0) == [StopProcess(D, drain=True)]
    act(core, ProcessStopped(name=D))
    assert core.is_settled()


def test_those_on_a_node_that_drains_leave_in_time_whoever_replaces_them() -> None:
    core = two_decodes()
    for name, home in ((P, THERE), (D, THERE), (D1, THERE), (ROUTER, HERE)):
        act(core, Placed(name=name, life=1, home=home))
    assert act(core, NodesDrain({THERE.node: 30.0})) == []
    starts = [start("prefill-1", 1), start("decode-2", 1), start("decode-3", 1)]
    assert act(core, SupervisionTick()) == starts, "one for each at once"
    serve(core, "decode-3")
    assert drains(act(core, SupervisionTick(), 23.9)) == [D]
    assert drains(act(core, SupervisionTick(), 24.0)) == [P, D1]
    act(core, Lost(name="decode-2", life=1, reason="no luck"), 24.0)
    assert act(core, SupervisionTick(), 25.0) == [start("decode-2", 2)]


def test_a_lame_duck_leaves_its_node_so_much_earlier() -> None:
    wanted = pools(routers=2)
    core = Supervisor({**wanted, "router": replace(wanted["router"], lame_duck_s=5.0)}, LIMITS, 0.0)
    act(core, SupervisionTick())
    serve(core, ROUTER, SECOND, P, D)
    for name in (ROUTER, SECOND):
        act(core, Placed(name=name, life=1, home=THERE))
    assert drains(act(core, NodesDrain({THERE.node: 30.0}))) == [ROUTER]
    assert drains(act(core, SupervisionTick(), 18.9)) == []
    last = StopProcess(SECOND, drain=True, lame_duck=True)
    assert act(core, SupervisionTick(), 19.0) == [last], "it leads on for 5 s, and has 6 s"


def test_a_restarted_controller_leaves_a_router_that_leads_clients_away_its_time() -> None:
    core = two_decodes()
    act(core, DrainAsked(name=ROUTER))
    other = again(core, {ROUTER, P, D, D1})
    leads = StopProcess(ROUTER, drain=True, lame_duck=True)
    assert leads in act(other, SupervisionTick())


def test_nobody_leaves_whom_nobody_knows() -> None:
    core = ready()
    assert act(core, DrainAsked(name="decode-7", replace=False)) == []
    assert core.is_settled()


def test_all_that_drains_ends_with_the_cluster() -> None:
    core = two_decodes()
    act(core, DrainAsked(name=D))
    act(core, DrainAsked(name=P))
    assert drains(act(core, StopAsked())) == [ROUTER]
    act(core, ProcessStopped(name=D))
    assert drains(act(core, ProcessStopped(name=ROUTER))) == [
        name for name in core.workers if core.workers[name].state is not State.GONE and name != P
    ]


# --- roles ---------------------------------------------------------------------------------------

PREFILL, DECODE, BOTH = Role.PREFILL, Role.DECODE, Role.BOTH


def flip(core: Supervisor, name: str, role: Role) -> None:
    life = core.workers[name].life
    assert act(core, RoleAsked(name, role)) == [SetRole(name, life, role)]
    assert not core.is_settled()
    assert act(core, RoleTaken(name, life, role)) == []


def roles(core: Supervisor) -> dict[str, Role | None]:
    return {name: worker.role for name, worker in core.workers.items()}


def again(core: Supervisor, left: set[str], desired: Desired | None = None) -> Supervisor:
    """Its controller was killed, and of its processes these are left."""
    former = Former(
        phase=core.phase, left=frozenset(left), kept=core.kept(), roles=dict(core.members.roles)
    )
    return Supervisor(desired or core.members.desired, LIMITS, 0.0, former=former)


def test_a_worker_that_was_flipped_and_is_lost_comes_back_with_its_role() -> None:
    core = two_decodes()
    flip(core, D1, PREFILL)
    assert core.is_settled()
    act(core, Lost(name=D1, life=1, reason="crashed"), 1.0)
    assert act(core, SupervisionTick(), 2.0) == [Start(D1, 2, None, PREFILL)]
    serve(core, D1, life=2)
    assert core.is_settled()


def test_a_restarted_controller_remembers_flips_of_those_that_are_left_and_those_that_are_not() -> (
    None
):
    core = two_decodes()
    flip(core, D, PREFILL)
    for left in ({ROUTER, P, D, D1}, {ROUTER, P}, {ROUTER}):
        other = again(core, left)
        started = [one for one in act(other, SupervisionTick()) if isinstance(one, Start)]
        assert {one.name: one.role for one in started} == {
            ROUTER: None,
            P: PREFILL,
            D: PREFILL,
            D1: DECODE,
        }
        serve(other, ROUTER, P, D, D1)
        assert other.is_settled()


def test_a_controller_that_is_killed_before_it_told_a_worker_its_role_tells_it_again() -> None:
    core = two_decodes()
    act(core, RoleAsked(D1, PREFILL))
    other = again(core, {ROUTER, P, D, D1})
    act(other, SupervisionTick())
    assert SetRole(D1, 1, PREFILL) in act(other, Serving(name=D1, life=1, address="d1"))


def test_a_role_that_is_refused_after_all_is_that_of_the_pool() -> None:
    core = two_decodes()
    act(core, RoleAsked(D1, PREFILL))
    other = again(core, {ROUTER, P, D, D1})
    act(other, SupervisionTick())
    serve(other, ROUTER, P, D)
    act(other, Serving(name=D1, life=1, address="d1"))
    act(other, ProcessJoined(name=D1, life=1, router=ROUTER))
    assert not other.is_settled()
    act(other, RoleRefused(D1, 1, PREFILL, "another dtype"))
    assert other.is_settled() and other.workers[D1].role is DECODE


def test_one_that_replaces_a_flipped_worker_gets_its_role() -> None:
    core = two_decodes()
    flip(core, D, PREFILL)
    act(core, DrainAsked(name=D))
    assert act(core, SupervisionTick()) == [Start("decode-2", 1, None, PREFILL)]
    act(core, ProcessStopped(name=D))
    serve(core, "decode-2")
    assert core.is_settled()


def test_an_old_worker_leaves_when_its_own_role_is_there_again() -> None:
    core = two_decodes()
    flip(core, D, PREFILL)
    newer = {**pools(decode=2), "decode": replace(pools(decode=2)["decode"], revision="2")}
    change(core, newer)
    assert act(core, SupervisionTick()) == [Start("decode-2", 1, None, DECODE)]
    serve(core, "decode-2")
    assert drains(act(core, SupervisionTick(), 1.0)) == [D1], "decode-0 is the pool's only prefill"
    act(core, ProcessStopped(name=D1), 1.0)
    assert act(core, SupervisionTick(), 2.0) == [Start(D1, 2, None, PREFILL)]
    serve(core, D1, life=2)
    assert drains(act(core, SupervisionTick(), 3.0)) == [D]
    act(core, ProcessStopped(name=D), 3.0)
    assert core.is_settled()


def test_a_flip_of_one_that_is_being_replaced_is_its_successors() -> None:
    core = two_decodes()
    newer = {**pools(decode=2), "decode": replace(pools(decode=2)["decode"], revision="2")}
    change(core, newer)
    act(core, SupervisionTick())
    serve(core, "decode-2")
    told = act(core, RoleAsked(D, PREFILL))
    assert SetRole(D, 1, PREFILL) in told
    for _ in range(20):
        for one in told:
            match one:
                case SetRole(name=name, life=life, role=role):
                    act(core, RoleTaken(name, life, role))
                case Start(name=name, life=life):
                    serve(core, name, life=life)
                case StopProcess(name=name):
                    act(core, ProcessStopped(name=name))
        told = act(core, SupervisionTick())
    assert core.is_settled()
    assert Counter(roles(core).values()) == {PREFILL: 2, DECODE: 1}


def test_a_file_that_is_applied_takes_flips_back_and_another_number_does_not() -> None:
    core = two_decodes()
    flip(core, D1, PREFILL)
    assert change(core, pools(decode=3)) == []
    assert act(core, SupervisionTick()) == [start("decode-2", 1)]
    serve(core, "decode-2")
    assert roles(core) == {P: PREFILL, D: DECODE, D1: PREFILL, "decode-2": DECODE}
    told = act(core, DesiredChanged(pools(decode=3), anew=True))
    assert told == [SetRole(D1, 1, DECODE)]


def test_a_file_with_another_role_replaces_nobody() -> None:
    core = two_decodes()
    both = {**pools(decode=2), "decode": replace(pools(decode=2)["decode"], role=BOTH)}
    told = act(core, DesiredChanged(both, anew=True))
    assert sorted(told, key=str) == [SetRole(D, 1, BOTH), SetRole(D1, 1, BOTH)]


def test_a_role_that_a_worker_can_not_have_is_forgotten() -> None:
    core = two_decodes()
    act(core, RoleAsked(D1, PREFILL))
    assert act(core, RoleRefused(D1, 1, PREFILL, "another dtype")) == []
    assert core.is_settled()
    assert core.members.roles["decode"] == {DECODE: 2}


def test_answers_of_an_earlier_flip_or_life_change_nothing() -> None:
    core = two_decodes()
    act(core, RoleAsked(D1, PREFILL))
    assert act(core, RoleAsked(D1, DECODE)) == [], "it has that role"
    assert act(core, RoleTaken(D1, 1, PREFILL)) == [SetRole(D1, 1, DECODE)]
    assert act(core, RoleRefused(D1, 1, PREFILL, "late")) == []
    act(core, RoleTaken(D1, 0, PREFILL))
    act(core, RoleTaken(D1, 1, DECODE))
    assert core.is_settled()


def test_nobody_flips_whom_nobody_knows_nor_a_router_nor_one_that_leaves() -> None:
    core = two_decodes()
    act(core, DrainAsked(name=D))
    for name in (D, ROUTER, "decode-9"):
        assert act(core, RoleAsked(name, PREFILL)) == []


def test_nobody_flips_before_each_half_of_a_request_was_served() -> None:
    """Else the cluster would not become ready, and give up."""
    core = Supervisor(pools(), LIMITS, 0.0)
    act(core, SupervisionTick())
    assert act(core, RoleAsked(P, DECODE)) == []
    serve(core, ROUTER, P, D)
    assert core.phase is Phase.READY


def either(count: int) -> Desired:
    return {
        "router": pools()["router"],
        "worker": DesiredPool(kind=ProcessKind.WORKER, count=count, revision="1"),
    }


def test_half_of_a_pool_that_takes_either_role_begins_with_each() -> None:
    core = Supervisor(either(3), LIMITS, 0.0)
    act(core, SupervisionTick())
    assert [*roles(core).values()] == [PREFILL, DECODE, PREFILL]
    serve(core, ROUTER, *core.workers)
    assert (core.phase, core.is_settled()) == (Phase.READY, True)
    act(core, DesiredChanged(either(5)))
    act(core, SupervisionTick())
    assert Counter(roles(core).values()) == {PREFILL: 3, DECODE: 2}


def test_a_pool_that_takes_either_role_keeps_them_when_its_file_is_applied() -> None:
    core = Supervisor(either(3), LIMITS, 0.0)
    act(core, SupervisionTick())
    serve(core, ROUTER, *core.workers)
    flip(core, "worker-2", DECODE)
    assert act(core, DesiredChanged(either(3), anew=True)) == []
    assert core.is_settled()


def test_a_pool_that_shrinks_loses_the_role_that_most_have() -> None:
    core = Supervisor(either(4), LIMITS, 0.0)
    act(core, SupervisionTick())
    serve(core, ROUTER, *core.workers)
    flip(core, "worker-1", PREFILL)
    assert drains(act(core, DesiredChanged(either(3)))) == ["worker-2"], "the last one of them"
    assert drains(act(core, DesiredChanged(either(2)))) == ["worker-1"]
    assert core.members.roles["worker"] == {PREFILL: 1, DECODE: 1}


# --- a restarted controller ----------------------------------------------------------------------


def test_a_restarted_controller_drains_those_that_drained() -> None:
    core = two_decodes()
    act(core, DrainAsked(name=D))
    kept = core.kept()
    assert kept[D] == Kept(
        pool="decode",
        kind=ProcessKind.WORKER,
        revision="1",
        role=Role.DECODE,
        has_role=Role.DECODE,
        known_at=core.workers[D].address,
        leaves=True,
    )
    former = Former(phase=Phase.READY, left=frozenset({ROUTER, P, D, D1}), kept=kept)
    again = Supervisor(core.members.desired, LIMITS, 0.0, former=former)
    told = act(again, SupervisionTick())
    assert StopProcess(D, drain=True) in told
    assert [one for one in told if isinstance(one, Start)] == [
        start(ROUTER, 1),
        start(P, 1),
        start(D1, 1),
        start("decode-2", 1),
    ]
    act(again, ProcessStopped(name=D))
    serve(again, ROUTER, P, D1, "decode-2")
    assert again.is_settled()


def test_a_restarted_controller_goes_on_replacing() -> None:
    core = two_decodes()
    newer = {**pools(decode=2), "decode": replace(pools(decode=2)["decode"], revision="2")}
    change(core, newer)
    former = Former(phase=Phase.READY, left=frozenset({ROUTER, P, D, D1}), kept=core.kept())
    again = Supervisor(newer, LIMITS, 0.0, former=former)
    assert drains(act(again, SupervisionTick())) == []
    serve(again, ROUTER, P, D, D1)
    assert again.workers[D].revision == "1"
    serve(again, "decode-2")
    assert drains(act(again, SupervisionTick(), 1.0)) == [D]


# --- any history ---------------------------------------------------------------------------------

EVENTS = 100_000
HISTORIES = 50


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_any_history_ends_as_desired(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wishes, flips, drains, deaths and restarts of the controller. Once the cluster is left alone,
    it is as desired within 200 ticks: 100 s, of which the longest pause before a start takes 60."""
    world = World(seed)
    monkeypatch.setattr("cluster.core.supervisor.STARTS_BEFORE_FATAL", 10**9)
    while world.events < EVENTS / HISTORIES:
        world.step()
        if world.rng.random() < 0.005:
            world.calm_down()
    world.calm_down()
    running = {process.name for process in world.core.processes()}
    assert world.alive <= running, "nothing else is left"
    world.stop()
    assert world.core.phase is Phase.STOPPED
    assert not world.alive
