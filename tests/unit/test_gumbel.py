"""The noise of draws, their distribution, and that our CPU kernel draws the same."""

from __future__ import annotations

import logging
import math
import platform
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.core.step import SampleRequest
from engine.device import native_build
from engine.device.native_build import built
from engine.sampling import gumbel, sampler
from engine.sampling import native_draw as native
from engine.sampling.gumbel import Draws
from engine.sampling.native_draw import SOURCE, DrawKernel, open_draw
from engine.sampling.parameters import draws_of
from engine.sampling.truncation import truncate
from kvrelay.types import Sampling
from tests.unit.draw_kit import VOCABS, no_cuts, random_cuts, random_draws, random_logits

needs_compiler = pytest.mark.skipif(
    not any(map(native_build.shutil.which, SOURCE.compilers)), reason="no C++ compiler here"
)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> DrawKernel:
    return open_draw(built(SOURCE, tmp_path_factory.mktemp("native")))


def key_of(draws: Draws, row: int) -> torch.Tensor:
    return torch.from_numpy(draws.keys[row].astype(np.int64))


# --- the noise ----------------------------------------------------------------------------------


def test_the_noise_is_minus_log_minus_log_of_the_words() -> None:
    """To a few units in the last place, from one end to the other."""
    most = 2**32 - 1
    words = torch.cat([torch.arange(4096), most - torch.arange(4096), torch.arange(0, most, 9973)])
    found = gumbel.gumbel(words)
    uniforms = ((words >> 1).double() + 0.5) * 2.0**-31
    exact = -torch.log(-torch.log1p(-uniforms))
    assert found.isfinite().all()
    assert ((found - exact).abs() <= 2.0**-21 * exact.abs().clamp_min(1)).all()
    assert float(found.max()) < 22.19 and float(found.min()) > -3.1


def test_the_noise_depends_on_seed_choice_index_and_id() -> None:
    plain = gumbel.noise(torch.tensor([1, 2, 3, 4]), 200)
    assert len(set(plain.tolist())) == 200
    for place in range(4):
        key = torch.tensor([1, 2, 3, 4])
        key[place] += 1
        assert (gumbel.noise(key, 200) != plain).all()
    assert torch.equal(gumbel.noise(torch.tensor([1, 2, 3, 4]), 70), plain[:70])


def test_seeds_count_modulo_2_to_the_64() -> None:
    sampling = Sampling(max_tokens=1, seed=-1)
    request = SampleRequest(sampling=sampling, choice=3, prompt_ids=(), emitted_ids=())
    (key,) = draws_of([request], [4]).keys.tolist()
    assert key == [0xFFFFFFFF, 0xFFFFFFFF, 3, 4]


# --- all ways draw the same ---------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("vocab", VOCABS)
def test_the_kernel_has_the_same_noise_to_the_bit(vocab: int, kernel: DrawKernel) -> None:
    draws = random_draws(12, vocab)
    for row, key in enumerate(draws.keys):
        assert torch.equal(kernel.noise(key, vocab), gumbel.noise(key_of(draws, row), vocab))


@needs_compiler
@pytest.mark.parametrize("vocab", VOCABS)
def test_the_kernel_draws_the_same(vocab: int, kernel: DrawKernel) -> None:
    """It looks at the noise only where it may decide."""
    for seed in range(10):
        draws, logits = random_draws(9, seed), random_logits(9, vocab, seed)
        assert torch.equal(kernel.draw(logits, draws), gumbel.draw(logits, draws))


@needs_compiler
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/cpuinfo")
@pytest.mark.parametrize("processor", ["x86-64", "haswell", "skylake-avx512"])
def test_older_processors_draw_the_same(processor: str, tmp_path: Path) -> None:
    needs = {"x86-64": "sse2", "haswell": "avx2", "skylake-avx512": "avx512bw"}[processor]
    if needs not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"this processor has no {needs}")
    older = open_draw(built(SOURCE, tmp_path, processor))
    draws, logits = random_draws(12, 1), random_logits(12, 5000, 1)
    assert torch.equal(older.draw(logits, draws), gumbel.draw(logits, draws))
    assert torch.equal(older.noise(draws.keys[3], 777), gumbel.noise(key_of(draws, 3), 777))


