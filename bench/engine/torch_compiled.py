"""A single stream of our engine in turn with transformers under `torch.compile`.

The peer is transformers' own model over its static cache, compiled with frozen weights, which
inductor packs for oneDNN: each of its steps is one call of the compiled graph. Greedy, one process.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StaticCache

from bench.engine.speed import EngineRun, Load, load_bench_engine
from bench.models import SMOLLM_135M, write_random_llama
from bench.report import Row, interleave, print_table, write_json
from engine.runner import Engine

FIRST = Load(requests=1, prompt_tokens=512, output_tokens=1, chunk_tokens=512)
STREAM = Load(requests=1, prompt_tokens=512, output_tokens=65, chunk_tokens=512)
STEPS = STREAM.output_tokens - FIRST.output_tokens
_SAME = 4
"""Tokens: later ones may part ways at a near-tie, in bf16."""


class Compiled:
    """Of `STREAM`'s prompt."""

    def __init__(self, folder: Path) -> None:
        """Compiles; raises RuntimeError where that changes tokens."""
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        longest = STREAM.prompt_tokens + STREAM.output_tokens
        self._cache = StaticCache(config=self._model.config, max_cache_len=longest)
        self._prompt = STREAM.prompts()
        self._step = torch.compile(self._forward, options={"freezing": True})
        begun_s = time.perf_counter()
        compiled, _ = self._generate(self._step)
        self.compiling_s = time.perf_counter() - begun_s
        plain, _ = self._generate(self._forward)
        if compiled[:_SAME] != plain[:_SAME]:
            raise RuntimeError(f"compiled {compiled[:_SAME]}, else {plain[:_SAME]}")

    def step_ms(self) -> float:
        return self._generate(self._step)[1]

    @torch.no_grad()
    def _generate(self, step: Callable[..., torch.Tensor]) -> tuple[list[int], float]:
        """Its tokens, and milliseconds for each."""
        self._cache.reset()
        tokens = [self._forward(self._prompt, torch.arange(STREAM.prompt_tokens)[None])]
        begun_s = time.perf_counter()
        for place in range(STREAM.prompt_tokens, STREAM.prompt_tokens + STEPS):
            tokens.append(step(tokens[-1], torch.tensor([[place]])))
        return [int(token) for token in tokens], 1000 * (time.perf_counter() - begun_s) / STEPS

    def _forward(self, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        logits = self._model(
            input_ids=ids, position_ids=places, past_key_values=self._cache, logits_to_keep=1
        ).logits
        token: torch.Tensor = logits[:, -1:].argmax(-1)
        return token


def _ours_ms(engine: Engine) -> float:
    def seconds(load: Load) -> float:
        run, begun_s = EngineRun(engine, load), time.perf_counter()
        run.generate()
        return time.perf_counter() - begun_s

    return 1000 * (seconds(STREAM) - seconds(FIRST)) / STEPS


def measure(threads: int, repeats: int) -> Row:
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as name:
        folder = write_random_llama(Path(name), SMOLLM_135M)
        engine, compiled = load_bench_engine(folder, STREAM, "cpu"), Compiled(folder)
        found = interleave(
            {"ours": lambda: _ours_ms(engine), "compiled": compiled.step_ms}, repeats=repeats
        )
    return Row(
        name="time per token of a single stream, 512 in",
        value=found["ours"].median,
        unit="ms",
        against="transformers, torch.compile, frozen",
        against_value=found["compiled"].median,
        goal=1.0,
        lower_is_better=True,
        method=f"random Llama of SmolLM-135M's shape, untied, bf16, {threads} threads; ours is "
        f"the difference between {STREAM.output_tokens} tokens and one, its steps alone; compiling "
        f"took {compiled.compiling_s:.0f} s, its first steps included",
        spread=f"{found['ours'].spread()}; peer {found['compiled'].spread()}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    rows = [measure(args.threads, args.repeats)]
    print_table("A single stream beside torch.compile", rows)
    if args.json:
        write_json(args.json, rows)


if __name__ == "__main__":
    main()
