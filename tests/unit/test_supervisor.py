"""The supervisor's exact commands, and random histories against its invariants."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf

import pytest

from cluster.core.desired import Desired
from cluster.core.members import Former
from cluster.core.processes import STABLE_S
from cluster.core.supervision import (
    Announce,
    DesiredChanged,
    DesiredPool,
    Does,
    DrainAsked,
    DriverEnded,
    Home,
    Lost,
    Note,
    Phase,
    PingProcess,
    Placed,
    ProcessAnswered,
    ProcessJoined,
    ProcessKind,
    ProcessStopped,
    Remove,
    Serving,
    Start,
    State,
    StopAsked,
    StopProcess,
    SupervisionTick,
    SupervisorCommand,
    SupervisorEvent,
    Withdraw,
)
from cluster.core.supervisor import STARTS_BEFORE_FATAL, Limits, Supervisor
from engine.core.activity import Stage, StartActivity
from kvrelay.types import Role

ROUTER, SECOND = "router-0", "router-1"
P, D = "prefill-0", "decode-0"


def pools(routers: int = 1, prefill: int = 1, decode: int = 1, revision: str = "1") -> Desired:
    return {
        "router": DesiredPool(kind=ProcessKind.ROUTER, count=routers, revision=revision),
        "prefill": DesiredPool(
            kind=ProcessKind.WORKER,
            count=prefill,
            revision=revision,
            needs="{GPU: 1}",
            role=Role.PREFILL,
        ),
        "decode": DesiredPool(
            kind=ProcessKind.WORKER,
            count=decode,
            revision=revision,
            needs="{CPU: 2}",
            role=Role.DECODE,
        ),
    }


def start(name: str, life: int, node: str | None = None) -> Start:
    """A worker starts with the role of its pool."""
    wish = pools().get(name.rpartition("-")[0])
    return Start(name, life, node, wish.role if wish is not None else None)


LIMITS = Limits(startup_timeout_s=60.0, hang_timeout_s=inf)


def new(limits: Limits = LIMITS) -> Supervisor:
    return Supervisor(pools(), limits, now_s=0.0)


def act(core: Supervisor, event: SupervisorEvent, now_s: float = 0.0) -> list[SupervisorCommand]:
    """The commands without the notes; checks the invariants."""
    commands = core.handle(event, now_s)
    core.validate()
    return [command for command in commands if not isinstance(command, Note)]


def notes(core: Supervisor, event: SupervisorEvent, now_s: float) -> list[str]:
    return [c.text for c in core.handle(event, now_s) if isinstance(c, Note)]


def ready(limits: Limits = LIMITS) -> Supervisor:
    core = new(limits)
    act(core, SupervisionTick())
    act(core, Serving(name=ROUTER, life=1, address="r"))
    for name, address in ((P, "p"), (D, "d")):
        act(core, Serving(name=name, life=1, address=address))
        act(core, ProcessJoined(name=name, life=1, router=ROUTER))
    assert core.phase is Phase.READY
    return core


def test_starts_everything_at_once_and_only_once() -> None:
    core = new()
    assert act(core, SupervisionTick()) == [start(ROUTER, 1), start(P, 1), start(D, 1)]
    assert act(core, SupervisionTick()) == []


def does(name: str, stage: Stage, done: int = 0, total: int = 0, life: int = 1) -> Does:
    activity = StartActivity(stage=stage, done_bytes=done, total_bytes=total)
    return Does(name=name, life=life, activity=activity)


def test_notes_say_what_starts_and_every_ten_seconds_what_is_missing() -> None:
    core = new()
    started = [f"starting {name} ..." for name in (ROUTER, P, D)]
    assert notes(core, SupervisionTick(), 0.0) == started
    act(core, Serving(name=ROUTER, life=1, address="r"), 1.0)
    assert notes(core, SupervisionTick(), 9.9) == []
    assert notes(core, SupervisionTick(), 10.0) == [
        "still waiting for prefill-0: starts, decode-0: starts"
    ]
    assert notes(core, SupervisionTick(), 19.9) == []
    act(core, Serving(name=D, life=1, address="d"), 19.9)
    assert notes(core, SupervisionTick(), 20.0) == [
        "still waiting for prefill-0: starts, decode-0: joins"
    ]
    act(core, Serving(name=P, life=1, address="p"), 29.0)
    act(core, ProcessJoined(name=D, life=1, router=ROUTER), 29.0)
    assert notes(core, SupervisionTick(), 30.0) == ["still waiting for prefill-0: joins"]
    act(core, ProcessJoined(name=P, life=1, router=ROUTER), 31.0)
    assert notes(core, SupervisionTick(), 50.0) == []
    assert [core.doing(process) for process in core.processes()] == ["", "", ""]


def test_notes_say_what_each_process_does_as_it_changes() -> None:
    core = new()
    act(core, SupervisionTick())
    waits = "prefill-0 waits for resources, needs {GPU: 1}"
    assert notes(core, does(P, Stage.WAITS), 4.0) == [waits]
    assert notes(core, does(P, Stage.WAITS), 5.0) == []
    assert notes(core, does(P, Stage.DOWNLOADS), 6.0) == ["prefill-0 downloads the model"]
    assert notes(core, does(P, Stage.DOWNLOADS, 10**9, 4 * 10**9), 7.0) == []
    told = "prefill-0: downloads the model: 1.00 of 4.00 GB (25%), decode-0: starts"
    act(core, Serving(name=ROUTER, life=1, address="r"), 8.0)
    assert notes(core, SupervisionTick(), 10.0) == [f"still waiting for {told}"]
    assert notes(core, does(P, Stage.LOADS), 11.0) == ["prefill-0 loads the model"]
    assert notes(core, does(P, Stage.TIMES, life=2), 12.0) == [], "of another life"
    act(core, Serving(name=P, life=1, address="p"), 13.0)
    assert notes(core, does(P, Stage.TIMES), 14.0) == [], "it serves"


def test_one_that_starts_again_starts_anew() -> None:
    core = new()
    act(core, SupervisionTick())
    act(core, does(P, Stage.LOADS))
    act(core, Lost(name=P, life=1, reason="crashed"), 1.0)
    assert core.doing(core.workers[P]) == "backing off"
    act(core, SupervisionTick(), 2.0)
    assert core.doing(core.workers[P]) == "starts"


def test_workers_are_announced_once_the_router_serves() -> None:
    core = new()
    act(core, SupervisionTick())
    assert act(core, Serving(name=P, life=1, address="p")) == []
    assert act(core, Serving(name=ROUTER, life=1, address="r")) == [Announce(ROUTER, P, 1, "p")]
    assert act(core, Serving(name=D, life=1, address="d")) == [Announce(ROUTER, D, 1, "d")]


def test_ready_only_when_all_have_joined() -> None:
    core = new()
    act(core, SupervisionTick())
    for name in (ROUTER, P, D):
        act(core, Serving(name=name, life=1, address=name))
    act(core, ProcessJoined(name=P, life=1, router=ROUTER))
    assert core.phase is Phase.STARTING
    act(core, ProcessJoined(name=D, life=1, router=ROUTER))
    assert core.phase is Phase.READY


def test_lost_worker_is_withdrawn_and_started_again_after_a_pause() -> None:
    core = ready()
    lost = Lost(name=P, life=1, reason="crashed")
    assert act(core, lost, 5.0) == [Withdraw(ROUTER, "p"), Remove(P)]
    assert act(core, SupervisionTick(), 5.5) == []
    assert act(core, SupervisionTick(), 6.0) == [start(P, 2)]
    again = act(core, Serving(name=P, life=2, address="p2"), 7.0)
    assert again == [Announce(ROUTER, P, 2, "p2")]


def test_back_off_doubles_until_a_process_was_stable() -> None:
    core = ready()
    now_s, waits = 0.0, []
    for life in range(1, 9):
        act(core, Lost(name=P, life=life, reason="crashed"), now_s)
        began_s = now_s
        while not act(core, SupervisionTick(), now_s):
            now_s += 0.5
        waits.append(now_s - began_s)
        act(core, Serving(name=P, life=life + 1, address="p"), now_s)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    now_s += STABLE_S
    act(core, Lost(name=P, life=9, reason="crashed"), now_s)
    assert act(core, SupervisionTick(), now_s + 1.0) == [start(P, 10)]


def test_lost_router_hears_of_every_worker_again() -> None:
    core = ready()
    assert act(core, Lost(name=ROUTER, life=1, reason="crashed"), 5.0) == [Remove(ROUTER)]
    assert act(core, SupervisionTick(), 6.0) == [start(ROUTER, 2)]
    again = act(core, Serving(name=ROUTER, life=2, address="r"), 7.0)
    assert again == [Announce(ROUTER, P, 1, "p"), Announce(ROUTER, D, 1, "d")]


def test_old_lives_are_not_heard() -> None:
    core = ready()
    act(core, Lost(name=P, life=1, reason="crashed"), 5.0)
    act(core, SupervisionTick(), 6.0)
    assert act(core, Lost(name=P, life=1, reason="again"), 6.0) == []
    assert act(core, Serving(name=P, life=1, address="old"), 6.0) == []
    assert core.workers[P].state is State.STARTING


def test_a_start_that_can_not_succeed_stops_the_cluster() -> None:
    core = new()
    act(core, SupervisionTick())
    refused = Lost(name=P, life=1, reason="no config.json", fatal=True)
    assert act(core, refused) == [StopProcess(ROUTER, drain=False)]
    assert core.error == "prefill-0: no config.json"


def test_a_process_that_never_served_is_given_up() -> None:
    core, now_s = new(), 0.0
    act(core, SupervisionTick())
    for life in range(1, STARTS_BEFORE_FATAL):
        assert act(core, Lost(name=P, life=life, reason="died"), now_s) == [Remove(P)]
        now_s += 10.0
        act(core, SupervisionTick(), now_s)
    last = Lost(name=P, life=STARTS_BEFORE_FATAL, reason="died")
    assert act(core, last, now_s) == [StopProcess(ROUTER, drain=False)]
    assert core.error == "prefill-0: died"


def test_a_fatal_reason_after_it_served_is_only_another_crash() -> None:
    core = ready()
    assert act(core, Lost(name=P, life=1, reason="x", fatal=True)) == [
        Withdraw(ROUTER, "p"),
        Remove(P),
    ]
    assert core.error is None


def test_a_refused_worker_stops_a_cluster_that_starts() -> None:
    core = new()
    act(core, SupervisionTick())
    act(core, Serving(name=ROUTER, life=1, address="r"))
    act(core, Serving(name=P, life=1, address="p"))
    refused = ProcessJoined(name=P, life=1, router=ROUTER, refused="another model")
    assert act(core, refused) == [StopProcess(ROUTER, drain=True)]
    assert core.error == "router-0 refused prefill-0: another model"


def refuse(core: Supervisor, name: str, life: int = 1) -> None:
    told = ProcessJoined(name=name, life=life, router=ROUTER, refused="another model")
    assert act(core, told) == []


def test_a_worker_that_is_refused_later_says_why_it_does_not_serve() -> None:
    core = ready()
    act(core, DesiredChanged(pools(decode=2)))
    act(core, SupervisionTick())
    act(core, Serving(name="decode-1", life=1, address="d1"))
    assert core.doing(core.workers["decode-1"]) == "joins"
    refuse(core, "decode-1")
    assert core.doing(core.workers["decode-1"]) == "router-0 refused decode-1: another model"
    assert not core.is_settled() and core.phase is Phase.READY
    act(core, Lost(name=ROUTER, life=1, reason="x"))
    assert core.workers["decode-1"].refusals == [], "the next one may take it"
    act(core, SupervisionTick(), 1.0)
    act(core, Serving(name=ROUTER, life=2, address="r"), 1.0)
    refuse(core, "decode-1")
    for name in (P, D, "decode-1"):
        act(core, ProcessJoined(name=name, life=1, router=ROUTER))
    assert core.workers["decode-1"].refusals == [] and core.is_settled()


def test_a_worker_whose_start_fails_for_good_is_tried_again_and_says_why() -> None:
    """Whoever waits for it hears that it won't serve, also while it is tried again."""
    core, now_s = ready(), 0.0
    act(core, DesiredChanged(pools(decode=2)))
    act(core, SupervisionTick())
    newcomer = core.workers["decode-1"]
    for life in range(1, STARTS_BEFORE_FATAL + 1):
        assert newcomer.troubles == [], "it may only have been bad luck"
        act(core, Lost(name="decode-1", life=life, reason="no room"), now_s)
        now_s += 10.0
        act(core, SupervisionTick(), now_s)
    assert newcomer.state is State.STARTING
    assert newcomer.troubles == ["decode-1 can't start: no room"]
    act(core, Serving(name="decode-1", life=STARTS_BEFORE_FATAL + 1, address="d1"), now_s)
    assert newcomer.troubles == []
    act(core, Lost(name="decode-1", life=STARTS_BEFORE_FATAL + 1, reason="crashed"), now_s)
    assert newcomer.troubles == [], "it has served"
    act(core, SupervisionTick(), now_s + 60.0)
    fatal = Lost(name="decode-1", life=STARTS_BEFORE_FATAL + 2, reason="no files", fatal=True)
    act(core, fatal, now_s + 60.0)
    assert newcomer.troubles == ["decode-1 can't start: no files"]
    assert core.doing(newcomer) == "no files"


