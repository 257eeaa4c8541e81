"""How few sampled tokens another order of summation changes, and what a draw costs.

Transformers runs the bundled model over the same text twice, the second time with its hidden and
inner dimensions permuted, which changes no sum but the order it is added in, or with its other
attention. Each position then draws one token from either logits, with the same seed. Beside it
stands what one uniform number and the inverse CDF would change.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
from transformers import AutoModelForCausalLM

from bench.engine.agreement import OTHER, reordered
from bench.kvpool.codec_loss import Load, bundled_prompts
from bench.report import Row, print_table, write_json
from engine.bundled import checkpoint_path
from engine.core.step import SampleRequest
from engine.sampling import gumbel
from engine.sampling.parameters import draws_of
from engine.sampling.sampler import sample
from kvrelay.types import Sampling

LIMIT_BF16 = 0.015
LIMIT_FP32 = 1e-5
LIMIT_MS = 0.1
VOCAB, ROWS = 32_000, 64
KINDS = {
    "temperature 1": Sampling(max_tokens=1, seed=0, temperature=1.0),
    "temperature 0.7, top_p 0.9": Sampling(max_tokens=1, seed=0, temperature=0.7, top_p=0.9),
}
_REPEATS = 9
OTHER_KINDS = {
    "temperature 1, top_k 50": Sampling(max_tokens=1, seed=0, temperature=1.0, top_k=50),
    "temperature 1, min_p 0.05": Sampling(max_tokens=1, seed=0, temperature=1.0, min_p=0.05),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Twice:
    """The same positions' logits, fp32 `[positions, vocab]`, with sums in different orders."""

    one: torch.Tensor
    another_order: torch.Tensor
    another_attention: torch.Tensor


@torch.inference_mode()
def logits_twice(prompts: torch.Tensor, dtype: torch.dtype, attention: str = "eager") -> Twice:
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint_path(), dtype=dtype, attn_implementation=attention
    ).eval()
    one, another_order = (_logits(part, prompts) for part in (model, reordered(model)))
    model.set_attn_implementation(OTHER[attention])
    return Twice(one=one, another_order=another_order, another_attention=_logits(model, prompts))


def _logits(model: torch.nn.Module, prompts: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=prompts).logits
    return logits.float().flatten(0, 1)


def differing(
    one: torch.Tensor, other: torch.Tensor, sampling: Sampling, seeds: Sequence[int]
) -> float:
    """The share of draws that give another token; position i is token index i."""
    found = [(_draw(one, sampling, s) != _draw(other, sampling, s)).double().mean() for s in seeds]
    return float(torch.stack(found).mean())


def _draw(logits: torch.Tensor, sampling: Sampling, seed: int) -> torch.Tensor:
    drawn = sample(logits, [(request(sampling, seed),)] * len(logits), range(len(logits)))
    return torch.tensor([one.token_id for (one,) in drawn])


def request(sampling: Sampling, seed: int) -> SampleRequest:
    seeded = replace(sampling, seed=seed)
    return SampleRequest(sampling=seeded, choice=0, prompt_ids=(), emitted_ids=())


def differing_by_inverse_cdf(
    one: torch.Tensor, other: torch.Tensor, sampling: Sampling, seeds: Sequence[int]
) -> float:
    found = []
    for seed in seeds:
        uniforms = torch.rand(len(one), generator=torch.Generator().manual_seed(seed))
        drawn = [_inverse_cdf(logits, sampling, uniforms) for logits in (one, other)]
        found.append((drawn[0] != drawn[1]).double().mean())
    return float(torch.stack(found).mean())


def _inverse_cdf(logits: torch.Tensor, sampling: Sampling, uniforms: torch.Tensor) -> torch.Tensor:
    """Most likely first."""
    ranked, ids = torch.softmax(logits / sampling.temperature, dim=-1).sort(
        dim=-1, descending=True, stable=True
    )
    totals = ranked.cumsum(dim=-1)
    kept = (totals - ranked < sampling.top_p).sum(dim=-1, keepdim=True)
    target = uniforms[:, None] * totals.gather(1, kept - 1)
    return ids.gather(1, (totals <= target).sum(dim=-1, keepdim=True).minimum(kept - 1))[:, 0]


