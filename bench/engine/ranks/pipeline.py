"""A long prompt in chunks, on two stages: on a CPU of one thread each, against one process of two
threads; on CUDA of a GPU each, against one GPU.

Beside them two ranks that share heads, and two stages of which each chunk waits for the one before,
as without `launch`. A random Llama with the KV of Llama-3.1-8B and a twentieth of its parameters,
bf16. With `n` chunks and two stages alike a pipeline takes (n + 1) / n of its busy time.
"""

from __future__ import annotations

import tempfile
import time
from argparse import Namespace
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from transformers import LlamaConfig

from bench.engine.cuda.random_engine import TINY, device_name
from bench.engine.ranks.asked import arguments
from bench.models import KV_OF_8B, write_random_llama
from bench.report import Reading, Row, interleave, print_table, write_json
from engine.core.sizing import EngineLimits
from engine.core.step import SampleRequest, SequenceSlice, StepBatch
from engine.device.threads import use_threads
from engine.flight import Launched
from engine.load import load_engine
from engine.load_ranks import load_split
from engine.model.checkpoint import open_checkpoint
from engine.parallel.grid import Grid
from engine.runner import Engine
from kvpool.core.layout.layout import BlockId
from kvrelay.types import RequestKey, Sampling

_BLOCK = 16
_STAGES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A prompt of `tokens` in `chunks`."""

    config: LlamaConfig = field(default_factory=lambda: KV_OF_8B)
    tokens: int = 2048
    chunks: int = 8

    @property
    def chunk(self) -> int:
        return self.tokens // self.chunks


def sizes(args: Namespace) -> Sizes:
    """As `asked.arguments` has them."""
    if args.rehearse:
        return Sizes(config=TINY, tokens=64, chunks=4)
    return Sizes(tokens=16_384) if args.device == "cuda" else Sizes()


def engines(folder: Path, device: str, sizes: Sizes) -> dict[str, Engine]:
    limits = EngineLimits(
        max_model_len=sizes.tokens, prefill_chunk_tokens=sizes.chunk, max_running_requests=4
    )
    checkpoint = open_checkpoint(str(folder))
    common = {"device": device, "dtype": "bfloat16", "block_size": _BLOCK, "limits": limits}
    common["blocks"] = 2 * sizes.tokens // _BLOCK
    use_threads(1)
    stages = load_split(checkpoint, Grid(stages=_STAGES), threads=1, **common)  # type: ignore[arg-type]
    ranks = load_split(checkpoint, Grid(tensor=2), threads=1, **common)  # type: ignore[arg-type]
    use_threads(2)
    one = load_engine(checkpoint, **common)  # type: ignore[arg-type]
    return {"stages": stages, "ranks": ranks, "one": one}


def chunks(sizes: Sizes) -> Iterator[StepBatch]:
    table = tuple(BlockId(i) for i in range(sizes.tokens // _BLOCK))
    request = SampleRequest(
        sampling=Sampling(max_tokens=1, seed=0), choice=0, prompt_ids=(), emitted_ids=()
    )
    for start in range(0, sizes.tokens, sizes.chunk):
        yield StepBatch(
            slices=(
                SequenceSlice(
                    key=RequestKey("bench", 0),
                    choice=0,
                    token_ids=(7,) * sizes.chunk,
                    start=start,
                    tables=(table,),
                    samples=(request,) if start + sizes.chunk == sizes.tokens else (),
                    prompt_tokens=sizes.tokens,
                ),
            )
        )


def prompt_s(engine: Engine, threads: int, sizes: Sizes, *, ahead: int) -> float:
    """At most `ahead` chunks are launched behind the one that is collected."""
    use_threads(threads)
    started_s, launched = time.perf_counter(), deque[Launched]()
    for batch in chunks(sizes):
        launched.append(engine.launch(batch))
        if len(launched) > ahead:
            launched.popleft().collect()
    for step in launched:
        step.collect()
    return time.perf_counter() - started_s


def measure(device: str, sizes: Sizes, repeats: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as name:
        found = engines(write_random_llama(Path(name), sizes.config), device, sizes)
        readings = interleave(
            {
                "two stages": partial(prompt_s, found["stages"], 1, sizes, ahead=1),
                "two stages, one chunk at a time": partial(
                    prompt_s, found["stages"], 1, sizes, ahead=0
                ),
                "two ranks": partial(prompt_s, found["ranks"], 1, sizes, ahead=0),
                "one": partial(prompt_s, found["one"], 2, sizes, ahead=0),
            },
            repeats=repeats,
        )
        for engine in found.values():
            engine.close()
    one = readings.pop("one")
    return [_row(label, reading, one, device, sizes) for label, reading in readings.items()]


def _row(label: str, reading: Reading, one: Reading, device: str, sizes: Sizes) -> Row:
    """Two GPUs have twice what one has, two processes of a thread what one of two has."""
    filled = (sizes.chunks + _STAGES - 1) / sizes.chunks
    each, alone = ("a thread", "two threads") if device == "cpu" else ("a GPU", "one GPU")
    return Row(
        name=f"prompt of {sizes.tokens} tokens, {label} ({each} each)",
        value=reading.median,
        unit="s",
        against=f"one process of {alone}",
        against_value=one.median,
        goal=(filled if device == "cpu" else filled / 2) if label == "two stages" else None,
        lower_is_better=True,
        method=f"{device_name(device)}, chunks of {sizes.chunk} tokens; the goal is the bubble's",
        spread=reading.spread(),
    )


def main() -> None:
    args = arguments(__doc__)
    if args is None:
        return
    rows = measure(args.device, sizes(args), args.repeats)
    print_table("Pipeline", rows)
    if args.json:
        write_json(args.json, rows)


if __name__ == "__main__":
    main()
