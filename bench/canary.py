"""What the canary costs: the step that checks one request, beside the steps that it delays.

A check holds up the decode batch for one step of its own: the prompt's last token over the KV that
arrived, with that block's copy. Its share of a request's time is the check over N requests' decode
steps.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig

from bench.models import SMOLLM_135M, write_random_llama
from bench.report import Reading, Row, interleave, print_table, write_json
from engine.bundled import checkpoint_path
from engine.canary import canary_bound
from engine.checkpoint import open_checkpoint
from engine.load import load_engine
from engine.runner import Engine
from engine.sizing import EngineLimits
from engine.step import SampleRequest, SequenceSlice, StepBatch
from kvpool.codec import Codec
from kvpool.layout import BlockId
from kvrelay.types import RequestKey, Sampling

_BLOCK = 16
_DRAW = SampleRequest(
    sampling=Sampling(max_tokens=1, seed=0), choice=0, index=0, prompt_ids=(), emitted_ids=()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """`running` sequences decode, each of `prompt_tokens` in and `output_tokens` out; of the
    requests one in `every` is checked."""

    running: int = 8
    prompt_tokens: int = 512
    output_tokens: int = 64
    every: int = 16

    @property
    def blocks(self) -> int:
        return -(-(self.prompt_tokens + 1) // _BLOCK)


class Steps:
    """The last block of each sequence has a copy behind all of them."""

    def __init__(self, engine: Engine, load: Load) -> None:
        self._engine, self._load = engine, load

    def decode(self) -> float:
        """Milliseconds."""
        at = self._load.prompt_tokens
        batch = [self._slice(number, (3,), at) for number in range(self._load.running)]
        return self._run(batch)

    def check(self) -> float:
        """Milliseconds."""
        started_s = time.perf_counter()
        blocks = self._table(0)
        copy = BlockId(self._load.running * self._load.blocks)
        groups = len(self._engine.layout.groups)
        self._engine.copy_blocks((((blocks[-1], copy),),) * groups)
        checked = self._slice(0, (3,), self._load.prompt_tokens - 1, sketch_ids=tuple(range(16)))
        return 1e3 * (time.perf_counter() - started_s) + self._run([checked])

    def prefill(self) -> float:
        """Milliseconds, for one prompt."""
        ids = tuple(5 + i % 1000 for i in range(self._load.prompt_tokens))
        return self._run([self._slice(0, ids, 0)])

    def _run(self, slices: Sequence[SequenceSlice]) -> float:
        started_s = time.perf_counter()
        self._engine.run(StepBatch(slices=tuple(slices)))
        return 1e3 * (time.perf_counter() - started_s)

    def _table(self, number: int) -> tuple[BlockId, ...]:
        each = self._load.blocks
        return tuple(BlockId(number * each + i) for i in range(each))

    def _slice(
        self,
        number: int,
        ids: tuple[int, ...],
        start: int,
        sketch_ids: tuple[int, ...] | None = None,
    ) -> SequenceSlice:
        return SequenceSlice(
            key=RequestKey(str(number), 0),
            choice=0,
            token_ids=ids,
            start=start,
            tables=(self._table(number),) * len(self._engine.layout.groups),
            samples=(_DRAW,),
            sketch_ids=sketch_ids,
        )


def measure(engine: Engine, load: Load, repeats: int) -> list[Row]:
    calibrations = {
        "none": lambda: _timed(engine, []),
        "int8": lambda: _timed(engine, [Codec.INT8]),
    }
    starts = interleave(calibrations, repeats=3)
    steps = Steps(engine, load)
    found = {"prefill": steps.prefill, "decode": steps.decode, "check": steps.check}
    for run in found.values():
        run()
    return [*_rows(interleave(found, repeats=repeats), load), *_starts(starts)]


def _timed(engine: Engine, codecs: Sequence[Codec]) -> float:
    started_s = time.perf_counter()
    canary_bound(engine, codecs)
    return time.perf_counter() - started_s


def _rows(found: dict[str, Reading], load: Load) -> list[Row]:
    check, decode, prefill = (found[name] for name in ("check", "decode", "prefill"))
    method = f"random Llama of SmolLM-135M's shape, bf16, {load.prompt_tokens} tokens in"
    together = f"a decode step of {load.running}"
    spread = f"ms: {check.spread()}; {together} {decode.spread()}"
    every_request_ms = load.output_tokens * decode.median
    return [
        Row(
            name="the check of one request",
            value=check.median,
            unit="ms",
            against=against,
            against_value=peer.median,
            method=method,
            spread=spread,
        )
        for against, peer in ((together, decode), ("the prefill of its prompt", prefill))
    ] + [
        Row(
            name=f"all checks, 1 in {load.every}, {load.running} at once",
            value=load.running * check.median / load.every,
            unit="ms per request",
            against=f"its {load.output_tokens} decode steps",
            against_value=every_request_ms,
            method=f"{method}; each check holds up all that decode",
            spread=spread,
        )
    ]


def _starts(found: dict[str, Reading]) -> list[Row]:
    none, int8 = found["none"], found["int8"]
    return [
        Row(
            name="the bound, measured at start, with codec int8",
            value=int8.median,
            unit="s",
            against="without a codec",
            against_value=none.median,
            spread=f"{int8.spread()}; without {none.spread()}",
        )
    ]


def bounds(engine: Engine) -> Iterator[Row]:
    """What right KV may differ by, in spreads of the logits."""
    exact = canary_bound(engine)
    for codec in Codec:
        bound = canary_bound(engine, [codec])
        assert exact is not None and bound is not None
        yield Row(
            name=f"bundled model, bf16, codec {codec}: logits may differ by",
            value=bound,
            unit="of their spread",
            against="without a codec",
            against_value=exact,
        )


def load_model(path: Path, load: Load) -> Engine:
    limits = EngineLimits(
        max_model_len=load.prompt_tokens + load.output_tokens,
        prefill_chunk_tokens=load.prompt_tokens,
        max_running_requests=load.running,
    )
    return load_engine(
        open_checkpoint(str(path)),
        device="cpu",
        dtype="bfloat16",
        block_size=_BLOCK,
        blocks=load.running * load.blocks + 1,
        limits=limits,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(args.threads)
    config = LlamaConfig.from_dict(SMOLLM_135M.to_dict() | {"max_position_embeddings": 2048})
    load = Load()
    with tempfile.TemporaryDirectory() as folder:
        engine = load_model(write_random_llama(Path(folder), config), load)
        rows = measure(engine, load, args.repeats)
    rows += bounds(load_model(checkpoint_path(), load))
    print_table("The canary", rows)
    if args.json:
        write_json(args.json, rows)


if __name__ == "__main__":
    main()
