from __future__ import annotations

import pytest

from kvrelay.types import Incarnation, Role
from router.core.core import RouterCore
from router.core.events import (
    Command,
    PairQuarantined,
    PairTrusted,
    Send,
    TimePassed,
    WorkerLost,
)
from router.core.faults.poison import PEER_END_S
from router.core.policy.forecast import Forecast
from router.core.policy.placement_baselines import LeastLoaded
from router.core.state.quarantine import Objection, Pair, Placement, Quarantine, back_off_s
from router.core.workers import Workers
from tests.unit.router_kit import core_with, demand, failed, hello, lifetime, reserved, says, submit

P, D = Role.PREFILL, Role.DECODE


def pair(prefill: str = "p", decode: str = "d") -> Pair:
    return Pair(Incarnation(prefill), Incarnation(decode))


ONE = pair()


def objection(quarantine: Quarantine, now_s: float) -> Objection:
    return quarantine.objection(ONE, (), now_s)[0]


def test_the_back_off_doubles_up_to_five_minutes() -> None:
    assert [back_off_s(n) for n in (1, 2, 3, 6, 7, 8, 10_000)] == [5, 10, 20, 160, 300, 300, 300]


def test_a_failure_keeps_a_pair_out_until_its_back_off_is_over() -> None:
    quarantine = Quarantine()
    assert quarantine.failed(ONE, "transfer_failed", 100) == 5
    assert objection(quarantine, 104.9) is Objection.QUARANTINED
    assert objection(quarantine, 105) is Objection.NONE
    assert quarantine.failed(ONE, "peer_lost", 106) == 10
    assert list(quarantine.active(115.9)) == [ONE]
    assert not quarantine.active(116)


def test_failures_within_one_quarantine_count_once() -> None:
    """Requests that were on their way together fail together."""
    quarantine = Quarantine()
    quarantine.failed(ONE, "kv_mismatch", 100)
    assert quarantine.failed(ONE, "peer_lost", 104) is None
    (record,) = quarantine.active(104).values()
    assert (record.failures, record.until_s, record.failed_s) == (1, 105, 104)
    assert record.reason == "kv_mismatch"


def test_a_success_that_was_begun_after_the_failure_ends_it() -> None:
    quarantine = Quarantine()
    quarantine.failed(ONE, "transfer_failed", 100)
    assert not quarantine.succeeded(ONE, begun_s=99, checked=True)
    assert quarantine.succeeded(ONE, begun_s=101, checked=False)
    assert objection(quarantine, 101) is Objection.NONE
    assert quarantine.failed(ONE, "transfer_failed", 102) == 5
    assert not quarantine.succeeded(pair("x"), begun_s=200, checked=True)


def test_wrong_kv_is_forgiven_only_once_checked() -> None:
    quarantine = Quarantine()
    quarantine.failed(ONE, "kv_mismatch", 100)
    assert not quarantine.succeeded(ONE, begun_s=101, checked=False)
    assert quarantine.succeeded(ONE, begun_s=101, checked=True)


def test_a_worker_that_is_gone_takes_its_pairs_along() -> None:
    quarantine = Quarantine()
    for one in (ONE, pair("p", "d2"), pair("p2", "d2")):
        quarantine.failed(one, "peer_lost", 0)
    quarantine.forget(Incarnation("p"))
    assert list(quarantine.active(1)) == [pair("p2", "d2")]


# --- placement ----------------------------------------------------------------------------------


def place(quarantine: Quarantine, *tried: str, avoided: tuple[Pair, ...] = ()) -> Placement | None:
    """At 10 s, of two prefill and two decode workers."""
    workers = Workers()
    for name, role in (("p1", P), ("p2", P), ("d1", D), ("d2", D)):
        workers.join(hello(name, role))
    asked = demand()
    choice = workers.choice(
        asked,
        [Incarnation(name) for name in tried],
        lambda one: quarantine.objection(one, avoided, 10),
        Forecast(workers),
    )
    candidates = LeastLoaded().candidates(asked, choice, 10)
    return next((one.placement for one in choice.acceptable(candidates)), None)


def placed(prefill: str, decode: str) -> Placement:
    return Placement(prefill=Incarnation(prefill), decode=Incarnation(decode))


def keep_out(*names: tuple[str, str]) -> Quarantine:
    """The first has failed first."""
    quarantine = Quarantine()
    for i, one in enumerate(names):
        quarantine.failed(pair(*one), "transfer_failed", 9 + i / 10)
    return quarantine


ALL = [("p2", "d1"), ("p1", "d2"), ("p1", "d1"), ("p2", "d2")]


