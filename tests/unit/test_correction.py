"""A worker learns how its steps differ from the profile."""

from __future__ import annotations

from random import Random

import pytest

from engine.core.correction import CorrectedTimes, StepPace
from engine.core.step_times import LinearTimes, StepWork, decode_work, prefill_work

TIMES = LinearTimes(
    prefill_overhead_s=0.003,
    prefill_token_s=40e-6,
    decode_knots=((1, 0.004), (64, 0.024)),
    decode_kv_token_s=0.3e-6,
)
PREFILL, DECODE = prefill_work(256), decode_work(8, 800)


def run(pace: StepPace, work: StepWork, factor: float, *, steps: int, spread: float = 0.0) -> float:
    """When the last one ends, by a clock that begins at 0."""
    now_s, random = 0.0, Random(0)
    for _ in range(steps):
        pace.begun(work, now_s)
        now_s += TIMES.step_s(work) * factor * random.uniform(1 - spread, 1 + spread)
        pace.ended(now_s)
    return now_s


def test_a_device_twice_as_slow_is_found_out() -> None:
    pace = StepPace(TIMES)
    run(pace, DECODE, 2.0, steps=150, spread=0.2)
    assert pace.decode.factor == pytest.approx(2.0, rel=0.05)
    assert pace.prefill.factor == 1.0
    run(pace, PREFILL, 0.5, steps=150, spread=0.2)
    assert pace.prefill.factor == pytest.approx(0.5, rel=0.05)
    run(pace, DECODE, 1.0, steps=600, spread=0.2)
    assert pace.decode.factor == pytest.approx(1.0, rel=0.05)


def test_a_mixed_step_teaches_both_sides() -> None:
    pace = StepPace(TIMES)
    run(pace, PREFILL + DECODE, 2.0, steps=200)
    assert pace.corrected.step_s(PREFILL + DECODE) == pytest.approx(
        2 * TIMES.step_s(PREFILL + DECODE), rel=0.01
    )
    assert pace.prefill.factor == pytest.approx(2.0, rel=0.01)


def test_one_step_that_was_held_up_changes_little() -> None:
    pace = StepPace(TIMES)
    run(pace, DECODE, 1.0, steps=20)
    run(pace, DECODE, 1000.0, steps=1)
    assert 1.0 < pace.decode.factor < 1.12


def test_uneven_steps_count_by_their_sum() -> None:
    """One in five takes three times as long: 1.4 on average, 1.25 in the geometric mean."""
    pace, now_s = StepPace(TIMES), 0.0
    for step in range(2000):
        pace.begun(DECODE, now_s)
        now_s += TIMES.step_s(DECODE) * (3.0 if step % 5 == 0 else 1.0)
        pace.ended(now_s)
    assert pace.decode.level == pytest.approx(1.25, rel=0.06)
    assert pace.decode.factor == pytest.approx(1.4, rel=0.06)


def test_a_wrong_profile_is_soon_mended() -> None:
    pace = StepPace(TIMES)
    run(pace, DECODE, 0.25, steps=1)
    assert 0.6 < pace.decode.factor < 0.8  # as if three steps had said 1
    run(pace, DECODE, 0.25, steps=9)
    assert pace.decode.factor < 0.37


@pytest.mark.parametrize("work", [PREFILL, DECODE])
def test_an_idle_worker_forgets_what_its_last_steps_met(work: StepWork) -> None:
    pace = StepPace(TIMES)
    run(pace, work, 1.5, steps=4000)
    ends_s = run(pace, work, 3.0, steps=60)
    factors = []
    for waits_s in (0.0, 1.0, 10.0):
        pace.rest(ends_s + waits_s)
        factors.append(max(pace.prefill.factor, pace.decode.factor))
    slow, later, usual = factors
    assert slow > 2.3 and usual == pytest.approx(1.5, rel=0.15)
    assert (later - usual) / (slow - usual) == pytest.approx(0.34, abs=0.04)


def test_what_a_busy_worker_has_learnt_stays() -> None:
    """The other kind of step, too, while this one's run."""
    pace = StepPace(TIMES)
    run(pace, DECODE, 0.5, steps=300)
    ends_s = run(pace, PREFILL, 2.0, steps=300)
    for now_s in (ends_s, ends_s + 60):
        pace.rest(now_s)
        assert (pace.prefill.factor, pace.decode.factor) == pytest.approx((2.0, 0.5), rel=0.05)


def test_a_correction_is_bounded() -> None:
    pace = StepPace(TIMES)
    run(pace, DECODE, 1e6, steps=500)
    assert pace.decode.factor == pytest.approx(32)


def test_what_happens_between_two_steps_belongs_to_the_second() -> None:
    pace, step_s = StepPace(TIMES), TIMES.step_s(DECODE)
    for step in range(200):  # each is submitted a step's time after the device was free
        pace.begun(DECODE, (2 * step + 1) * step_s)
        pace.ended((2 * step + 2) * step_s)
    assert pace.decode.factor == pytest.approx(2.0, rel=0.01)


def test_time_without_work_is_not_counted() -> None:
    pace, step_s = StepPace(TIMES), TIMES.step_s(DECODE)
    for begun_s in range(50):
        pace.begun(DECODE, begun_s)
        pace.ended(begun_s + step_s)
        pace.idle()
    assert pace.decode.factor == pytest.approx(1.0)


def test_what_the_profile_does_not_cover_teaches_nothing() -> None:
    pace = StepPace(TIMES)
    pace.begun(decode_work(65, 100), 0.0)
    pace.ended(1.0)
    assert pace.corrected == CorrectedTimes(TIMES, 1.0, 1.0)
