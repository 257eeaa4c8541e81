"""The supervisor's exact commands, and random histories against its invariants."""

from __future__ import annotations

import random

import pytest

from cluster.supervision import (
    Announce,
    Command,
    DriverSeen,
    Event,
    Joined,
    Lost,
    Note,
    Phase,
    Remove,
    Serving,
    Start,
    State,
    Stop,
    StopAsked,
    Stopped,
    Tick,
    Withdraw,
)
from cluster.supervisor import ROUTER, STABLE_S, STARTS_BEFORE_FATAL, Limits, Supervisor

P, D = "prefill-0", "decode-0"
NEEDS = {ROUTER: "{}", P: "{GPU: 1}", D: "{CPU: 2}"}
LIMITS = Limits(startup_timeout_s=60.0, driver_timeout_s=10.0)


def new(limits: Limits = LIMITS) -> Supervisor:
    return Supervisor(NEEDS, limits, now_s=0.0)


def act(core: Supervisor, event: Event, now_s: float = 0.0) -> list[Command]:
    """The commands without the notes; checks the invariants."""
    commands = core.handle(event, now_s)
    core.validate()
    return [command for command in commands if not isinstance(command, Note)]


def notes(core: Supervisor, event: Event, now_s: float) -> list[str]:
    return [c.text for c in core.handle(event, now_s) if isinstance(c, Note)]


def ready(limits: Limits = LIMITS) -> Supervisor:
    core = new(limits)
    act(core, Tick())
    act(core, Serving(name=ROUTER, life=1, address="r"))
    for name, address in ((P, "p"), (D, "d")):
        act(core, Serving(name=name, life=1, address=address))
        act(core, Joined(name=name, life=1))
    assert core.phase is Phase.READY
    return core


def test_starts_everything_at_once_and_only_once() -> None:
    core = new()
    assert act(core, Tick()) == [Start(ROUTER, 1), Start(P, 1), Start(D, 1)]
    assert act(core, Tick()) == []


def test_notes_say_what_starts_and_every_ten_seconds_what_is_missing() -> None:
    core = new(Limits(startup_timeout_s=60.0, driver_timeout_s=None))
    started = [f"starting {name} ..." for name in (ROUTER, P, D)]
    assert notes(core, Tick(), 0.0) == started
    act(core, Serving(name=ROUTER, life=1, address="r"), 1.0)
    assert notes(core, Tick(), 9.9) == []
    both = "still waiting for prefill-0: needs {GPU: 1}, decode-0: needs {CPU: 2}"
    assert notes(core, Tick(), 10.0) == [both]
    assert notes(core, Tick(), 19.9) == []
    act(core, Serving(name=D, life=1, address="d"), 19.9)
    assert notes(core, Tick(), 20.0) == ["still waiting for prefill-0: needs {GPU: 1}"]
    act(core, Serving(name=P, life=1, address="p"), 29.0)
    act(core, Joined(name=D, life=1), 29.0)
    assert notes(core, Tick(), 30.0) == []
    act(core, Joined(name=P, life=1), 31.0)
    assert notes(core, Tick(), 50.0) == []


def test_workers_are_announced_once_the_router_serves() -> None:
    core = new()
    act(core, Tick())
    assert act(core, Serving(name=P, life=1, address="p")) == []
    assert act(core, Serving(name=ROUTER, life=1, address="r")) == [Announce(P, 1, "p")]
    assert act(core, Serving(name=D, life=1, address="d")) == [Announce(D, 1, "d")]


def test_ready_only_when_all_have_joined() -> None:
    core = new()
    act(core, Tick())
    for name in (ROUTER, P, D):
        act(core, Serving(name=name, life=1, address=name))
    act(core, Joined(name=P, life=1))
    assert core.phase is Phase.STARTING
    act(core, Joined(name=D, life=1))
    assert core.phase is Phase.READY


def test_lost_worker_is_withdrawn_and_started_again_after_a_pause() -> None:
    core = ready()
    lost = Lost(name=P, life=1, reason="crashed")
    assert act(core, lost, 5.0) == [Withdraw("p"), Remove(P)]
    assert act(core, DriverSeen(), 5.5) == []
    assert act(core, Tick(), 6.0) == [Start(P, 2)]
    assert act(core, Serving(name=P, life=2, address="p2"), 7.0) == [Announce(P, 2, "p2")]


def test_back_off_doubles_until_a_process_was_stable() -> None:
    core = ready(Limits(startup_timeout_s=60.0, driver_timeout_s=None))
    now_s, waits = 0.0, []
    for life in range(1, 9):
        act(core, Lost(name=P, life=life, reason="crashed"), now_s)
        began_s = now_s
        while not act(core, Tick(), now_s):
            now_s += 0.5
        waits.append(now_s - began_s)
        act(core, Serving(name=P, life=life + 1, address="p"), now_s)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    now_s += STABLE_S
    act(core, Lost(name=P, life=9, reason="crashed"), now_s)
    assert act(core, Tick(), now_s + 1.0) == [Start(P, 10)]


def test_lost_router_hears_of_every_worker_again() -> None:
    core = ready()
    assert act(core, Lost(name=ROUTER, life=1, reason="crashed"), 5.0) == [Remove(ROUTER)]
    assert act(core, Tick(), 6.0) == [Start(ROUTER, 2)]
    again = act(core, Serving(name=ROUTER, life=2, address="r"), 7.0)
    assert again == [Announce(P, 1, "p"), Announce(D, 1, "d")]