def test_another_pair_is_found() -> None:
    assert place(Quarantine()) == placed("p1", "d1")
    assert place(keep_out(("p1", "d1"))) == placed("p2", "d1")
    assert place(keep_out(("p1", "d1"), ("p2", "d1"))) == placed("p1", "d2")


def test_when_all_are_quarantined_the_least_recently_failed_serves() -> None:
    assert place(keep_out(*ALL)) == placed("p2", "d1")
    assert place(keep_out(*ALL), "d1") == placed("p1", "d2")


def test_a_quarantined_pair_is_not_asked_because_another_is_full() -> None:
    assert place(keep_out(("p1", "d1"), ("p2", "d1")), "d2") is None


def test_a_request_avoids_the_pairs_that_failed_it_while_there_are_others() -> None:
    avoided = (pair("p1", "d1"), pair("p2", "d1"))
    assert place(Quarantine(), avoided=avoided) == placed("p1", "d2")
    assert place(keep_out(*ALL), avoided=avoided) == placed("p1", "d2")
    every = tuple(pair(*one) for one in ALL)
    assert place(keep_out(*ALL), avoided=every) == placed("p2", "d1")


# --- the router's core --------------------------------------------------------------------------


def cluster(*decodes: str) -> RouterCore:
    return core_with(p=Role.PREFILL, **dict.fromkeys(decodes, Role.DECODE))


def asked(commands: list[Command]) -> list[str]:
    """Who is asked for a place."""
    return [
        c.worker for c in commands if isinstance(c, Send) and type(c.message).__name__ == "Reserve"
    ]


def told(commands: list[Command]) -> list[Command]:
    return [c for c in commands if isinstance(c, PairQuarantined | PairTrusted)]


@pytest.mark.parametrize(
    "reason",
    [
        "transfer_failed",
        "transfer_cancelled",
        "transfer_timeout",
        "handoff_timeout",
        "kv_mismatch",
        "peer_lost",
    ],
)
def test_a_failed_handoff_quarantines_its_pair(reason: str) -> None:
    core = cluster("d", "d2")
    submit(core)
    says(core, "d", reserved())
    commands = says(core, "d", failed(reason), now_s=2)
    (said,) = told(commands)
    if reason == "peer_lost":
        assert asked(commands) == [], "the other one may have died: that will be heard"
        commands = core.handle(TimePassed(), 2 + PEER_END_S)
    assert asked(commands) == ["d2"]
    assert isinstance(said, PairQuarantined)
    assert (said.pair, said.seconds, said.reason, said.message) == (ONE, 5, reason, "why")
    assert asked(submit(core, "other", now_s=3)) == ["d2"]
    assert asked(submit(core, "later", now_s=7.1)) == ["d"]


def test_other_failures_say_nothing_of_the_pair() -> None:
    core = cluster("d")
    submit(core)
    says(core, "d", reserved())
    assert told(says(core, "d", failed("bad_request"))) == []
    assert not core.state.quarantine.active(2)


def test_the_only_pair_serves_on_and_a_success_clears_it() -> None:
    core = cluster("d")
    submit(core)
    says(core, "d", reserved())
    assert asked(says(core, "d", failed("transfer_failed"), now_s=2)) == ["d"]
    says(core, "d", reserved(attempt=1), now_s=2.1)
    assert told(says(core, "d", lifetime("handoff_committed", attempt=1))) == [
        PairTrusted(pair=ONE)
    ]
    assert not core.state.quarantine.active(2.2)


def test_wrong_kv_is_cleared_by_the_canary_alone() -> None:
    core = cluster("d")
    submit(core)
    says(core, "d", reserved())
    says(core, "d", failed("kv_mismatch"), now_s=2)
    says(core, "d", reserved(attempt=1), now_s=2.1)
    assert told(says(core, "d", lifetime("handoff_committed", attempt=1))) == []
    assert told(says(core, "d", lifetime("kv_checked", attempt=1))) == [PairTrusted(pair=ONE)]


def test_what_an_old_attempt_says_quarantines_nothing() -> None:
    core = cluster("d", "d2")
    submit(core)
    says(core, "d", reserved())
    says(core, "d", failed("transfer_failed"))
    assert told(says(core, "p", failed("transfer_cancelled"))) == []


def test_a_lost_worker_is_forgotten() -> None:
    core = cluster("d", "d2")
    submit(core)
    says(core, "d", reserved())
    says(core, "d", failed("peer_lost"))
    core.handle(WorkerLost(incarnation=Incarnation("d")), 3)
    assert not core.state.quarantine.active(3)