def agreement_rows(prompts: torch.Tensor, seeds: Sequence[int], attention: str) -> Iterator[Row]:
    both = logits_twice(prompts, torch.bfloat16, attention)
    method = f"bundled model, bf16, {prompts.numel()} positions, {len(seeds)} seeds"
    for kind, sampling in KINDS.items():
        for what, other in (("order", both.another_order), ("attention", both.another_attention)):
            peer = differing_by_inverse_cdf(both.one, other, sampling, seeds)
            yield Row(
                name=f"bf16, {kind}: tokens that differ with another {what}",
                value=100 * differing(both.one, other, sampling, seeds),
                unit="%",
                against="the limit" if what == "order" else "",
                against_value=100 * LIMIT_BF16 if what == "order" else None,
                goal=1.0 if what == "order" else None,
                lower_is_better=True,
                method=f"{method}; by an inverse CDF {peer:.2%}",
            )
    greedy = (both.one.argmax(-1) != both.another_order.argmax(-1)).double().mean()
    yield Row(
        name="bf16, greedy: tokens that differ with another order",
        value=100 * float(greedy),
        unit="%",
        method=method,
    )


def exact_row(prompts: torch.Tensor, seeds: Sequence[int], attention: str) -> Row:
    both = logits_twice(prompts, torch.float32, attention)
    share = differing(both.one, both.another_order, KINDS["temperature 1"], seeds)
    return Row(
        name="fp32, temperature 1: draws in 100,000 that differ with another order",
        value=1e5 * share,
        unit="",
        against="the limit",
        against_value=1e5 * LIMIT_FP32,
        goal=1.0,
        lower_is_better=True,
        method=f"bundled model, fp32, {prompts.numel()} positions, {len(seeds)} seeds",
    )


def time_rows() -> Iterator[Row]:
    torch.manual_seed(0)
    logits = torch.randn(ROWS, VOCAB) * 3
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for kind, sampling in {**KINDS, **OTHER_KINDS}.items():
            wanted = [(request(sampling, 0),)] * ROWS
            yield _time_row(kind, lambda wanted=wanted: sample(logits, wanted, range(ROWS)))
        draws = draws_of([request(KINDS["temperature 1"], 0)] * ROWS, range(ROWS))
        yield _time_row("temperature 1, no compiler", lambda: gumbel.draw(logits, draws))
    finally:
        torch.set_num_threads(threads)


def _time_row(kind: str, run: Callable[[], object]) -> Row:
    return Row(
        name=f"a row of {VOCAB:,} logits, {kind}",
        value=1e3 * _thread_s(run) / ROWS,
        unit="ms",
        against="the limit",
        against_value=LIMIT_MS,
        goal=1.0,
        lower_is_better=True,
        method=f"CPU time of one thread, {ROWS} rows of normal logits x 3, median of {_REPEATS}",
    )


def _thread_s(run: Callable[[], object]) -> float:
    run()
    found = []
    for _ in range(_REPEATS):
        began_s = time.thread_time()
        run()
        found.append(time.thread_time() - began_s)
    return median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--seeds", type=int, default=20, help="in bf16")
    parser.add_argument("--exact-seeds", type=int, default=1000, help="in fp32")
    parser.add_argument(
        "--reference", choices=OTHER, default="eager", help="transformers' attention"
    )
    args = parser.parse_args()
    prompts = bundled_prompts(Load(prompts=4, prompt_tokens=256, output_tokens=0))
    table = [
        *agreement_rows(prompts, range(args.seeds), args.reference),
        exact_row(prompts, range(args.exact_seeds), args.reference),
        *time_rows(),
    ]
    print_table("Draws", table)
    if args.json:
        write_json(args.json, table)


if __name__ == "__main__":
    main()