def test_another_file_is_tried_at_once_by_what_can_not_start() -> None:
    core = ready()
    first, second = ({"decode": pools(revision=revision)["decode"]} for revision in "23")
    act(core, DesiredChanged({**pools(), **first}))
    act(core, SupervisionTick())
    act(core, Lost(name="decode-1", life=1, reason="no files", fatal=True))
    act(core, DesiredChanged({**pools(), **second}))
    assert core.workers["decode-1"].troubles == [] and core.workers[D].state is State.SERVING
    assert Start("decode-1", 2, None, Role.DECODE) in act(core, SupervisionTick())


def test_the_same_file_is_tried_at_once_too() -> None:
    """What was missing may be there now. The number of workers says nothing of that."""
    core = ready()
    act(core, DesiredChanged(pools(decode=2), anew=True))
    act(core, SupervisionTick())
    newcomer = core.workers["decode-1"]
    for life in (1, 2):
        act(core, Lost(name="decode-1", life=life, reason="no files", fatal=True))
        act(core, DesiredChanged(pools(decode=2)))
        assert newcomer.troubles and act(core, SupervisionTick()) == []
        act(core, DesiredChanged(pools(decode=2), anew=True))
        assert newcomer.troubles == []
        assert Start("decode-1", life + 1, None, Role.DECODE) in act(core, SupervisionTick())


