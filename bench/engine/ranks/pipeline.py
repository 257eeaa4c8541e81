"""A long prompt in chunks: two stages of one thread each, against one process of two threads.

Beside them two ranks that share heads, and two stages of which each chunk waits for the one before,
as without `launch`. A random Llama with the KV of Llama-3.1-8B and a twentieth of its parameters,
bf16, on CPU. With `n` chunks and two stages alike a pipeline takes (n + 1) / n of its busy time.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path

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

_TOKENS, _CHUNK = 2048, 256
_CHUNKS = _TOKENS // _CHUNK
_BLOCK = 16


def engines(folder: Path) -> dict[str, Engine]:
    limits = EngineLimits(
        max_model_len=_TOKENS, prefill_chunk_tokens=_CHUNK, max_running_requests=4
    )
    checkpoint = open_checkpoint(str(folder))
    common = {"device": "cpu", "dtype": "bfloat16", "block_size": _BLOCK, "limits": limits}
    common["blocks"] = 2 * _TOKENS // _BLOCK
    use_threads(1)
    stages = load_split(checkpoint, Grid(stages=2), threads=1, **common)  # type: ignore[arg-type]
    ranks = load_split(checkpoint, Grid(tensor=2), threads=1, **common)  # type: ignore[arg-type]
    use_threads(2)
    one = load_engine(checkpoint, **common)  # type: ignore[arg-type]
    return {"stages": stages, "ranks": ranks, "one": one}


def chunks() -> Iterator[StepBatch]:
    table = tuple(BlockId(i) for i in range(_TOKENS // _BLOCK))
    request = SampleRequest(
        sampling=Sampling(max_tokens=1, seed=0), choice=0, index=0, prompt_ids=(), emitted_ids=()
    )
    for start in range(0, _TOKENS, _CHUNK):
        yield StepBatch(
            slices=(
                SequenceSlice(
                    key=RequestKey("bench", 0),
                    choice=0,
                    token_ids=(7,) * _CHUNK,
                    start=start,
                    tables=(table,),
                    samples=(request,) if start + _CHUNK == _TOKENS else (),
                    prompt_tokens=_TOKENS,
                ),
            )
        )


def prompt_s(engine: Engine, threads: int, *, ahead: int) -> float:
    """At most `ahead` chunks are launched behind the one that is collected."""
    use_threads(threads)
    started_s, launched = time.perf_counter(), deque[Launched]()
    for batch in chunks():
        launched.append(engine.launch(batch))
        if len(launched) > ahead:
            launched.popleft().collect()
    for step in launched:
        step.collect()
    return time.perf_counter() - started_s


def measure(repeats: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as name:
        found = engines(write_random_llama(Path(name), KV_OF_8B))
        readings = interleave(
            {
                "two stages": partial(prompt_s, found["stages"], 1, ahead=1),
                "two stages, one chunk at a time": partial(prompt_s, found["stages"], 1, ahead=0),
                "two ranks": partial(prompt_s, found["ranks"], 1, ahead=0),
                "one": partial(prompt_s, found["one"], 2, ahead=0),
            },
            repeats=repeats,
        )
        for engine in found.values():
            engine.close()
    one = readings.pop("one")
    return [_row(label, reading, one) for label, reading in readings.items()]


def _row(label: str, reading: Reading, one: Reading) -> Row:
    return Row(
        name=f"prompt of {_TOKENS} tokens, {label}",
        value=reading.median,
        unit="s",
        against="one process of two threads",
        against_value=one.median,
        goal=(_CHUNKS + 1) / _CHUNKS if label == "two stages" else None,
        lower_is_better=True,
        method=f"chunks of {_CHUNK} tokens, each process of a thread; the goal is the bubble's",
        spread=reading.spread(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    rows = measure(args.repeats)
    print_table("Pipeline", rows)
    if args.json:
        write_json(args.json, rows)


if __name__ == "__main__":
    main()
