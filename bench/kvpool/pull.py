"""KV of a prefix that lies on another worker: fetched, against computed again.

    python -m bench.kvpool.pull [--device cuda] [--tokens 2000 8000 16000 48000]

Fetched: as workers read each other's pools where they can, piece by piece, between two processes of
this machine (`bench.transfer`). Computed: in chunks, alone on the device, by a random model with
that KV; on CUDA of Llama-3.1-8B's shape in bf16. All are timed in turn, and medians compared.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from bench.engine.cuda.random_engine import LLAMA_8B, random_engine, whole_slice
from bench.models import KV_OF_8B
from bench.report import Reading, Row, interleave, print_table, write_json
from bench.transfer.link import link
from bench.transfer.sender import Sender
from bench.transfer.shape import Shape
from engine.core.step import StepBatch
from engine.runner import Engine

TOKENS = (2000, 8000, 16_000, 48_000)
_SCHEMES = {"cpu": "shm", "cuda": "cuda_ipc"}
_GOAL = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Prefixes of up to `most` tokens, in blocks that lie in no order."""

    engine: Engine
    chunk_tokens: int
    blocks: Sequence[int]

    @classmethod
    def of(cls, device: str, layers: int, most: int, chunk_tokens: int) -> Recompute:
        config = LLAMA_8B if device == "cuda" else KV_OF_8B
        engine, _ = random_engine(
            device, tokens=most, batch=1, backend="auto", graphs=False, config=config, layers=layers
        )
        blocks = list(range(engine.layout.blocks_for(most)))
        random.Random(0).shuffle(blocks)
        return cls(engine=engine, chunk_tokens=chunk_tokens, blocks=blocks)

    def seconds(self, tokens: int) -> float:
        started_s = time.perf_counter()
        for start in range(0, tokens, self.chunk_tokens):
            count = min(self.chunk_tokens, tokens - start)
            piece = whole_slice(0, (7,) * count, start, self.blocks)
            self.engine.run(StepBatch(slices=(piece,)))
        return time.perf_counter() - started_s


def measure(
    sender: Sender, computes: Recompute, tokens: Sequence[int], repeats: int
) -> dict[str, Reading]:
    ways: dict[str, Callable[[], float]] = {}
    for count in tokens:
        ways[f"fetched {count}"] = partial(sender.direct_pieces, count)
        ways[f"computed {count}"] = partial(computes.seconds, count)
    for way in ways.values():
        way()  # what comes once: mappings, allocations, kernels
    return interleave(ways, repeats=repeats)


def rows(found: dict[str, Reading], tokens: Sequence[int], shape: Shape) -> list[Row]:
    return [
        Row(
            name=f"KV of {count} tokens, fetched",
            value=1e3 * found[f"fetched {count}"].median,
            unit="ms",
            against="computed",
            against_value=1e3 * found[f"computed {count}"].median,
            goal=_GOAL,
            lower_is_better=True,
            method=f"{shape.layers} layers, chunks of {shape.chunk_tokens} tokens, {shape.device}",
            spread=found[f"fetched {count}"].spread(),
        )
        for count in tokens
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=sorted(_SCHEMES), default="cpu")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--chunk-tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    most = max(options.tokens)
    shape = Shape(
        layers=options.layers,
        tokens=most,
        device=options.device,
        chunk_tokens=options.chunk_tokens,
    )
    with link(_SCHEMES[options.device], shape) as sender:
        computes = Recompute.of(options.device, options.layers, most, options.chunk_tokens)
        found = measure(sender, computes, options.tokens, options.repeats)
    table = rows(found, options.tokens, shape)
    print_table("Pull", table)
    if options.json:
        write_json(options.json, table)


if __name__ == "__main__":
    main()