def test_one_that_served_with_another_file_can_fail_for_good_too() -> None:
    core, now_s = ready(), 100.0
    act(core, Lost(name=D, life=1, reason="crashed"), now_s)
    act(core, DesiredChanged({**pools(), "decode": pools(revision="2")["decode"]}), now_s)
    for life in range(2, 2 + STARTS_BEFORE_FATAL):
        assert core.workers[D].troubles == []
        act(core, SupervisionTick(), now_s)
        act(core, Lost(name=D, life=life, reason="out of memory"), now_s)
        now_s += 60.0
    assert core.workers[D].troubles == ["decode-0 can't start: out of memory"]


def test_a_worker_that_starts_again_is_no_longer_refused() -> None:
    core = ready()
    refuse(core, D)
    act(core, Lost(name=D, life=1, reason="x"))
    act(core, SupervisionTick(), 1.0)
    act(core, Serving(name=D, life=2, address="d"), 1.0)
    assert core.doing(core.workers[D]) == "joins"


def test_one_that_serves_does_not_leave_for_one_that_is_refused() -> None:
    core = ready()
    first, second = ({"decode": pools(revision=revision)["decode"]} for revision in "23")
    act(core, DesiredChanged({**pools(), **first}))
    act(core, SupervisionTick())
    act(core, Serving(name="decode-1", life=1, address="d1"))
    refuse(core, "decode-1")
    act(core, DesiredChanged({**pools(), **second}))
    states = {name: core.workers[name].state for name in (D, "decode-1")}
    assert states == {D: State.SERVING, "decode-1": State.DRAINING}


def test_of_too_many_those_that_are_refused_leave_first() -> None:
    core = ready()
    act(core, DesiredChanged(pools(decode=2)))
    act(core, SupervisionTick())
    serve(core, "decode-1")
    refuse(core, D)
    act(core, DesiredChanged(pools(decode=1)))
    states = {name: core.workers[name].state for name in (D, "decode-1")}
    assert states == {D: State.DRAINING, "decode-1": State.SERVING}


def test_startup_has_a_limit() -> None:
    core = new()
    act(core, SupervisionTick())
    act(core, Serving(name=ROUTER, life=1, address="r"))
    assert pass_time(core, 0, 60) == []
    assert act(core, SupervisionTick(), 60.5) == [StopProcess(ROUTER, drain=True)]
    assert core.error is not None
    assert core.error.startswith("prefill-0, decode-0 did not start in time")


# --- a controller that is restarted --------------------------------------------------------------


def restarted(phase: Phase, *left: str, error: str | None = None) -> Supervisor:
    """`left`: the processes of the former controller."""
    former = Former(phase=phase, error=error, left=frozenset(left))
    return Supervisor(pools(), LIMITS, now_s=0.0, former=former)


def adopt(core: Supervisor) -> list[SupervisorCommand]:
    """All of a former controller's processes but decode-0 serve."""
    act(core, SupervisionTick())
    told = act(core, Serving(name=ROUTER, life=1, address="r"))
    told += act(core, Serving(name=P, life=1, address="p"))
    return told + act(core, ProcessJoined(name=P, life=1, router=ROUTER))


def fail_starts(core: Supervisor, name: str, times: int, now_s: float) -> None:
    """Each at once and for good, as when what it needs is gone."""
    for _ in range(times):
        life = core.workers[name].life
        act(core, Lost(name=name, life=life, reason="no model", fatal=True), now_s)
        now_s += 60.0
        act(core, SupervisionTick(), now_s)


def test_a_restarted_controller_never_stops_a_cluster_that_was_ready() -> None:
    core = restarted(Phase.READY, ROUTER, P)
    assert adopt(core) == [Announce(ROUTER, P, 1, "p")]
    assert core.phase is Phase.READY
    fail_starts(core, D, 2 * STARTS_BEFORE_FATAL, now_s=1.0)
    refused = ProcessJoined(name=P, life=1, router=ROUTER, refused="another model")
    assert act(core, refused) == []
    pass_time(core, 1000, 1200)
    assert (core.phase, core.error) == (Phase.READY, None)


def test_a_restarted_controller_goes_on_with_a_start_that_was_not_over() -> None:
    core = restarted(Phase.STARTING, ROUTER, P)
    adopt(core)
    assert core.phase is Phase.STARTING
    refused = Lost(name=D, life=1, reason="no model", fatal=True)
    assert act(core, refused) == [StopProcess(ROUTER, drain=True)]


def test_a_restarted_controller_goes_on_with_a_stop() -> None:
    core = restarted(Phase.STOPPING, ROUTER, P, "pool-h1", error="no room")
    assert act(core, SupervisionTick()) == [StopProcess(ROUTER, drain=True)]
    assert act(core, StopAsked()) == act(core, SupervisionTick(), 1.0) == []
    assert act(core, ProcessStopped(name=ROUTER)) == [
        StopProcess(P, drain=True),
        StopProcess(D, drain=False),
    ]
    assert act(core, ProcessStopped(name=D)) == []
    assert act(core, ProcessStopped(name=P)) == [StopProcess("pool-h1", drain=True)]
    assert act(core, ProcessStopped(name="pool-h1")) == []
    assert (core.phase, core.error) == (Phase.STOPPED, "no room")


def test_what_a_former_controller_left_is_drained_before_it_is_known_to_serve() -> None:
    core = restarted(Phase.READY, ROUTER, P, D)
    act(core, SupervisionTick())
    act(core, Lost(name=D, life=1, reason="its process died"))
    assert act(core, StopAsked()) == [StopProcess(ROUTER, drain=True)]
    assert act(core, ProcessStopped(name=ROUTER)) == [
        StopProcess(P, drain=True),
        StopProcess(D, drain=False),
    ]


# --- routers that outlive a controller hear who has ended meanwhile ------------------------------


def after(core: Supervisor, *left: str) -> Supervisor:
    """Another controller, which finds these processes."""
    former = Former(phase=Phase.READY, left=frozenset(left), kept=core.kept())
    return Supervisor(pools(), LIMITS, now_s=0.0, former=former)


