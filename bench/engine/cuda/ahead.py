"""Steps launched behind the one that runs, beside single ones: decode steps, whose tokens are not
known yet, and the chunks of a prompt.

    python -m bench.engine.cuda.ahead [--device cuda]

measures the chunks: the whole prompt, and how long the device waits meanwhile.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from transformers import LlamaConfig

from bench.engine.cuda.kernel_times import StreamTimes, kernel_times
from bench.engine.cuda.random_engine import (
    LLAMA_8B,
    TINY,
    device_name,
    random_engine,
    whole_slice,
)
from bench.report import Reading, Row, interleave, print_table
from engine.core.step import StepBatch
from engine.runner import Engine
from engine.step_comparison import run_apart, run_behind

_STEPS, _WARM, _REPEATS = 50, 5, 5
BEHIND, APART = "launched behind one another", "one at a time"


def ahead_row(engine: Engine, batch: StepBatch, name: str, method: str) -> Row:
    """Every step at the same positions: only its tokens come from the one before."""
    slices = tuple(replace(piece, follows=i) for i, piece in enumerate(batch.slices))
    behind = StepBatch(slices=slices)
    single_s = _step_s(lambda steps: run_apart(engine, [batch] * steps))
    ahead_s = _step_s(lambda steps: run_behind(engine, [batch, *[behind] * (steps - 1)]))
    return Row(
        name=f"decode step launched ahead, {name}",
        value=1e3 * ahead_s,
        unit="ms",
        against="single steps",
        against_value=1e3 * single_s,
        lower_is_better=True,
        method=method,
        spread=f"mean of {_STEPS} in a row",
    )


def _step_s(run: Callable[[int], None]) -> float:
    run(_WARM)
    begin = time.perf_counter()
    run(_STEPS)
    return (time.perf_counter() - begin) / _STEPS


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """`chunks` of `chunk_tokens` tokens each."""

    config: LlamaConfig = field(default_factory=lambda: LLAMA_8B)
    chunks: int = 8
    chunk_tokens: int = 2048

    @property
    def tokens(self) -> int:
        return self.chunks * self.chunk_tokens

    def steps(self, engine: Engine) -> list[StepBatch]:
        """Only the last one draws a token."""
        blocks = range(engine.layout.blocks_for(self.tokens))
        ids = tuple(torch.randint(2, engine.facts.vocab_size, (self.chunk_tokens,)).tolist())
        pieces = [whole_slice(0, ids, start, blocks) for start in range(0, self.tokens, len(ids))]
        pieces[:-1] = [replace(piece, samples=()) for piece in pieces[:-1]]
        return [StepBatch(slices=(piece,)) for piece in pieces]


def chunk_rows(engine: Engine, prompt: Prompt, method: str) -> list[Row]:
    steps = prompt.steps(engine)
    runs = {BEHIND: partial(run_behind, engine, steps), APART: partial(run_apart, engine, steps)}
    for run in runs.values():
        run()
    taken = interleave({name: partial(_run_s, run) for name, run in runs.items()}, repeats=_REPEATS)
    idle = {name: _seen(run) for name, run in runs.items()}
    return [_whole_row(prompt, taken, method), _idle_row(prompt, idle, method)]


def _run_s(run: Callable[[], None]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _seen(run: Callable[[], None]) -> StreamTimes:
    """The profiler looks at a run of its own: it costs time."""
    times: list[StreamTimes] = []
    with kernel_times(times):
        run()
    return times[0]


def _whole_row(prompt: Prompt, taken: dict[str, Reading], method: str) -> Row:
    return Row(
        name=f"prompt of {prompt.tokens:,} tokens, {BEHIND}",
        value=1e3 * taken[BEHIND].median,
        unit="ms",
        against=APART,
        against_value=1e3 * taken[APART].median,
        goal=1.0,
        lower_is_better=True,
        method=method,
        spread=f"{taken[BEHIND].spread()} s; {APART} {taken[APART].spread()} s",
    )


def _idle_row(prompt: Prompt, seen: dict[str, StreamTimes], method: str) -> Row:
    """Of all time from the first kernel to the last, also that within chunks."""
    return Row(
        name=f"device idle for each chunk of {prompt.chunk_tokens:,} tokens, {BEHIND}",
        value=1e3 * seen[BEHIND].idle_s / prompt.chunks,
        unit="ms",
        against=APART,
        against_value=1e3 * seen[APART].idle_s / prompt.chunks,
        lower_is_better=True,
        method=method,
        spread="; ".join(f"{name}: {times}" for name, times in seen.items()),
    )


def measure_chunks(device: str, prompt: Prompt) -> Sequence[Row]:
    engine, chosen = random_engine(
        device,
        tokens=prompt.tokens,
        batch=1,
        backend="auto",
        graphs=False,
        config=prompt.config,
    )
    method = f"random Llama, bf16, {device_name(device)}, attention {chosen}"
    return chunk_rows(engine, prompt, method)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model, short chunks")
    args = parser.parse_args()
    small = Prompt(config=TINY, chunks=4, chunk_tokens=16)
    print_table("Chunks", measure_chunks(args.device, small if args.rehearse else Prompt()))


if __name__ == "__main__":
    main()
