"""Shares of a decode worker's places: who is taken, at whose cost, and who is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.core.worker.reports import tier_loads
from decode_worker.scheduler import DecodeScheduler
from engine.core.step import Emit, StepWanted
from engine.core.step_times import LinearTimes
from kvrelay.counters import TierLoad
from kvrelay.messages import Abort, Generate, Released, Reserved, ReserveRefused
from kvrelay.qos import QosTier, QosTiers
from kvrelay.types import RequestSpec
from tests.unit.test_decode_scheduler import arrive, assert_idle
from tests.unit.worker_kit import (
    decode_scheduler,
    done,
    key,
    prefill_of,
    prefill_scheduler,
    reserve,
    spec,
    the_step,
)

TIERS = QosTiers(
    tiers=(
        QosTier(name="premium", priority=0, share=0.25),
        QosTier(name="standard", priority=1, share=0.25),
        QosTier(name="free", priority=2),
    ),
    default="free",
)


def scheduler(
    *, blocks: int = 40, caching: bool = True, times: LinearTimes | None = None
) -> DecodeScheduler:
    """Four places: one is premium's, one standard's."""
    return decode_scheduler(
        blocks=blocks, slabs=4, max_running=4, caching=caching, qos=TIERS, times=times
    )


def of(tier: str, name: str, tokens: int = 3, **more: int) -> RequestSpec:
    return replace(spec(name, tokens, **more), qos_tier=tier)


def asked(
    one: DecodeScheduler,
    request: RequestSpec,
    counted: int | None = None,
    *,
    displaced: bool = False,
) -> str:
    """ "taken", or why not."""
    (answer,) = one.handle(replace(reserve(request), counted=counted, displaced=displaced), 0)
    assert isinstance(answer, Emit)
    (event,) = answer.events
    if isinstance(event, Reserved):
        return "taken"
    assert isinstance(event, ReserveRefused)
    return event.reason


def running(one: DecodeScheduler) -> list[str]:
    """Who is in the next step."""
    batch = the_step(one.handle(StepWanted(), 0)).batch
    done(one, *[(7,) if piece.samples else () for piece in batch.slices])
    one.validate()
    return [piece.key.request_id for piece in batch.slices]


def test_free_places_are_lent_and_their_owners_still_get_theirs() -> None:
    one = scheduler()
    assert [asked(one, of("free", f"f{i}")) for i in range(4)] == ["taken"] * 4
    assert asked(one, of("free", "f4")) == "tier_share_exhausted"
    assert asked(one, of("premium", "p0")) == "taken"
    assert asked(one, of("premium", "p1")) == "tier_share_exhausted"
    assert asked(one, of("standard", "s0")) == "taken"
    assert asked(one, of("standard", "s1")) == "slots_exhausted"


def test_the_share_of_who_asks_for_several_places_at_once() -> None:
    one = scheduler()
    assert asked(one, of("free", "f", n=4)) == "taken"
    assert asked(one, of("premium", "p", n=2)) == "tier_share_exhausted"
    assert asked(one, of("premium", "p", n=1)) == "taken"


def test_an_unknown_tier_is_the_default_one() -> None:
    one = scheduler()
    assert [asked(one, of("gold", f"g{i}")) for i in range(4)] == ["taken"] * 4
    assert one.admission.held() == {"free": 4}


def test_an_owner_gets_its_place_back_with_the_next_step() -> None:
    one = scheduler()
    for i in range(4):
        arrive(one, of("free", f"f{i}"))
    assert running(one) == ["f0", "f1", "f2", "f3"]
    arrive(one, of("premium", "p"))
    assert running(one) == ["p", "f0", "f1", "f2"]
    assert [s.key for s in one.batch.running_set.awaiting_prefill] == [key("f3")]
    assert one.batch.running_set.preemptions == 1


def test_of_those_on_lent_places_the_last_priority_s_newest_yields() -> None:
    one = scheduler()
    for tier, name in (("free", "f0"), ("free", "f1"), ("standard", "s0"), ("standard", "s1")):
        arrive(one, of(tier, name))
    arrive(one, of("premium", "p"))
    assert running(one) == ["p", "s0", "s1", "f0"]


def test_beyond_its_share_the_first_priority_yields_to_an_owner_too() -> None:
    one = scheduler()
    for i in range(4):
        arrive(one, of("premium", f"p{i}"))
    arrive(one, of("standard", "s"))
    assert running(one) == ["p0", "s", "p1", "p2"]


def test_lower_tiers_on_lent_places_make_room_for_a_displaced_request() -> None:
    """For no more of them than there are, and not for their own tier."""
    one = scheduler()
    for tier, name in (("free", "f0"), ("free", "f1"), ("premium", "p0"), ("premium", "p1")):
        arrive(one, of(tier, name))
    assert asked(one, of("free", "f2"), displaced=True) == "tier_share_exhausted"
    assert asked(one, of("premium", "p2")) == "tier_share_exhausted"
    arrive(one, of("premium", "p2"), displaced=True)
    assert running(one) == ["p0", "p1", "p2", "f0"]
    assert asked(one, of("premium", "p3"), displaced=True) == "taken"
    assert asked(one, of("premium", "p4"), displaced=True) == "tier_share_exhausted"


def test_a_displaced_request_gets_blocks_of_lower_tiers_and_no_pace_speaks_against_it() -> None:
    one = scheduler(blocks=10, caching=False, times=STEP_S)
    for name in ("f0", "f1"):
        arrive(one, of("free", name, 15))
    wants = replace(of("premium", "p", 15), tpot_s=1e-6)
    other = replace(of("free", "f2", 15), tpot_s=1e-6)
    assert asked(one, other, displaced=True) == "kv_exhausted"
    arrive(one, of("premium", "own", 7))
    assert asked(one, wants) == "tpot_unreachable"
    assert asked(one, wants, displaced=True) == "taken"
    one.validate()


def test_who_lost_its_place_comes_again_and_nothing_is_lost() -> None:
    one = scheduler()
    for i in range(4):
        arrive(one, of("free", f"f{i}", max_tokens=6))
    arrive(one, of("premium", "p", max_tokens=3))
    assert running(one) == ["p", "f0", "f1", "f2"]
    assert asked(one, of("free", "new")) == "tier_share_exhausted"
    assert running(one) == ["p", "f0", "f1", "f2"]  # p's last token
    assert running(one) == ["f0", "f1", "f2", "f3"]
    while one.has_work:
        running(one)
    assert_idle(one)
    assert one.generated_tokens == 4 * 5 + 2


def test_without_tiers_places_are_first_come_first_served() -> None:
    one = decode_scheduler(max_running=2)
    assert [asked(one, spec(f"r{i}", 3)) for i in range(3)] == ["taken", "taken", "slots_exhausted"]


# --- blocks -------------------------------------------------------------------------------------


def short_of_blocks() -> DecodeScheduler:
    """Two free ones hold all but one of 9 blocks."""
    one = scheduler(blocks=9, caching=False)
    for name in ("f0", "f1"):
        arrive(one, of("free", name, 14))
    return one


def test_an_owner_gets_the_blocks_of_those_on_lent_places_between_two_steps() -> None:
    one = short_of_blocks()
    the_step(one.handle(StepWanted(), 0))
    assert one.handle(reserve(of("premium", "p", 14)), 1) == []
    assert one.sequences == 2
    *_, answer = done(one, (7,), (7,), now_s=2)
    assert answer == Emit(events=(Reserved(key=key("p"), at_s=2),))
    one.validate()
    assert running(one) == ["f0"]


def test_at_once_where_no_step_runs() -> None:
    one = short_of_blocks()
    assert asked(one, of("premium", "p", 14)) == "taken"
    assert [s.key for s in one.batch.running_set.awaiting_prefill] == [key("f1")]


def test_beyond_its_share_nobody_s_blocks_are_taken() -> None:
    one = short_of_blocks()
    assert asked(one, of("free", "f2", 14)) == "kv_exhausted"
    assert one.batch.running_set.preemptions == 0


def test_nobody_yields_for_what_would_not_fit_anyway() -> None:
    one = short_of_blocks()
    assert asked(one, of("premium", "p", 40)) == "kv_exhausted"
    assert one.batch.running_set.preemptions == 0


def test_to_be_prefilled_here_it_gets_its_blocks_too() -> None:
    one = short_of_blocks()
    (answer,) = one.handle(Generate(spec=of("premium", "p", 14)), 1)
    assert answer == Emit(events=(Reserved(key=key("p"), at_s=1),))


def test_one_that_asks_may_be_aborted_and_counts_meanwhile() -> None:
    one = short_of_blocks()
    the_step(one.handle(StepWanted(), 0))
    assert one.handle(reserve(of("premium", "p", 14)), 1) == []
    assert asked(one, of("free", "f2", n=2)) == "tier_share_exhausted"
    assert one.handle(Abort(key=key("p")), 1) == [Emit(events=(Released(key=key("p"), at_s=1),))]
    done(one, (7,), (7,))
    assert one.batch.running_set.preemptions == 0
    one.validate()


# --- TPOT ---------------------------------------------------------------------------------------

STEP_S = LinearTimes(decode_knots=((1, 0.010), (2, 0.020), (3, 0.030), (4, 0.040)))
"""10 ms for each sequence."""


def test_what_would_break_its_own_tpot_is_refused() -> None:
    one = scheduler(times=STEP_S)
    asked(one, of("free", "f"))
    assert asked(one, replace(of("free", "a"), tpot_s=0.018)) == "tpot_unreachable"
    assert asked(one, replace(of("free", "b"), tpot_s=0.0185)) == "taken"  # within a tenth


def test_what_would_break_another_s_tpot_is_refused_if_it_has_one_itself() -> None:
    one = scheduler(times=STEP_S)
    assert asked(one, replace(of("free", "strict"), tpot_s=0.015)) == "taken"
    assert asked(one, replace(of("free", "mild"), tpot_s=1.0)) == "tpot_unreachable"
    assert asked(one, of("free", "none")) == "taken"


def test_nobody_is_refused_for_a_pace_that_could_not_be_had_alone() -> None:
    one = scheduler(times=STEP_S)
    assert asked(one, replace(of("premium", "p"), tpot_s=0.001)) == "taken"
    assert asked(one, replace(of("free", "mild"), tpot_s=1.0)) == "taken"
    assert asked(one, replace(of("free", "vain"), tpot_s=0.001)) == "tpot_unreachable"


def test_within_its_share_it_is_taken_as_those_on_lent_places_step_back() -> None:
    one = scheduler(times=STEP_S)
    for i in range(3):
        asked(one, of("free", f"f{i}"))
    assert asked(one, replace(of("premium", "p0"), tpot_s=0.015)) == "taken"
    assert asked(one, replace(of("premium", "p1"), tpot_s=0.015)) == "tier_share_exhausted"


def test_context_counts_too() -> None:
    times = LinearTimes(decode_knots=((4, 0.010),), decode_kv_token_s=0.001)
    one = scheduler(times=times)
    arrive(one, of("free", "f", 10))
    assert asked(one, replace(of("free", "a", 9), tpot_s=0.027)) == "tpot_unreachable"
    assert asked(one, replace(of("free", "a", 9), tpot_s=0.028)) == "taken"


def test_a_pace_that_the_router_has_judged_is_judged_again_beside_those_it_did_not_count() -> None:
    one = scheduler(times=LinearTimes(decode_knots=((4, 0.010),)))
    arrive(one, of("free", "f"))
    hurried = replace(of("free", "a"), tpot_s=0.001)
    assert asked(one, hurried, counted=0) == "tpot_unreachable", "another router's came meanwhile"
    assert asked(one, hurried, counted=1) == "taken"


@pytest.mark.parametrize("times", [None, LinearTimes(), LinearTimes(decode_knots=((1, 9.0),))])
def test_where_times_say_nothing_nobody_is_refused_for_them(times: LinearTimes | None) -> None:
    one = scheduler(times=times)
    asked(one, of("free", "f"))
    assert asked(one, replace(of("free", "a"), tpot_s=1e-6)) == "taken"


# --- counters -----------------------------------------------------------------------------------


def test_routers_are_told_of_each_tier() -> None:
    one, prefill = scheduler(), prefill_scheduler()
    for i in range(4):
        arrive(one, of("free", f"f{i}"))
    arrive(one, of("premium", "p"))
    running(one)
    asked(one, of("standard", "s"))
    prefill.handle(prefill_of(of("standard", "waits")), 0)
    assert tier_loads(prefill, one) == (
        TierLoad(tier="premium", running=1, waiting=0),
        TierLoad(tier="standard", running=1, waiting=1),
        TierLoad(tier="free", running=4, waiting=1),
    )
    assert tier_loads(prefill, decode_scheduler()) == ()
