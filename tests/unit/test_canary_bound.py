"""The bound of a format: above the noise of right KV, below what one wrong block does."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from engine.canary import canary_bound
from engine.checkpoint import open_checkpoint
from engine.load import load_engine
from engine.runner import Engine
from engine.sizing import EngineLimits
from engine.step import SampleRequest, SequenceSlice, StepBatch
from kvpool.canary import SKETCH_TOKENS, LogitSketch
from kvpool.codec import Codec
from kvpool.layout import BlockId
from kvpool.memory.sections import gather_write, scatter_write
from kvpool.piece import cut_span
from kvpool.write import Side, TokenSpan
from kvrelay.types import RequestKey, Sampling
from tests.models import VOCAB_SIZE, random_checkpoint

BLOCK, CHUNK = 16, 64
LENGTHS = (1, 2, 15, 16, 17, 40, 41, 63, 64, 65, 100, 130, 200, 300)
_REQUEST = SampleRequest(
    sampling=Sampling(max_tokens=1, seed=0), choice=0, index=0, prompt_ids=(), emitted_ids=()
)


def load(folder: Path, dtype: str, *, blocks: int = 160) -> Engine:
    limits = EngineLimits(max_model_len=None, prefill_chunk_tokens=CHUNK, max_running_requests=4)
    return load_engine(
        open_checkpoint(str(folder)),
        device="cpu",
        dtype=dtype,
        block_size=BLOCK,
        blocks=blocks,
        limits=limits,
    )


@dataclass
class Prompt:
    engine: Engine
    ids: tuple[int, ...]
    blocks: list[int]

    def run(self, start: int, end: int, sketch_ids: tuple[int, ...] = ()) -> LogitSketch:
        table = tuple(BlockId(block) for block in self.blocks)
        piece = SequenceSlice(
            key=RequestKey("r", 0),
            choice=0,
            token_ids=self.ids[start:end],
            start=start,
            tables=(table,) * len(self.engine.layout.groups),
            samples=(_REQUEST,),
            prompt_tokens=len(self.ids),
            sketch_ids=sketch_ids,
        )
        return self.engine.run(StepBatch(slices=(piece,))).sketches[0]

    def prefill(self) -> LogitSketch:
        ends = [*range(CHUNK, len(self.ids), CHUNK), len(self.ids)]
        return [self.run(start, end) for start, end in zip([0, *ends], ends, strict=False)][-1]

    def last_again(self, sketch: LogitSketch) -> float:
        return sketch.distance(self.run(len(self.ids) - 1, len(self.ids), sketch.token_ids))

    def spoil(self, block: int) -> None:
        """One block has another one's bytes, as after a transfer to the wrong place."""
        at, other = self.blocks[block] * BLOCK, self.blocks[block - 1] * BLOCK
        for planes in self.engine.memory.planes:
            for plane in planes:
                plane[:, at : at + BLOCK] = plane[:, other : other + BLOCK].clone().flip(-1)

    def travel(self, codec: Codec, target: Engine | None = None) -> None:
        """All but the last position's KV through slabs with this codec, or to another engine's pool
        and in its dtype if that is the coarser one."""
        ours, theirs = self.engine.memory, (target or self.engine).memory
        coarse = min(ours.layout, theirs.layout, key=lambda layout: layout.bytes_per_token)
        end = len(self.ids) - 1
        table = tuple(BlockId(block) for block in self.blocks)
        side = Side(tables=(table,) * len(ours.layout.groups), block_size=BLOCK)
        span = TokenSpan(start=0, tokens=end, next_position=end)
        for write in cut_span(coarse, span, 2**40) if end else ():
            slab = torch.empty(write.encoded(codec).nbytes, dtype=torch.uint8)
            gather_write(ours, side, write.encoded(codec), slab)
            scatter_write(theirs, side, write.encoded(codec), slab)


def prompts(engine: Engine, seed: int) -> list[Prompt]:
    rng = random.Random(seed)
    return [
        Prompt(
            engine,
            tuple(rng.randrange(2, VOCAB_SIZE) for _ in range(tokens)),
            rng.sample(range(engine.memory.blocks), engine.layout.blocks_for(tokens)),
        )
        for tokens in LENGTHS
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "family", ["llama", "mistral", "qwen3", "gemma2", "gemma3_text", "phi3_longrope"]
)
def test_right_kv_stays_below_and_wrong_kv_comes_above(
    family: str, dtype: str, tmp_path: Path
) -> None:
    engine = load(random_checkpoint(tmp_path, family), dtype)
    bound = canary_bound(engine)
    assert bound is not None
    assert bound <= (1e-3 if dtype == "float32" else 0.2)
    right, wrong = [], []
    for prompt in [one for seed in range(3) for one in prompts(engine, seed)]:
        sketch = prompt.prefill()
        assert len(sketch.token_ids) == SKETCH_TOKENS
        right.append(prompt.last_again(sketch))
        if len(prompt.ids) > 2 * BLOCK:
            prompt.spoil(-2)
            wrong.append(prompt.last_again(sketch))
    assert max(right) < bound
    noticed = sum(distance > bound for distance in wrong)
    assert noticed >= 0.98 * len(wrong), sorted(wrong)[:5]


