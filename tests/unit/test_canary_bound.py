"""The bound of a format: above the noise of right KV, below what one wrong block does."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.canary import canary_bound
from engine.checkpoint import open_checkpoint
from engine.load import load_engine
from engine.runner import Engine
from engine.sizing import EngineLimits
from engine.step import SampleRequest, SequenceSlice, StepBatch
from kvpool.canary import SKETCH_TOKENS, LogitSketch
from kvpool.layout import BlockId
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
    assert bound <= (1e-3 if dtype == "float32" else 0.5)
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
    assert noticed >= 0.9 * len(wrong), sorted(wrong)[:5]


def test_experts_are_not_compared_in_16_bits(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path, "mixtral")
    assert canary_bound(load(folder, "bfloat16")) is None
    assert canary_bound(load(folder, "float32")) is not None


@pytest.mark.parametrize("blocks", [5, 33])
def test_a_small_pool_is_enough(blocks: int, tmp_path: Path) -> None:
    assert canary_bound(load(random_checkpoint(tmp_path), "float32", blocks=blocks)) is not None


def test_unknown_tokens_of_a_peer_are_no_crash(tmp_path: Path) -> None:
    engine = load(random_checkpoint(tmp_path), "float32", blocks=4)
    one = Prompt(engine, (2, 3, 4), [0])
    assert one.run(0, 3, (5, 2**31, 7)).token_ids == (5, 7)
