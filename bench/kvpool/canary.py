"""What the canary costs and what it finds.

Both workers of a checked request digest its KV, each on the thread that moves KV: the request's
first decode step comes so much later, and other transfers wait. The steps of others go on.
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
from engine.core.sizing import EngineLimits
from engine.core.step import SampleRequest, SequenceSlice, StepBatch
from engine.device.threads import run_apart, use_threads
from engine.load import load_engine
from engine.model.checkpoint import open_checkpoint
from engine.runner import Engine
from kvpool.core.layout.codec import Codec
from kvpool.core.layout.layout import BlockId, Tables
from kvpool.core.transfer.messages import EXACT, LOSSY, KvDigest, prompt_from
from kvpool.core.transfer.piece import cut_span
from kvpool.core.transfer.write import Side, SlabWrite
from kvpool.memory.collate import gather_write, scatter_write
from kvpool.memory.digest import digest
from kvrelay.types import RequestKey, Sampling

_BLOCK = 16
_DRAW = SampleRequest(
    sampling=Sampling(max_tokens=1, seed=0), choice=0, prompt_ids=(), emitted_ids=()
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


class Work:
    """Each returns milliseconds."""

    def __init__(self, engine: Engine, load: Load) -> None:
        self.engine, self._load = engine, load
        self.span = prompt_from(0, load.prompt_tokens)
        slab_bytes = sum(write.nbytes for write in self.writes())
        self._slab = torch.empty(slab_bytes, dtype=torch.uint8)

    def writes(self) -> tuple[SlabWrite, ...]:
        return cut_span(self.engine.layout, self.span, 2**62)

    def side(self, number: int) -> Side:
        return Side(tables=self.tables(number), block_size=_BLOCK)

    def tables(self, number: int) -> Tables:
        each = self._load.blocks
        table = tuple(BlockId(number * each + i) for i in range(each))
        return (table,) * len(self.engine.layout.groups)

    def decode(self) -> float:
        at = self._load.prompt_tokens
        return self._run([self._slice(n, (3,), at) for n in range(self._load.running)])

    def prefill(self) -> float:
        ids = tuple(5 + i * 37 % 1000 for i in range(self._load.prompt_tokens))
        return self._run([self._slice(0, ids, 0)])

    def digest(self) -> float:
        return run_apart(self._digest)

    def gather(self) -> float:
        return run_apart(self._gather)

    def _digest(self) -> float:
        use_threads(1)
        started_s = time.perf_counter()
        digest(self.engine.memory, self.tables(0), self.span)
        return 1e3 * (time.perf_counter() - started_s)

    def _gather(self) -> float:
        use_threads(1)
        started_s = time.perf_counter()
        for write in self.writes():
            gather_write(self.engine.memory, self.side(0), write, self._slab[: write.nbytes])
        return 1e3 * (time.perf_counter() - started_s)

    def _run(self, slices: Sequence[SequenceSlice]) -> float:
        started_s = time.perf_counter()
        self.engine.run(StepBatch(slices=tuple(slices)))
        return 1e3 * (time.perf_counter() - started_s)

    def _slice(self, number: int, ids: tuple[int, ...], start: int) -> SequenceSlice:
        return SequenceSlice(
            key=RequestKey(str(number), 0),
            choice=0,
            token_ids=ids,
            start=start,
            tables=self.tables(number),
            samples=(_DRAW,),
        )


def measure(engine: Engine, load: Load, repeats: int) -> list[Row]:
    work = Work(engine, load)
    found = {
        "prefill": work.prefill,
        "decode": work.decode,
        "gather": work.gather,
        "digest": work.digest,
    }
    for run in found.values():
        run()
    return _rows(interleave(found, repeats=repeats), load)


def _rows(found: dict[str, Reading], load: Load) -> list[Row]:
    digested, decode = found["digest"], found["decode"]
    spread = f"ms: {digested.spread()}; decode step {decode.spread()}"
    peers = {
        "its KV gathered into a slab": found["gather"],
        f"a decode step of {load.running}": decode,
        "the prefill of its prompt": found["prefill"],
    }
    method = f"random Llama of SmolLM-135M's shape, bf16, {load.prompt_tokens} tokens in"
    rows = [
        Row(
            name="the digest of one request, at one end",
            value=digested.median,
            unit="ms",
            against=against,
            against_value=peer.median,
            method=method,
            spread=spread,
        )
        for against, peer in peers.items()
    ]
    return [
        *rows,
        Row(
            name=f"both digests, 1 request in {load.every} checked",
            value=2 * digested.median / load.every,
            unit="ms per request",
            against=f"its {load.output_tokens} decode steps",
            against_value=load.output_tokens * decode.median,
            method=method,
            spread=spread,
        ),
    ]


def findings(engine: Engine, load: Load) -> Iterator[Row]:
    """Of the model's own KV: how far right KV is from what was sent, and which wrong blocks are
    noticed."""
    work = Work(engine, load)
    work.prefill()
    for codec in Codec:
        allowed = EXACT if codec is Codec.NONE else LOSSY
        right, wrong = _distances(work, codec, load)
        noticed = sum(distance > allowed for distance in wrong)
        yield Row(
            name=f"bundled model, bf16, codec {codec}: right KV differs by",
            value=right,
            unit="of its norm",
            against="what is allowed",
            against_value=allowed,
            method=f"{noticed} of {len(wrong)} wrong blocks noticed",
        )


def _distances(work: Work, codec: Codec, load: Load) -> tuple[float, list[float]]:
    """Of right KV, and with each block's KV that of the block before it."""
    memory = work.engine.memory
    (sent,) = digest(memory, work.tables(0), work.span)
    for write in work.writes():
        encoded = write.encoded(codec)
        slab = torch.empty(encoded.nbytes, dtype=torch.uint8)
        gather_write(memory, work.side(0), encoded, slab)
        scatter_write(memory, work.side(1), encoded, slab)
    there = work.tables(1)

    def distance(tables: Tables) -> float:
        found: KvDigest
        (found,) = digest(memory, tables, work.span)
        return sent.distance(found)

    blocks = range(1, load.prompt_tokens // _BLOCK)
    tables = (tuple((*t[:i], t[i - 1], *t[i + 1 :]) for t in there) for i in blocks)
    return distance(there), [distance(one) for one in tables]


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
        blocks=load.running * load.blocks,
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
    rows += findings(load_model(checkpoint_path(), load), load)
    print_table("The canary", rows)
    if args.json:
        write_json(args.json, rows)


if __name__ == "__main__":
    main()