def withdrawn(commands: list[SupervisorCommand]) -> list[tuple[str, str]]:
    return [(one.router, one.address) for one in commands if isinstance(one, Withdraw)]


def test_that_a_worker_ended_without_a_controller() -> None:
    core = after(ready(), ROUTER, P)
    act(core, SupervisionTick())
    assert withdrawn(act(core, Serving(name=ROUTER, life=1, address="r"))) == [(ROUTER, "d")]
    assert withdrawn(act(core, Serving(name=D, life=1, address="new"))) == []


def test_that_a_worker_is_lost_before_the_router_is_found() -> None:
    core = after(ready(), ROUTER, P, D)
    act(core, SupervisionTick())
    assert withdrawn(act(core, Lost(name=D, life=1, reason="gone"))) == []
    assert withdrawn(act(core, Serving(name=ROUTER, life=1, address="r"))) == [(ROUTER, "d")]


def test_that_a_worker_is_lost_after_the_router_was_found() -> None:
    core = after(ready(), ROUTER, P, D)
    act(core, SupervisionTick())
    assert withdrawn(act(core, Serving(name=ROUTER, life=1, address="r"))) == []
    assert withdrawn(act(core, Lost(name=D, life=1, reason="gone"))) == [(ROUTER, "d")]


def test_that_a_worker_serves_elsewhere() -> None:
    core = after(ready(), ROUTER, P, D)
    act(core, SupervisionTick())
    act(core, Serving(name=ROUTER, life=1, address="r"))
    told = act(core, Serving(name=D, life=1, address="new"))
    assert told == [Withdraw(ROUTER, "d"), Announce(ROUTER, D, 1, "new")]


def test_but_not_of_an_address_where_another_one_serves() -> None:
    core = after(ready(), ROUTER, P)
    act(core, SupervisionTick())
    act(core, Serving(name=D, life=1, address="d"))
    assert withdrawn(act(core, Serving(name=ROUTER, life=1, address="r"))) == []


def test_a_router_that_starts_anew_hears_of_none_that_ended() -> None:
    core = after(ready(), P)
    act(core, SupervisionTick())
    assert withdrawn(act(core, Serving(name=ROUTER, life=1, address="r"))) == []


# --- stopping ------------------------------------------------------------------------------------


def test_stop_drains_the_router_then_the_workers() -> None:
    core = ready()
    assert act(core, StopAsked()) == [StopProcess(ROUTER, drain=True)]
    assert act(core, StopAsked()) == []
    assert act(core, ProcessStopped(name=ROUTER)) == [
        StopProcess(P, drain=True),
        StopProcess(D, drain=True),
    ]
    assert act(core, Lost(name=P, life=1, reason="closed")) == []
    act(core, ProcessStopped(name=P))
    assert core.phase is Phase.STOPPING
    act(core, ProcessStopped(name=D))
    assert core.phase is Phase.STOPPED
    assert core.error is None


def test_a_driver_that_has_ended_stops_the_cluster() -> None:
    core = ready()
    assert act(core, DriverEnded()) == [StopProcess(ROUTER, drain=True)]
    assert core.error is None


def test_a_driver_that_is_silent_stops_nothing() -> None:
    core = ready()
    assert pass_time(core, 0, 3600) == []
    assert core.phase is Phase.READY


def test_the_supervisors_own_pause_is_no_part_of_the_first_start() -> None:
    core = new()
    act(core, SupervisionTick())
    assert act(core, SupervisionTick(), 1000.0) == []
    assert pass_time(core, 1000, 1059) == []
    assert pass_time(core, 1059, 1060) == [StopProcess(ROUTER, drain=False)]


# --- those that hang ---------------------------------------------------------------------------

WATCHED = replace(LIMITS, hang_timeout_s=8.0)
PINGS = [PingProcess(ROUTER, 1), PingProcess(P, 1), PingProcess(D, 1)]


def pass_time(core: Supervisor, from_s: float, until_s: float) -> list[SupervisorCommand]:
    """A look every half second."""
    halves = range(int(2 * from_s) + 1, int(2 * until_s) + 1)
    return [command for half in halves for command in act(core, SupervisionTick(), half / 2)]


def test_those_that_serve_are_asked_now_and_then() -> None:
    core = ready(WATCHED)
    assert pass_time(core, 0, 1.5) == []
    assert act(core, SupervisionTick(), 2.0) == PINGS
    assert pass_time(core, 2, 6) == [], "no second one before the first is answered"
    for one in PINGS:
        act(core, ProcessAnswered(name=one.name, life=1), 6.0)
    assert pass_time(core, 6, 8) == PINGS


def test_one_that_does_not_answer_is_killed_and_started_again() -> None:
    core = ready(WATCHED)
    assert pass_time(core, 0, 2) == PINGS
    for name in (ROUTER, D):
        act(core, ProcessAnswered(name=name, life=1), 2.1)
    asked_again = [PingProcess(ROUTER, 1), PingProcess(D, 1)]
    assert pass_time(core, 2, 9.5) == asked_again
    for name in (ROUTER, D):
        act(core, ProcessAnswered(name=name, life=1), 9.6)
    said = core.handle(SupervisionTick(), 10.0)
    told = "prefill-0 is lost: it has not answered for 8 s; starting it again in 1 s"
    assert said == [Note(told), Withdraw(ROUTER, "p"), Remove(P)]
    assert act(core, ProcessAnswered(name=P, life=1), 10.1) == []
    assert core.workers[P].state is State.BACKING_OFF
    assert act(core, SupervisionTick(), 11.0) == [start(P, 2)]
    assert pass_time(core, 11, 11.5) == [], "what starts is not asked"
    act(core, Serving(name=P, life=2, address="p2"), 60.0)
    assert PingProcess(P, 2) not in act(core, SupervisionTick(), 61.5)
    assert PingProcess(P, 2) in act(core, SupervisionTick(), 62.0)


def test_an_answer_of_an_old_life_is_none() -> None:
    core = ready(WATCHED)
    act(core, Lost(name=P, life=1, reason="crashed"), 0.5)
    pass_time(core, 0.5, 2)
    act(core, Serving(name=P, life=2, address="p2"), 2.0)
    pass_time(core, 2, 4)
    act(core, ProcessAnswered(name=P, life=1), 5.0)
    assert Remove(P) in pass_time(core, 5, 13)


def test_nobody_is_blamed_for_the_supervisors_own_pause() -> None:
    core = ready(WATCHED)
    assert pass_time(core, 0, 2) == PINGS
    assert act(core, SupervisionTick(), 1000.0) == []
    assert pass_time(core, 1000, 1006.5) == []
    assert Remove(P) in act(core, SupervisionTick(), 1007.0)


STUCK = "prefill-0 is lost: it did not start within 60 s; starting it again in 2 s"


