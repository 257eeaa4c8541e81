"""What KV in FP8 brings on a device, and what it costs: how many more tokens fit, and how many most
likely tokens of the bundled model are the same as with bf16 KV.

Prompts are pieces of this repository's README.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from bench.engine.cuda.random_engine import TINY, random_engine
from bench.report import Row, print_table
from engine.bundled import checkpoint_path
from engine.core.options import CudaOptions
from engine.core.sizing import EngineLimits, MemoryProfile, size_kv
from engine.core.step import SampleRequest, SequenceSlice, StepBatch
from engine.load import load_engine
from engine.model.checkpoint import open_checkpoint
from engine.runner import Engine
from kvpool.core.layout.layout import BlockId
from kvrelay.types import RequestKey, Sampling

_TEXT = Path(__file__).parents[3] / "README.md"
_BLOCK_SIZE = 16
_KV_BYTES = 64 << 20
"""engine.kv_memory of a worker whose tokens are counted."""
_MANY = EngineLimits(
    max_model_len=2048,
    prefill_chunk_tokens=64,
    max_running_requests=4096,
    kv_memory_bytes=_KV_BYTES,
)


def _engine(device: str, tokens: int, *, fp8_kv: bool) -> Engine:
    """KV of as many tokens, in any format."""
    limits = EngineLimits(max_model_len=tokens, prefill_chunk_tokens=tokens, max_running_requests=1)
    return _loaded(device, limits, -(-tokens // _BLOCK_SIZE), fp8_kv=fp8_kv)


def _held_tokens(device: str, *, fp8_kv: bool) -> int:
    """By a worker with so much KV memory."""
    return _loaded(device, _MANY, None, fp8_kv=fp8_kv, graphs=False).sizing.tokens


def _loaded(
    device: str, limits: EngineLimits, blocks: int | None, *, fp8_kv: bool, graphs: bool = True
) -> Engine:
    return load_engine(
        open_checkpoint(str(checkpoint_path())),
        device=device,
        dtype="bfloat16",
        block_size=_BLOCK_SIZE,
        blocks=blocks,
        limits=limits,
        attention="triton",
        cuda=CudaOptions(fp8_kv=fp8_kv, graphs=graphs),
    )


def _rehearsed(device: str, tokens: int, *, fp8_kv: bool) -> Engine:
    """A tiny one, which loading would refuse: random models lose more by FP8."""
    kept = "float8_e4m3fn" if fp8_kv else "bfloat16"
    engine, _ = random_engine(
        device,
        tokens=tokens,
        batch=1,
        backend="triton",
        graphs=False,
        config=TINY,
        layers=1,
        kv_dtype=kept,
    )
    return engine


def _rehearsed_tokens(device: str, *, fp8_kv: bool) -> int:
    """As many as the engine's own sizing allows the tiny model."""
    nothing = MemoryProfile(total_bytes=0, weight_bytes=0, activation_bytes=0)
    layout = _rehearsed(device, _BLOCK_SIZE, fp8_kv=fp8_kv).layout
    return size_kv(layout, _MANY, nothing, max_model_len=2048).tokens


Open = Callable[..., Engine]
Hold = Callable[..., int]


def _forced(engine: Engine, ids: list[int], prompt: int) -> list[int]:
    """The most likely token after each prefix of `ids` from `prompt` tokens on."""
    found, done = [], 0
    for end in range(prompt, len(ids)):
        found.append(_next(engine, ids[done:end], done))
        done = end
    return found


def _next(engine: Engine, token_ids: list[int], start: int) -> int:
    wanted = SampleRequest(
        sampling=Sampling(max_tokens=1, seed=0),
        choice=0,
        prompt_ids=(),
        emitted_ids=(),
    )
    piece = SequenceSlice(
        key=RequestKey("0", 0),
        choice=0,
        token_ids=tuple(token_ids),
        start=start,
        tables=(tuple(BlockId(i) for i in range(engine.memory.blocks)),),
        samples=(wanted,),
    )
    ((sampled,),) = engine.run(StepBatch(slices=(piece,))).sampled
    return sampled.token_id


def rows(make: Open, hold: Hold, device: str, prompt: int, forced: int, pieces: int) -> list[Row]:
    text = Tokenizer.from_file(str(checkpoint_path() / "tokenizer.json"))
    ids, length = text.encode(_TEXT.read_text()).ids, prompt + forced
    engines = [make(device, length, fp8_kv=fp8_kv) for fp8_kv in (False, True)]
    ids = [one % engines[0].facts.vocab_size for one in ids]
    texts = [ids[i * length : (i + 1) * length] for i in range(pieces)]
    exact, kept = ([t for one in texts for t in _forced(e, one, prompt)] for e in engines)
    same = sum(a == b for a, b in zip(exact, kept, strict=True))
    whole, half = (hold(device, fp8_kv=fp8_kv) for fp8_kv in (False, True))
    method = f"{pieces} x ({prompt} + {forced} tokens of the README), {device}"
    return [
        Row(
            name=f"tokens that a worker holds in {_KV_BYTES >> 20} MiB of fp8 KV",
            value=half,
            unit="tokens",
            against="of KV in bf16",
            against_value=whole,
            goal=2.0,
            method=method,
        ),
        Row(
            name="most likely tokens that are the same with fp8 KV",
            value=100 * same / len(exact),
            unit="%",
            method=method,
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rehearse", action="store_true", help="one short piece")
    args = parser.parse_args()
    sizes = (16, 2, 1) if args.rehearse else (512, 64, 8)
    make, hold = (_rehearsed, _rehearsed_tokens) if args.rehearse else (_engine, _held_tokens)
    print_table("KV in FP8", rows(make, hold, args.device, *sizes))


if __name__ == "__main__":
    main()