def test_old_lives_are_not_heard() -> None:
    core = ready()
    act(core, Lost(name=P, life=1, reason="crashed"), 5.0)
    act(core, Tick(), 6.0)
    assert act(core, Lost(name=P, life=1, reason="again"), 6.0) == []
    assert act(core, Serving(name=P, life=1, address="old"), 6.0) == []
    assert core.workers[P].state is State.STARTING


def test_a_start_that_can_not_succeed_stops_the_cluster() -> None:
    core = new()
    act(core, Tick())
    refused = Lost(name=P, life=1, reason="no config.json", fatal=True)
    assert act(core, refused) == [Stop(ROUTER, drain=False)]
    assert core.error == "prefill-0: no config.json"


def test_a_process_that_never_served_is_given_up() -> None:
    core, now_s = new(), 0.0
    act(core, Tick())
    for life in range(1, STARTS_BEFORE_FATAL):
        assert act(core, Lost(name=P, life=life, reason="died"), now_s) == [Remove(P)]
        now_s += 10.0
        act(core, DriverSeen(), now_s)
    last = Lost(name=P, life=STARTS_BEFORE_FATAL, reason="died")
    assert act(core, last, now_s) == [Stop(ROUTER, drain=False)]
    assert core.error == "prefill-0: died"


def test_a_fatal_reason_after_it_served_is_only_another_crash() -> None:
    core = ready()
    assert act(core, Lost(name=P, life=1, reason="x", fatal=True)) == [Withdraw("p"), Remove(P)]
    assert core.error is None


def test_a_refused_worker_stops_a_cluster_that_starts() -> None:
    core = new()
    act(core, Tick())
    act(core, Serving(name=ROUTER, life=1, address="r"))
    act(core, Serving(name=P, life=1, address="p"))
    refused = Joined(name=P, life=1, refused="another model")
    assert act(core, refused) == [Stop(ROUTER, drain=True)]
    assert core.error == "the router refused prefill-0: another model"


def test_startup_has_a_limit() -> None:
    core = new(Limits(startup_timeout_s=60.0, driver_timeout_s=None))
    act(core, Tick())
    act(core, Serving(name=ROUTER, life=1, address="r"))
    assert act(core, Tick(), 60.0) == []
    assert act(core, Tick(), 60.1) == [Stop(ROUTER, drain=True)]
    assert core.error is not None
    assert core.error.startswith("prefill-0, decode-0 did not start in time")


def test_stop_drains_the_router_then_the_workers() -> None:
    core = ready()
    assert act(core, StopAsked()) == [Stop(ROUTER, drain=True)]
    assert act(core, StopAsked()) == []
    assert act(core, Stopped(name=ROUTER)) == [Stop(P, drain=True), Stop(D, drain=True)]
    assert act(core, Lost(name=P, life=1, reason="closed")) == []
    act(core, Stopped(name=P))
    assert core.phase is Phase.STOPPING
    act(core, Stopped(name=D))
    assert core.phase is Phase.STOPPED
    assert core.error is None


def test_a_driver_that_is_gone_stops_the_cluster() -> None:
    core = ready()
    act(core, DriverSeen(), 8.0)
    assert act(core, Tick(), 18.0) == []
    assert act(core, Tick(), 18.1) == [Stop(ROUTER, drain=True)]


def test_a_detached_cluster_needs_no_driver() -> None:
    core = ready(Limits(startup_timeout_s=60.0, driver_timeout_s=None))
    assert act(core, Tick(), 1e6) == []


@pytest.mark.parametrize("seed", range(30))
def test_random_histories_end_stopped(seed: int) -> None:
    """Whatever is lost on the way: one Stop per process, and nothing starts after it."""
    rng = random.Random(seed)
    core, now_s = new(), 0.0
    running: dict[str, int] = {}
    todo: list[Command] = []
    stops: list[Command] = []

    def tell(event: Event) -> None:
        commands = act(core, event, now_s)
        assert not (stops and any(isinstance(command, Start) for command in commands))
        stops.extend(command for command in commands if isinstance(command, Stop))
        todo.extend(commands)

    for _ in range(rng.randrange(400)):
        now_s += rng.random()
        if todo and rng.random() < 0.7:
            tell(_outcome(todo.pop(0), running, rng))
        elif running and rng.random() < 0.1:
            name = rng.choice(sorted(running))
            tell(Lost(name=name, life=running.pop(name), reason="killed"))
        else:
            tell(rng.choice([Tick(), DriverSeen()]))
    tell(StopAsked())
    while todo:
        tell(_outcome(todo.pop(0), running, rng))
    assert core.phase is Phase.STOPPED
    assert [stop.name for stop in stops if isinstance(stop, Stop)] == [ROUTER, P, D]


def _outcome(command: Command, running: dict[str, int], rng: random.Random) -> Event:
    match command:
        case Start(name=name, life=life) if rng.random() < 0.3:
            return Lost(name=name, life=life, reason="no luck")
        case Start(name=name, life=life):
            running[name] = life
            return Serving(name=name, life=life, address=f"{name}:{life}")
        case Announce(name=name, life=life):
            return Joined(name=name, life=life)
        case Stop(name=name):
            running.pop(name, None)
            return Stopped(name=name)
    return DriverSeen()