def restarting() -> Supervisor:
    """prefill-0 starts for the second time, at 6."""
    core = ready()
    act(core, Lost(name=P, life=1, reason="crashed"), 5.0)
    assert pass_time(core, 5.0, 6.0) == [start(P, 2)]
    return core


def test_one_that_hangs_while_it_restarts_is_killed_and_started_again() -> None:
    core = restarting()
    act(core, does(P, Stage.LOADS, life=2), 7.0)
    assert pass_time(core, 6, 66) == []
    assert core.handle(SupervisionTick(), 66.5) == [Note(STUCK), Remove(P)]
    assert pass_time(core, 66.5, 68.5) == [start(P, 3)]
    assert pass_time(core, 68.5, 128.5) == [], "each start has all of the time"
    act(core, Serving(name=P, life=3, address="p3"), 128.6)
    assert pass_time(core, 128.5, 300) == []
    assert (core.phase, core.error) == (Phase.READY, None)


def test_a_wait_for_resources_is_no_hanging_start() -> None:
    core = restarting()
    act(core, does(P, Stage.WAITS, life=2), 6.1)
    assert pass_time(core, 6, 1000) == []
    act(core, does(P, Stage.STARTS, life=2), 1000.0)
    assert pass_time(core, 1000, 1060) == []
    assert Remove(P) in pass_time(core, 1060, 1061)


def test_the_supervisors_own_pause_is_no_part_of_a_start() -> None:
    core = restarting()
    assert act(core, SupervisionTick(), 1000.0) == []
    assert pass_time(core, 1000, 1059) == []
    assert Remove(P) in pass_time(core, 1059, 1061)


def test_a_router_that_hangs_while_it_restarts_has_the_same_limit() -> None:
    core = ready()
    act(core, Lost(name=ROUTER, life=1, reason="crashed"), 5.0)
    assert pass_time(core, 5, 66) == [start(ROUTER, 2)]
    assert act(core, SupervisionTick(), 66.5) == [Remove(ROUTER)]


# --- pool nodes ---------------------------------------------------------------------------------

HERE, THERE = Home("h1", "n1"), Home("h2", "n2")
SAME_HOST = Home("h1", "n3")


def with_pool() -> Supervisor:
    return Supervisor(pools(), LIMITS, 0.0, pool_needs="{mine: 1}")


def place(core: Supervisor, name: str, home: Home, life: int = 1) -> list[SupervisorCommand]:
    return act(core, Placed(name=name, life=life, home=home))


def serve(core: Supervisor, *names: str, life: int = 1) -> None:
    for name in names:
        for command in act(core, Serving(name=name, life=life, address=f"{name}'s")):
            assert isinstance(command, Announce | Withdraw)  # it may have served elsewhere before
            if isinstance(command, Announce):
                name, router = command.name, command.router
                act(core, ProcessJoined(name=name, life=command.life, router=router))


def ready_with_pool(*homes: Home) -> Supervisor:
    core = with_pool()
    act(core, SupervisionTick())
    for name, home in zip((P, D), homes, strict=True):
        place(core, name, home)
    act(core, SupervisionTick())
    serve(core, ROUTER, P, D, *{f"pool-{home.host}": None for home in homes})
    assert core.phase is Phase.READY
    return core


def test_each_host_with_workers_gets_one_pool_node() -> None:
    core = with_pool()
    assert act(core, SupervisionTick()) == [start(ROUTER, 1), start(P, 1), start(D, 1)]
    assert place(core, P, HERE) == []
    assert act(core, SupervisionTick()) == [start("pool-h1", 1, "n1")]
    place(core, D, SAME_HOST)
    assert act(core, SupervisionTick()) == []
    serve(core, ROUTER, P, D)
    assert core.phase is Phase.STARTING, "the pool node is still missing"
    serving = Serving(name="pool-h1", life=1, address="a")
    assert act(core, serving) == [Announce(ROUTER, "pool-h1", 1, "a", ProcessKind.POOL_NODE)]
    act(core, ProcessJoined(name="pool-h1", life=1, router=ROUTER))
    assert core.phase is Phase.READY


def test_workers_on_two_hosts_have_two_pool_nodes() -> None:
    core = ready_with_pool(HERE, THERE)
    assert [p.name for p in core.processes()] == [ROUTER, P, D, "pool-h1", "pool-h2"]


def test_without_a_pool_no_place_matters() -> None:
    core = ready()
    assert place(core, P, HERE) == []
    assert act(core, SupervisionTick()) == []


def test_a_lost_pool_node_comes_back_where_it_was() -> None:
    core = ready_with_pool(HERE, HERE)
    withdrawn = Withdraw(ROUTER, "pool-h1's", ProcessKind.POOL_NODE)
    lost = Lost(name="pool-h1", life=1, reason="killed", fatal=True)
    assert act(core, lost, 5.0) == [withdrawn, Remove("pool-h1")]
    assert act(core, SupervisionTick(), 6.0) == [start("pool-h1", 2, "n1")]
    for life in range(2, 9):
        act(core, Lost(name="pool-h1", life=life, reason="full", fatal=True), 100.0 * life)
        act(core, SupervisionTick(), 100.0 * life + 99.0)
    assert core.phase is Phase.READY, "the cluster serves without it"
    assert act(core, Lost(name=ROUTER, life=1, reason="x"), 900.0) == [Remove(ROUTER)]


def test_a_new_router_hears_of_the_pool_nodes() -> None:
    core = ready_with_pool(HERE, HERE)
    act(core, Lost(name=ROUTER, life=1, reason="killed"), 5.0)
    act(core, SupervisionTick(), 6.0)
    announced = act(core, Serving(name=ROUTER, life=2, address="r"), 7.0)
    assert announced[-1] == Announce(ROUTER, "pool-h1", 1, "pool-h1's", ProcessKind.POOL_NODE)


def test_a_pool_node_that_can_not_start_stops_a_cluster_that_starts() -> None:
    core = with_pool()
    act(core, SupervisionTick())
    place(core, P, HERE)
    act(core, SupervisionTick())
    refused = Lost(name="pool-h1", life=1, reason="pool.disk: no such folder", fatal=True)
    assert act(core, refused) == [StopProcess(ROUTER, drain=False)]
    assert core.error == "pool-h1: pool.disk: no such folder"


def test_a_pool_node_that_can_not_start_later_is_tried_again() -> None:
    core = ready_with_pool(HERE, HERE)
    act(core, Lost(name=P, life=1, reason="crashed"), 1.0)
    act(core, SupervisionTick(), 2.0)
    place(core, P, THERE, life=2)
    assert act(core, SupervisionTick(), 2.0) == [start("pool-h2", 1, "n2")]
    for life in range(1, 5):
        now_s = 100.0 * life
        act(core, Lost(name="pool-h2", life=life, reason="no disk", fatal=True), now_s)
        assert start("pool-h2", life + 1, "n2") in act(core, SupervisionTick(), now_s + 60.0)
    assert core.phase is Phase.READY