def test_a_peer_that_sums_in_another_order_stays_below(tmp_path: Path) -> None:
    """The prefill worker has compiled the model, the decode worker hasn't."""
    engine = load(random_checkpoint(tmp_path, "phi3_longrope"), "bfloat16")
    bound, compiled = canary_bound(engine), engine.model
    assert bound is not None and compiled.flat is not None
    found = []
    for prompt in prompts(engine, 5):
        engine.model = compiled
        sketch = prompt.prefill()
        engine.model = replace(compiled, flat=None)
        found.append(prompt.last_again(sketch))
    assert 0 < max(found) < bound


@pytest.mark.parametrize(
    ("family", "codec", "notices"),
    [
        ("llama", Codec.INT8, 0.8),
        ("llama", Codec.FP8, 0.0),  # on random weights fp8 does as much as one wrong block
        ("qwen3", Codec.INT8, 0.9),
        ("qwen3", Codec.FP8, 0.5),
        ("gemma3_text", Codec.INT8, 0.9),
        ("gemma3_text", Codec.FP8, 0.9),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_encoded_kv_stays_below_and_wrong_kv_comes_above(
    family: str, codec: Codec, notices: float, dtype: str, tmp_path: Path
) -> None:
    engine = load(random_checkpoint(tmp_path, family), dtype)
    exact, bound = canary_bound(engine), canary_bound(engine, [Codec.NONE, codec])
    assert exact is not None and bound is not None
    assert exact <= bound
    right, wrong = [], []
    for prompt in [one for seed in range(3) for one in prompts(engine, seed)]:
        sketch = prompt.prefill()
        prompt.travel(codec)
        right.append(prompt.last_again(sketch))
        if len(prompt.ids) > 2 * BLOCK:
            prompt.spoil(-2)
            wrong.append(prompt.last_again(sketch))
    assert max(right) < bound
    assert dtype == "bfloat16" or max(right) > exact, "the codec's loss is beyond the format's"
    assert sum(distance > bound for distance in wrong) >= notices * len(wrong), sorted(wrong)[:5]


@pytest.mark.parametrize("here", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_converted_kv_stays_below_the_larger_bound(family: str, here: str, tmp_path: Path) -> None:
    """The prefill worker's dtype is `here`, the decode worker's the other."""
    there = "bfloat16" if here == "float32" else "float32"
    folder = random_checkpoint(tmp_path, family)
    prefill, decode = load(folder, here), load(folder, there)
    bounds = [canary_bound(engine, mixed_precision=True) for engine in (prefill, decode)]
    bound = max(bound for bound in bounds if bound is not None)
    right, wrong = [], []
    for prompt in [one for seed in range(3) for one in prompts(prefill, seed)]:
        sketch = prompt.prefill()
        prompt.travel(Codec.NONE, decode)
        arrived = replace(prompt, engine=decode)
        right.append(arrived.last_again(sketch))
        if len(prompt.ids) > 2 * BLOCK:
            arrived.spoil(-2)
            wrong.append(arrived.last_again(sketch))
    assert min(bounds) < max(right) < bound
    assert sum(distance > bound for distance in wrong) >= 0.8 * len(wrong), sorted(wrong)[:5]


def test_experts_are_not_compared_in_16_bits(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path, "mixtral")
    assert canary_bound(load(folder, "bfloat16")) is None
    exact = load(folder, "float32")
    assert canary_bound(exact) is not None
    assert canary_bound(exact, [Codec.INT8]) is None
    assert canary_bound(exact, mixed_precision=True) is None


@pytest.mark.parametrize("blocks", [5, 33])
def test_a_small_pool_is_enough(blocks: int, tmp_path: Path) -> None:
    assert canary_bound(load(random_checkpoint(tmp_path), "float32", blocks=blocks)) is not None


def test_unknown_tokens_of_a_peer_are_no_crash(tmp_path: Path) -> None:
    engine = load(random_checkpoint(tmp_path), "float32", blocks=4)
    one = Prompt(engine, (2, 3, 4), [0])
    assert one.run(0, 3, (5, 2**31, 7)).token_ids == (5, 7)
