"""Steps of one model on one rank with two threads, against two ranks with one thread each.

A random Llama with the KV of Llama-3.1-8B and a twentieth of its parameters, bf16, on CPU.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.engine.ranks import telling
from bench.models import KV_OF_8B, write_random_llama
from bench.report import Reading, Row, interleave, print_table, write_json
from engine.core.fitting import Shape
from engine.core.sizing import EngineLimits
from engine.device.threads import use_threads
from engine.load import load_engine
from engine.load_ranks import load_split
from engine.model.checkpoint import open_checkpoint
from engine.parallel.grid import Grid
from engine.runner import Engine
from engine.time_profile import time_shape

_CONTEXT = 512
_SHAPES = {
    "prefill of 512 tokens": Shape(rows=1, tokens=512),
    "decode step of 1": Shape(rows=1, tokens=1, context=_CONTEXT),
    "decode step of 16": Shape(rows=16, tokens=1, context=_CONTEXT),
}
_STEPS = 8
_TOLD_CONTEXTS = (512, 4096)


def engines(folder: Path) -> dict[str, Engine]:
    limits = EngineLimits(max_model_len=1024, prefill_chunk_tokens=512, max_running_requests=16)
    checkpoint = open_checkpoint(str(folder))
    common = {"device": "cpu", "dtype": "bfloat16", "block_size": 16, "blocks": 16 * 40}
    use_threads(1)
    two = load_split(checkpoint, Grid(tensor=2), threads=1, limits=limits, **common)  # type: ignore[arg-type]
    use_threads(2)
    one = load_engine(checkpoint, limits=limits, **common)  # type: ignore[arg-type]
    return {"one": one, "two": two}


def step_ms(engine: Engine, threads: int, shape: Shape) -> float:
    use_threads(threads)
    return 1e3 * statistics.median(time_shape(engine, shape) for _ in range(_STEPS))


def measure(repeats: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as name:
        found = engines(write_random_llama(Path(name), KV_OF_8B))
        runs: dict[str, Callable[[], float]] = {
            f"{key}: {label}": partial(step_ms, engine, 2 if key == "one" else 1, shape)
            for label, shape in _SHAPES.items()
            for key, engine in found.items()
        }
        readings = interleave(runs, repeats=repeats)
        for engine in found.values():
            engine.close()
    return [_row(label, readings) for label in _SHAPES]


def _row(label: str, readings: dict[str, Reading]) -> Row:
    two, one = readings[f"two: {label}"], readings[f"one: {label}"]
    return Row(
        name=f"{label}, two ranks of a thread",
        value=two.median,
        unit="ms",
        against="one rank of two threads",
        against_value=one.median,
        lower_is_better=True,
        method=f"contexts of {_CONTEXT} tokens, median of {_STEPS} steps",
        spread=two.spread(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    rows = [*map(telling.measure, _TOLD_CONTEXTS), *measure(args.repeats)]
    print_table("Parallel", rows)
    if args.json:
        write_json(args.json, rows)


if __name__ == "__main__":
    main()