def test_the_pool_node_goes_with_the_last_worker_of_its_host() -> None:
    core = ready_with_pool(HERE, THERE)
    act(core, Lost(name=P, life=1, reason="its node is gone"), 5.0)
    assert act(core, SupervisionTick(), 5.5) == [], "the worker may come back there"
    act(core, SupervisionTick(), 6.0)
    withdrawn = Withdraw(ROUTER, "pool-h1's", ProcessKind.POOL_NODE)
    assert place(core, P, THERE, life=2) == [withdrawn, StopProcess("pool-h1", drain=True)]
    assert place(core, P, THERE, life=2) == []
    assert act(core, ProcessStopped(name="pool-h1"), 7.0) == []
    assert "pool-h1" not in [p.name for p in core.processes()]
    act(core, Lost(name=P, life=2, reason="crashed"), 8.0)
    act(core, SupervisionTick(), 10.0)
    place(core, P, HERE, life=3)
    assert act(core, SupervisionTick(), 10.0) == [start("pool-h1", 2, "n1")]


def test_a_pool_node_moves_to_a_node_of_its_host_that_is_left() -> None:
    core = ready_with_pool(HERE, SAME_HOST)
    act(core, Lost(name=P, life=1, reason="its node is gone"), 1.0)
    act(core, Lost(name="pool-h1", life=1, reason="its node is gone"), 1.0)
    act(core, SupervisionTick(), 2.0)
    place(core, P, THERE, life=2)
    starts = act(core, SupervisionTick(), 2.0)
    assert start("pool-h2", 1, "n2") in starts
    act(core, Lost(name="pool-h1", life=2, reason="no such node"), 3.0)
    assert start("pool-h1", 3, "n3") in act(core, SupervisionTick(), 5.0)


def test_pool_nodes_stop_last() -> None:
    core = ready_with_pool(HERE, HERE)
    assert act(core, StopAsked()) == [StopProcess(ROUTER, drain=True)]
    assert act(core, ProcessStopped(name=ROUTER)) == [
        StopProcess(P, drain=True),
        StopProcess(D, drain=True),
    ]
    assert act(core, ProcessStopped(name=P)) == []
    assert act(core, ProcessStopped(name=D)) == [StopProcess("pool-h1", drain=True)]
    assert core.phase is Phase.STOPPING
    act(core, ProcessStopped(name="pool-h1"))
    assert core.phase is Phase.STOPPED


def with_optional_pool() -> Supervisor:
    return Supervisor(pools(), LIMITS, 0.0, pool_needs="{}", pool_required=False)


def ready_with_optional_pool(*homes: Home) -> Supervisor:
    core = with_optional_pool()
    act(core, SupervisionTick())
    for name, home in zip((P, D), homes, strict=True):
        place(core, name, home)
    assert act(core, SupervisionTick()) == [], "no pool node competes with what starts"
    serve(core, ROUTER, P, D)
    assert core.phase is Phase.READY, "it waits for no pool node"
    return core


def test_optional_pool_nodes_start_when_the_cluster_is_ready() -> None:
    core = ready_with_optional_pool(HERE, THERE)
    starts = [start("pool-h1", 1, "n1"), start("pool-h2", 1, "n2")]
    assert act(core, SupervisionTick()) == starts
    assert act(core, SupervisionTick()) == []
    announced = act(core, Serving(name="pool-h1", life=1, address="a"))
    assert announced[-1] == Announce(ROUTER, "pool-h1", 1, "a", ProcessKind.POOL_NODE)


def test_pool_nodes_with_other_settings_are_replaced_one_after_the_other() -> None:
    core = ready_with_optional_pool(HERE, THERE)
    act(core, SupervisionTick())
    serve(core, "pool-h1", "pool-h2")
    assert core.is_settled()
    assert act(core, DesiredChanged(pools(), pool_revision="2")) == []
    assert not core.is_settled()
    for name, other in (("pool-h1", "n1"), ("pool-h2", "n2")):
        gone = Withdraw(ROUTER, f"{name}'s", ProcessKind.POOL_NODE)
        assert act(core, SupervisionTick(), 1.0) == [gone, StopProcess(name, drain=True)]
        assert act(core, SupervisionTick(), 1.5) == []
        act(core, ProcessStopped(name=name), 2.0)
        assert act(core, SupervisionTick(), 2.0) == [start(name, 2, other)]
        assert act(core, SupervisionTick(), 2.5) == [], "the other one waits for it"
        serve(core, name, life=2)
    assert act(core, SupervisionTick(), 3.0) == []
    assert core.is_settled()


def test_a_pool_node_that_was_left_out_is_tried_with_other_settings() -> None:
    core = ready_with_optional_pool(HERE, HERE)
    act(core, SupervisionTick())
    act(core, Lost(name="pool-h1", life=1, reason="no such folder", fatal=True), 1.0)
    assert act(core, SupervisionTick(), 100.0) == []
    act(core, DesiredChanged(pools(), pool_revision="2"), 101.0)
    assert act(core, SupervisionTick(), 101.0) == [StopProcess("pool-h1", drain=False)]
    act(core, ProcessStopped(name="pool-h1"), 101.0)
    assert act(core, SupervisionTick(), 101.5) == [start("pool-h1", 2, "n1")]


def test_a_restarted_controller_replaces_old_pool_nodes() -> None:
    core = ready_with_optional_pool(HERE, HERE)
    act(core, SupervisionTick())
    serve(core, "pool-h1")
    for revision, gone in (("", []), ("2", [StopProcess("pool-h1", drain=True)])):
        former = Former(
            phase=Phase.READY, left=frozenset({ROUTER, P, D, "pool-h1"}), kept=core.kept()
        )
        again = Supervisor(
            pools(),
            LIMITS,
            0.0,
            pool_needs="{}",
            pool_required=False,
            pool_revision=revision,
            former=former,
        )
        act(again, SupervisionTick())
        serve(again, ROUTER, P, D, "pool-h1")
        told = act(again, SupervisionTick())
        assert [one for one in told if isinstance(one, StopProcess)] == gone


def test_a_pool_node_without_workers_and_of_old_settings_is_stopped_once() -> None:
    """Else a second stop, which comes late, ends the one that has come in its place."""
    core = ready_with_optional_pool(HERE, HERE)
    act(core, SupervisionTick())
    serve(core, "pool-h1")
    for name in (P, D):
        act(core, Lost(name=name, life=1, reason="crashed"), 1.0)
    act(core, SupervisionTick(), 2.0)
    assert place(core, P, THERE, life=2) == []
    act(core, DesiredChanged(core.members.desired, pool_revision="2"), 2.0)
    told = place(core, D, THERE, life=2)
    assert [one for one in told if isinstance(one, StopProcess)] == [
        StopProcess("pool-h1", drain=True)
    ]


