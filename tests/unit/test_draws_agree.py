"""The same seed draws the same tokens when sums are added in another order, nearly always."""

from __future__ import annotations

import pytest
import torch

from bench.engine import sampler as bench
from bench.engine.sampler import KINDS, differing, differing_by_inverse_cdf, logits_twice
from bench.kvpool.codec_loss import Load, bundled_prompts

POSITIONS = Load(prompts=4, prompt_tokens=256, output_tokens=0)
SEEDS = range(5)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_in_bf16_few_tokens_differ(kind: str) -> None:
    both = logits_twice(bundled_prompts(POSITIONS), torch.bfloat16)
    assert not torch.equal(both.one, both.another_order)
    found = differing(both.one, both.another_order, KINDS[kind], SEEDS)
    by_inverse_cdf = differing_by_inverse_cdf(both.one, both.another_order, KINDS[kind], SEEDS[:1])
    print(f"{kind}: {found:.2%} differ, by an inverse CDF {by_inverse_cdf:.2%}")
    assert found <= bench.LIMIT_BF16
    assert by_inverse_cdf > 3 * bench.LIMIT_BF16


def test_in_fp32_at_most_one_in_100_000_differs() -> None:
    both = logits_twice(bundled_prompts(POSITIONS), torch.float32)
    assert not torch.equal(both.one, both.another_order)
    seeds = range(200)
    found = differing(both.one, both.another_order, KINDS["temperature 1"], seeds)
    assert found * POSITIONS.prompts * POSITIONS.prompt_tokens * len(seeds) <= 2
    assert found <= bench.LIMIT_FP32


@pytest.mark.parametrize("kind", sorted(bench.KINDS | bench.OTHER_KINDS))
def test_the_cost_of_a_row_is_measured(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "ROWS", 2)
    monkeypatch.setattr(bench, "_REPEATS", 1)
    (row,) = [one for one in bench.time_rows() if one.name.endswith(kind)]
    assert row.value > 0
