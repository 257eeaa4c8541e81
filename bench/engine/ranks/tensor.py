"""Steps of one model on one rank, against two ranks: on a CPU with two threads against one thread
each, on CUDA with a GPU each, decode steps recorded.

A random Llama with the KV of Llama-3.1-8B and a twentieth of its parameters, bf16.
"""

from __future__ import annotations

import statistics
import tempfile
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from transformers import LlamaConfig

from bench.engine.cuda.random_engine import TINY, device_name
from bench.engine.ranks import telling
from bench.engine.ranks.asked import RANKS, arguments
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

_STEPS = 8
_TOLD_CONTEXTS = (512, 4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    config: LlamaConfig = field(default_factory=lambda: KV_OF_8B)
    context: int = 512
    rows: int = 16

    @property
    def shapes(self) -> dict[str, Shape]:
        return {
            f"prefill of {self.context} tokens": Shape(rows=1, tokens=self.context),
            "decode step of 1": Shape(rows=1, tokens=1, context=self.context),
            f"decode step of {self.rows}": Shape(rows=self.rows, tokens=1, context=self.context),
        }


def sizes(args: Namespace) -> Sizes:
    """As `asked.arguments` has them."""
    return Sizes(config=TINY, context=32, rows=4) if args.rehearse else Sizes()


def engines(folder: Path, device: str, sizes: Sizes) -> dict[str, Engine]:
    limits = EngineLimits(
        max_model_len=2 * sizes.context,
        prefill_chunk_tokens=sizes.context,
        max_running_requests=sizes.rows,
    )
    checkpoint = open_checkpoint(str(folder))
    common = {"device": device, "dtype": "bfloat16", "block_size": 16}
    common["blocks"] = sizes.rows * (sizes.context // 16 + 8)
    use_threads(1)
    two = load_split(checkpoint, Grid(tensor=RANKS), threads=1, limits=limits, **common)  # type: ignore[arg-type]
    use_threads(2)
    one = load_engine(checkpoint, limits=limits, **common)  # type: ignore[arg-type]
    return {"one": one, "two": two}


def step_ms(engine: Engine, threads: int, shape: Shape) -> float:
    use_threads(threads)
    return 1e3 * statistics.median(time_shape(engine, shape) for _ in range(_STEPS))


def measure(device: str, sizes: Sizes, repeats: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as name:
        found = engines(write_random_llama(Path(name), sizes.config), device, sizes)
        runs: dict[str, Callable[[], float]] = {
            f"{key}: {label}": partial(step_ms, engine, 2 if key == "one" else 1, shape)
            for label, shape in sizes.shapes.items()
            for key, engine in found.items()
        }
        readings = interleave(runs, repeats=repeats)
        for engine in found.values():
            engine.close()
    method = f"{device_name(device)}, contexts of {sizes.context} tokens, median of {_STEPS} steps"
    what = ("a thread", "two threads") if device == "cpu" else ("a GPU each", "one GPU")
    return [_row(label, readings, what, method) for label in sizes.shapes]


def _row(label: str, readings: dict[str, Reading], what: tuple[str, str], method: str) -> Row:
    """`what` each of two ranks has, and one alone."""
    two, one = readings[f"two: {label}"], readings[f"one: {label}"]
    return Row(
        name=f"{label}, two ranks of {what[0]}",
        value=two.median,
        unit="ms",
        against=f"one rank of {what[1]}",
        against_value=one.median,
        lower_is_better=True,
        method=method,
        spread=two.spread(),
    )


def main() -> None:
    args = arguments(__doc__)
    if args is None:
        return
    rows = [*map(telling.measure, _TOLD_CONTEXTS), *measure(args.device, sizes(args), args.repeats)]
    print_table("Parallel", rows)
    if args.json:
        write_json(args.json, rows)


if __name__ == "__main__":
    main()