def test_a_host_that_workers_move_to_gets_its_optional_pool_node_once_they_serve() -> None:
    core = ready_with_optional_pool(HERE, HERE)
    act(core, SupervisionTick())
    act(core, Lost(name=P, life=1, reason="crashed"), 1.0)
    assert act(core, SupervisionTick(), 2.0) == [start(P, 2)]
    place(core, P, THERE, life=2)
    assert act(core, SupervisionTick(), 2.5) == []
    serve(core, P, life=2)
    assert act(core, SupervisionTick(), 3.0) == [start("pool-h2", 1, "n2")]


def test_an_optional_pool_node_that_can_not_start_is_left_out() -> None:
    core = ready_with_optional_pool(HERE, THERE)
    act(core, SupervisionTick())
    refused = Lost(name="pool-h1", life=1, reason="no memory to spare", fatal=True)
    assert act(core, refused, 1.0) == [Remove("pool-h1")]
    assert core.phase is Phase.READY
    for now_s in (2.0, 60.0, 600.0):
        assert act(core, SupervisionTick(), now_s) == [], "nobody tries again"
    left_out = core.processes()[3]
    assert (left_out.name, left_out.state) == ("pool-h1", State.LEFT_OUT)
    assert core.doing(left_out) == "no memory to spare"
    act(core, Lost(name=P, life=1, reason="its node is gone"), 600.0)
    act(core, SupervisionTick(), 601.0)
    assert place(core, P, THERE, life=2) == [StopProcess("pool-h1", drain=False)]
    act(core, ProcessStopped(name="pool-h1"), 602.0)
    assert [p.name for p in core.processes()] == [ROUTER, P, D, "pool-h2"]


def test_an_optional_pool_node_that_crashes_is_started_again() -> None:
    core = ready_with_optional_pool(HERE, HERE)
    act(core, SupervisionTick())
    assert act(core, Lost(name="pool-h1", life=1, reason="killed"), 1.0) == [Remove("pool-h1")]
    assert act(core, SupervisionTick(), 2.0) == [start("pool-h1", 2, "n1")]
    serve(core, "pool-h1", life=2)
    act(core, Lost(name="pool-h1", life=2, reason="killed"), 3.0)
    act(core, SupervisionTick(), 5.0)
    refused = Lost(name="pool-h1", life=3, reason="no memory to spare", fatal=True)
    assert act(core, refused, 6.0) == [Remove("pool-h1")]


def test_a_cluster_with_a_pool_node_left_out_stops() -> None:
    core = ready_with_optional_pool(HERE, HERE)
    act(core, SupervisionTick())
    act(core, Lost(name="pool-h1", life=1, reason="no memory", fatal=True), 1.0)
    act(core, StopAsked())
    for name in (ROUTER, P, D):
        last = act(core, ProcessStopped(name=name))
    assert last == [StopProcess("pool-h1", drain=False)]
    act(core, ProcessStopped(name="pool-h1"))
    assert core.phase is Phase.STOPPED


# --- several routers ----------------------------------------------------------------------------


def with_two(*, pool_needs: str | None = None, pool_required: bool = True) -> Supervisor:
    pool = {"pool_needs": pool_needs, "pool_required": pool_required}
    return Supervisor(pools(routers=2), LIMITS, 0.0, **pool)  # type: ignore[arg-type]


def two_ready() -> Supervisor:
    core = with_two()
    act(core, SupervisionTick())
    serve(core, ROUTER, P, SECOND, D)
    assert core.phase is Phase.READY
    return core


def test_workers_are_announced_to_each_router() -> None:
    core = with_two()
    assert act(core, SupervisionTick()) == [
        start(ROUTER, 1),
        start(SECOND, 1),
        start(P, 1),
        start(D, 1),
    ]
    act(core, Serving(name=ROUTER, life=1, address="r"))
    assert act(core, Serving(name=P, life=1, address="p")) == [Announce(ROUTER, P, 1, "p")]
    assert act(core, Serving(name=SECOND, life=1, address="s")) == [Announce(SECOND, P, 1, "p")]
    both = [Announce(ROUTER, D, 1, "d"), Announce(SECOND, D, 1, "d")]
    assert act(core, Serving(name=D, life=1, address="d")) == both


def test_ready_as_soon_as_one_router_knows_a_worker_for_each_half() -> None:
    core = with_two()
    act(core, SupervisionTick())
    for name in (SECOND, P, D):
        act(core, Serving(name=name, life=1, address=name))
    act(core, ProcessJoined(name=P, life=1, router=SECOND))
    assert core.phase is Phase.STARTING
    act(core, ProcessJoined(name=D, life=1, router=SECOND))
    assert (core.phase, core.is_settled()) == (Phase.READY, False), "the first one still starts"
    serve(core, ROUTER)
    assert core.is_settled()


def test_halves_that_two_routers_know_apart_serve_nobody() -> None:
    core = with_two()
    act(core, SupervisionTick())
    for name in (ROUTER, SECOND, P, D):
        act(core, Serving(name=name, life=1, address=name))
    for router, name in ((ROUTER, P), (SECOND, D)):
        act(core, ProcessJoined(name=name, life=1, router=router))
    assert core.phase is Phase.STARTING


def test_a_router_that_must_know_the_pool_nodes_is_one_that_knows_the_workers() -> None:
    core = with_two(pool_needs="{mine: 1}")
    act(core, SupervisionTick())
    for name in (P, D):
        place(core, name, HERE)
    act(core, SupervisionTick())
    for name in (ROUTER, SECOND, P, D, "pool-h1"):
        act(core, Serving(name=name, life=1, address=name))
    for router, name in ((ROUTER, P), (ROUTER, D), (SECOND, "pool-h1")):
        act(core, ProcessJoined(name=name, life=1, router=router))
    assert core.phase is Phase.STARTING
    act(core, ProcessJoined(name="pool-h1", life=1, router=ROUTER))
    assert core.phase is Phase.READY


def test_not_ready_while_the_router_that_knew_half_is_lost() -> None:
    core = with_two()
    act(core, SupervisionTick())
    serve(core, SECOND, P)
    act(core, Lost(name=SECOND, life=1, reason="crashed"))
    assert act(core, ProcessJoined(name=P, life=1, router=SECOND)) == [], "told too late"
    serve(core, D)
    assert core.phase is Phase.STARTING
    act(core, SupervisionTick(), 1.0)
    serve(core, SECOND, life=2)
    assert core.phase is Phase.READY


def test_a_lost_router_costs_the_others_nothing() -> None:
    core = two_ready()
    assert act(core, Lost(name=SECOND, life=1, reason="killed"), 5.0) == [Remove(SECOND)]
    gone = act(core, Lost(name=P, life=1, reason="crashed"), 5.0)
    assert gone == [Withdraw(ROUTER, "prefill-0's"), Remove(P)]
    assert act(core, SupervisionTick(), 6.0) == [start(SECOND, 2), start(P, 2)]
    again = act(core, Serving(name=SECOND, life=2, address="s"), 7.0)
    assert again == [Announce(SECOND, D, 1, "decode-0's")]
    assert core.phase is Phase.READY


