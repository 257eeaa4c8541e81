"""Steps and runs of steps, in closed form."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.core.step_times import LinearTimes, NotCovered, decode_work, prefill_work
from kvrelay.types import StepCoefficients

TIMES = LinearTimes(
    prefill_overhead_s=0.003,
    prefill_token_s=40e-6,
    prefill_pair_s=0.1e-6,
    prefill_sequence_s=50e-6,
    decode_knots=((1, 0.004), (2, 0.005), (16, 0.012), (64, 0.024)),
    decode_kv_token_s=0.3e-6,
)


def test_prefill_counts_tokens_pairs_and_sequences() -> None:
    packed = prefill_work(100) + prefill_work(10, 1000)
    pairs = 5050 + 10 * 1000 + 55
    assert TIMES.step_s(packed) == pytest.approx(0.003 + 110 * 40e-6 + pairs * 0.1e-6 + 2 * 50e-6)


@pytest.mark.parametrize(("cached", "chunks"), [(0, (100, 100, 50)), (130, (100, 20)), (250, ())])
def test_a_prompt_takes_as_long_as_its_chunks(cached: int, chunks: tuple[int, ...]) -> None:
    seconds, done = 0.0, cached
    for chunk in chunks:
        seconds += TIMES.step_s(prefill_work(chunk, done))
        done += chunk
    assert TIMES.prompt_s(250, cached, 100) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("sequences", "seconds"),
    [(1, 0.004), (2, 0.005), (9, 0.0085), (16, 0.012), (40, 0.018), (64, 0.024)],
)
def test_decode_is_linear_between_its_knots(sequences: int, seconds: float) -> None:
    assert TIMES.step_s(decode_work(sequences, 0)) == pytest.approx(seconds)
    assert TIMES.step_s(decode_work(sequences, 1000)) == pytest.approx(seconds + 0.3e-3)


def test_more_sequences_than_were_measured_are_not_covered() -> None:
    with pytest.raises(NotCovered, match="65 sequences: decode was measured up to 64"):
        TIMES.step_s(decode_work(65, 65))
    with pytest.raises(NotCovered, match="measured up to 0"):
        LinearTimes(prefill_token_s=1.0).step_s(decode_work(1, 1))


@pytest.mark.parametrize(("overhead_s", "smaller_s"), [(0.002, 0.002), (0.01, 0.003)])
def test_the_larger_overhead_of_a_mixed_step_counts_once(
    overhead_s: float, smaller_s: float
) -> None:
    times = replace(TIMES, prefill_overhead_s=overhead_s)
    assert times.decode_overhead_s == pytest.approx(0.003)
    prefill, decode = prefill_work(256), decode_work(2, 600)
    apart_s = times.step_s(prefill) + times.step_s(decode)
    assert times.step_s(prefill + decode) == pytest.approx(apart_s - smaller_s)


def test_an_overhead_is_never_negative() -> None:
    steep = LinearTimes(decode_knots=((1, 0.001), (2, 0.004)))
    assert steep.decode_overhead_s == 0
    assert LinearTimes(decode_knots=((8, 0.002),)).decode_overhead_s == 0.002
    falling = LinearTimes(decode_knots=((1, 0.004), (2, 0.001)))
    assert falling.decode_overhead_s == 0.004


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prefill_token_s": -1e-9}, "prefill_token_s"),
        ({"prefill_pair_s": float("nan")}, "prefill_pair_s"),
        ({"error": float("inf")}, "error"),
        ({"decode_knots": ((0, 1.0),)}, "decode_knots: pairs"),
        ({"decode_knots": ((1, float("nan")),)}, "decode_knots: pairs"),
        ({"decode_knots": ((4, 1.0), (4, 2.0))}, "decode_knots: ascending"),
    ],
)
def test_impossible_coefficients_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepCoefficients(**fields)  # type: ignore[arg-type]


def test_what_was_told_computes() -> None:
    told = StepCoefficients(prefill_overhead_s=0.25, decode_knots=((1, 0.5),))
    assert LinearTimes.of(told).step_s(decode_work(1, 0)) == 0.5
    assert LinearTimes.of(told).step_s(prefill_work(1)) == 0.25