@needs_compiler
@pytest.mark.parametrize("vocab", [40, 65, 1500, 5000])
@pytest.mark.parametrize("processor", ["native", "x86-64"])
def test_the_kernel_cuts_the_same(vocab: int, processor: str, tmp_path: Path) -> None:
    """But for ids at the very border of top_p, whose sums are added in another order."""
    if processor != "native" and platform.machine() != "x86_64":
        pytest.skip("the name is x86's")
    kernel = open_draw(built(SOURCE, tmp_path, processor))
    compared = 0
    for seed in range(30):
        draws = replace(random_draws(8, seed), cuts=random_cuts(8, vocab, seed))
        logits = random_logits(8, vocab, seed)
        both = (truncate(logits, part) for part in (draws, nudged(draws)))
        for row, (expected, nearly) in enumerate(zip(*both, strict=True)):
            if draws.temperatures[row] > 0 and torch.equal(expected, nearly):
                assert torch.equal(kernel.truncate(logits[row], draws, row), expected)
                compared += 1
    assert compared > 150


def nudged(draws: Draws) -> Draws:
    """What is cut alike by this is cut away from a border."""
    cuts = draws.cuts.copy()
    cuts[:, 1] *= np.where(cuts[:, 1] < 1, 1 - 1e-5, 1)
    return replace(draws, cuts=cuts)


@needs_compiler
def test_rows_that_are_cut_are_drawn_alike(kernel: DrawKernel) -> None:
    for seed in range(5):
        draws = replace(random_draws(8, seed), cuts=random_cuts(8, 3000, seed))
        logits = torch.randn(8, 3000, generator=torch.Generator().manual_seed(seed)) * 4
        expected = gumbel.draw(truncate(logits, draws), draws)
        assert torch.equal(kernel.draw(logits, draws), expected)


@needs_compiler
def test_a_column_of_a_wider_tensor_is_drawn_from_alone(kernel: DrawKernel) -> None:
    draws, logits = random_draws(6, 2), random_logits(6, 300, 2)
    assert torch.equal(kernel.draw(logits[:, :100], draws), gumbel.draw(logits[:, :100], draws))


def test_without_a_compiler_torch_draws_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    draws, logits = random_draws(6, 3), random_logits(6, 300, 3)
    expected = sampler.draw_tokens(logits, draws)
    monkeypatch.setattr(native, "SOURCE", replace(SOURCE, compilers=("no-such-compiler",)))
    native.host_draw.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                assert torch.equal(sampler.draw_tokens(logits, draws), expected)
    finally:
        native.host_draw.cache_clear()
    (line,) = caplog.messages
    assert "tokens are drawn in torch's operations" in line and "install no-such-compiler" in line


# --- the distribution ---------------------------------------------------------------------------

DRAWS = 1_000_000


def many(first: int, count: int, column: int) -> Draws:
    """Keys that differ in one column only."""
    keys = np.full((count, 4), 5, dtype=np.uint32)
    keys[:, column] = np.arange(first, first + count)
    temperatures = np.full(count, 0.8, dtype=np.float32)
    return Draws(keys=keys, temperatures=temperatures, cuts=no_cuts(count))


def drawn(logits: torch.Tensor, column: int) -> torch.Tensor:
    step = 50_000
    parts = [
        sampler.draw_tokens(logits.expand(step, -1), many(first, step, column))
        for first in range(0, DRAWS, step)
    ]
    return torch.cat(parts)


def chi_square_limit(cells: int) -> float:
    """Exceeded by chance once in 10,000 times (Wilson and Hilferty, 1931)."""
    freedom = cells - 1
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + 3.72 * math.sqrt(spread)) ** 3


@needs_compiler
@pytest.mark.parametrize(
    ("vocab", "column"),
    [(150, 0), (150, 3), (2, 0), (2, 1), (2, 2), (2, 3)],
    ids=str,
)
def test_a_million_draws_follow_softmax(vocab: int, column: int) -> None:
    """Of as many seeds (their low and high words), choices or indices."""
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(4))
    expected = DRAWS * torch.softmax(logits[0].double() / 0.8, dim=0)
    counts = torch.bincount(drawn(logits, column), minlength=vocab)
    assert float(expected.min()) > 20
    assert float(((counts - expected) ** 2 / expected).sum()) < chi_square_limit(vocab)


@needs_compiler
def test_neighbours_in_a_stream_are_independent() -> None:
    logits = torch.tensor([[0.0, 0.5, -0.5, 0.2]])
    tokens = drawn(logits, 3)
    pairs = torch.bincount(tokens[0::2] * 4 + tokens[1::2], minlength=16)
    chances = torch.softmax(logits[0].double() / 0.8, dim=0)
    expected = DRAWS / 2 * (chances[:, None] * chances).flatten()
    assert float(((pairs - expected) ** 2 / expected).sum()) < chi_square_limit(16)
