"""Known coefficients are found again, and few steps are timed for it."""

from __future__ import annotations

from dataclasses import asdict
from random import Random

import numpy as np
import pytest

from engine.core.fitting import Timed, design, fit_times, relative_errors, relative_least_squares
from engine.core.step_times import LinearTimes, decode_work, prefill_work

TIMES = LinearTimes(
    prefill_overhead_s=0.003,
    prefill_token_s=40e-6,
    prefill_pair_s=0.08e-6,
    prefill_sequence_s=50e-6,
    decode_knots=((1, 0.004), (2, 0.005), (4, 0.0055), (8, 0.0075), (16, 0.012), (32, 0.02)),
    decode_kv_token_s=0.3e-6,
)
SHAPES = design(chunk_tokens=512, most_sequences=32, max_model_len=2048, pool_tokens=65_536)


def timed(spread: float = 0.0) -> list[Timed]:
    random = Random(0)
    works = [shape.work for shape, _ in SHAPES]
    return [Timed(w, TIMES.step_s(w) * random.uniform(1 - spread, 1 + spread)) for w in works]


def test_known_coefficients_are_found() -> None:
    found, known = asdict(fit_times(timed())), asdict(TIMES)
    knots, known_knots = found.pop("decode_knots"), known.pop("decode_knots")
    assert found == pytest.approx(known, rel=1e-5, abs=1e-6)
    assert dict(knots) == pytest.approx(dict(known_knots))


def test_noise_is_averaged_and_reported() -> None:
    found = fit_times(timed(spread=0.1))
    exact = timed()
    assert sorted(relative_errors(found, exact))[len(exact) // 2] < 0.05
    assert 0.01 < found.error < 0.15


def test_what_was_never_faster_than_nothing_is_not_negative() -> None:
    rows = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    falling = relative_least_squares(rows, np.array([3.0, 2.0, 1.0]))
    assert falling[1] == 0
    assert falling[0] > 0
    exact = relative_least_squares(rows, np.array([0.5, 0.7, 0.9]))
    assert exact == pytest.approx([0.3, 0.2])


def test_small_steps_weigh_as_much_as_large_ones() -> None:
    """Absolute least squares would all but ignore the first two."""
    rows = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 1000.0]])
    overhead, token = relative_least_squares(rows, np.array([0.1, 0.2, 120.0]))
    assert overhead == pytest.approx(0.1, rel=0.1)
    assert token == pytest.approx(0.11, rel=0.15)


def test_larger_batches_never_take_less() -> None:
    samples = [Timed(decode_work(n, 0), s) for n, s in ((1, 0.02), (2, 0.01), (4, 0.03))]
    knots = fit_times(samples).decode_knots
    assert [n for n, _ in knots] == [1, 2, 4]
    assert [s for _, s in knots] == sorted(s for _, s in knots)
    assert knots[0][1] == knots[1][1] == pytest.approx(0.0125, rel=0.1)


def test_prefill_alone_can_be_fitted() -> None:
    samples = [Timed(prefill_work(n), 0.1 + 0.01 * n) for n in (8, 16, 64, 128)]
    found = fit_times(samples)
    assert found.decode_knots == ()
    assert found.step_s(prefill_work(100)) == pytest.approx(1.1, rel=0.02)


@pytest.mark.parametrize(
    ("chunk", "most", "longest", "pool"),
    [(512, 64, 2048, 131_072), (16, 1, 64, 64), (512, 3, 40, 64), (2048, 256, 8192, 9000)],
)
def test_shapes_fit_the_worker(chunk: int, most: int, longest: int, pool: int) -> None:
    shapes = [shape for shape, _ in design(
        chunk_tokens=chunk, most_sequences=most, max_model_len=longest, pool_tokens=pool
    )]  # fmt: skip
    assert len(shapes) == len({*shapes})
    for shape in shapes:
        assert shape.context + shape.tokens <= min(longest, pool), shape
        assert shape.tokens == 1 or shape.rows * shape.tokens <= chunk, shape
        assert shape.tokens > 0 <= shape.context, shape
    decoded = [shape.rows for shape in shapes if shape.tokens == 1]
    assert {1, most} <= {*decoded}
    assert max(decoded) == most