def test_a_lame_duck_hurries_when_the_whole_cluster_stops() -> None:
    core = two_ready()
    assert act(core, DrainAsked(name=SECOND)) == [
        StopProcess(SECOND, drain=True, lame_duck=True),
    ]
    assert act(core, StopAsked()) == [
        StopProcess(SECOND, drain=True),
        StopProcess(ROUTER, drain=True),
    ]
    for name in (SECOND, SECOND):
        assert act(core, ProcessStopped(name=name)) == []
    assert act(core, ProcessStopped(name=ROUTER)) == [
        StopProcess(P, drain=True),
        StopProcess(D, drain=True),
    ]


def test_workers_stop_after_the_last_router() -> None:
    core = two_ready()
    assert act(core, StopAsked()) == [
        StopProcess(ROUTER, drain=True),
        StopProcess(SECOND, drain=True),
    ]
    assert act(core, ProcessStopped(name=SECOND)) == []
    assert act(core, ProcessStopped(name=ROUTER)) == [
        StopProcess(P, drain=True),
        StopProcess(D, drain=True),
    ]


def _with_pool(pool: str) -> Supervisor:
    return with_two(pool_needs=None if pool == "off" else "{mine: 1}", pool_required=pool == "on")


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("pool", ["off", "on", "auto"])
def test_random_histories_end_stopped(seed: int, pool: str) -> None:
    """Whatever is lost on the way: one Stop per process, and nothing starts after it."""
    rng = random.Random(seed)
    core, now_s = _with_pool(pool), 0.0
    running: dict[str, int] = {}
    todo: list[SupervisorCommand] = []
    stops: list[str] = []

    def tell(event: SupervisorEvent) -> None:
        commands = act(core, event, now_s)
        if core.phase in (Phase.STOPPING, Phase.STOPPED):
            assert not any(isinstance(command, Start) for command in commands)
            stops.extend(command.name for command in commands if isinstance(command, StopProcess))
        todo.extend(commands)

    for _ in range(rng.randrange(400)):
        now_s += rng.random()
        if todo and rng.random() < 0.7:
            tell(_outcome(todo.pop(0), running, rng))
        elif running and rng.random() < 0.1:
            name = rng.choice(sorted(running))
            tell(Lost(name=name, life=running.pop(name), reason="killed"))
        elif pool != "off" and rng.random() < 0.2:
            name = rng.choice([P, D])
            home = rng.choice([HERE, THERE, SAME_HOST])
            tell(Placed(name=name, life=core.workers[name].life, home=home))
        else:
            tell(SupervisionTick())
    tell(StopAsked())
    while todo:
        tell(_outcome(todo.pop(0), running, rng))
    assert core.phase is Phase.STOPPED
    assert stops[:4] == [ROUTER, SECOND, P, D]
    assert len(set(stops)) == len(stops)
    assert not running, "nothing is left"


def _outcome(
    command: SupervisorCommand, running: dict[str, int], rng: random.Random
) -> SupervisorEvent:
    match command:
        case Start(name=name, life=life) if rng.random() < 0.3:
            return Lost(name=name, life=life, reason="no luck", fatal=name.startswith("pool-"))
        case Start(name=name, life=life):
            running[name] = life
            return Serving(name=name, life=life, address=f"{name}:{life}")
        case Announce(router=router, name=name, life=life):
            return ProcessJoined(name=name, life=life, router=router)
        case StopProcess(name=name):
            running.pop(name, None)
            return ProcessStopped(name=name)
    return SupervisionTick()


# --- any history, with a controller that is killed at any moment ---------------------------------


class World:
    """The actors that Ray has, and the record of the cluster. A killed controller takes with it
    all that was on its way."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.alive: set[str] = set()
        self.record = Former(phase=Phase.STARTING)
        self.now_s = 0.0
        self.begin()

    def begin(self) -> None:
        former = replace(self.record, left=frozenset(self.alive))
        self.core = Supervisor(
            pools(routers=2), LIMITS, self.now_s, pool_needs="{mine: 1}", former=former
        )
        self.todo: list[SupervisorCommand] = []

    def tell(self, event: SupervisorEvent) -> None:
        was = self.core.phase
        commands = act(self.core, event, self.now_s)
        may_stop = was is not Phase.READY or isinstance(event, StopAsked)
        assert may_stop or self.core.phase is Phase.READY, event
        self.record = Former(phase=self.core.phase, error=self.core.error)
        started = {command.name for command in commands if isinstance(command, Start)}
        assert not started or self.core.phase in (Phase.STARTING, Phase.READY)
        self.alive |= started
        if self.core.phase is Phase.STOPPING:
            stopped = [command.name for command in commands if isinstance(command, StopProcess)]
            assert all(not self._before(name) & self.alive for name in stopped), "in this order"
        self.todo += commands

    def _before(self, name: str) -> set[str]:
        """Those that stop first: routers, then workers, then pool nodes."""
        routers = {ROUTER, SECOND}
        return set() if name in routers else routers if name in (P, D) else {*routers, P, D}

    def step(self) -> None:
        self.now_s += self.rng.random()
        chance = self.rng.random()
        if chance < 0.05:
            self.begin()
        elif chance < 0.1 and self.alive:
            self.kill(self.rng.choice(sorted(self.alive)))
        elif chance < 0.2:
            name = self.rng.choice([P, D])
            life, home = self.core.workers[name].life, self.rng.choice([HERE, THERE])
            self.tell(Placed(name=name, life=life, home=home))
        elif chance < 0.8 and self.todo:
            self.carry_out(self.todo.pop(self.rng.randrange(len(self.todo))))
        else:
            self.tell(SupervisionTick())

    def kill(self, name: str) -> None:
        self.alive.discard(name)
        process = self.core._named(name)
        if process is not None and process.life:
            self.tell(Lost(name=name, life=process.life, reason="killed"))

    def carry_out(self, command: SupervisorCommand) -> None:
        match command:
            case Start(name=name, life=life) if name in self.alive and self.rng.random() < 0.8:
                self.tell(Serving(name=name, life=life, address=f"{name}'s"))
            case Start(name=name, life=life):
                self.tell(Lost(name=name, life=life, reason="no luck"))
            case Announce(router=router, name=name, life=life) if router in self.alive:
                self.tell(ProcessJoined(name=name, life=life, router=router))
            case StopProcess(name=name):
                self.alive.discard(name)
                self.tell(ProcessStopped(name=name))
            case Remove(name=name):
                self.alive.discard(name)


@pytest.mark.parametrize("seed", range(60))
def test_a_controller_that_is_killed_at_any_moment_goes_on(seed: int) -> None:
    """A cluster that was READY never stops by itself, and one that stops ends with nothing."""
    world = World(seed)
    asked_after = world.rng.randrange(300)
    for step in range(3000):
        if world.core.phase is Phase.STOPPED:
            break
        if step == asked_after:
            world.tell(StopAsked())
        world.step()
    assert world.core.phase is Phase.STOPPED
    assert not world.alive
