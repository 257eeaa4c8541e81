"""What is moved: Llama-3.1-8B's KV in scattered blocks, cut as the workers cut it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

from kvpool.core.layout.layout import BlockId, KvLayout, LayerGroup, Plane, Tables
from kvpool.core.layout.shards import Shard, ShardLayout
from kvpool.core.transfer.plan import cut
from kvpool.core.transfer.slabs import Staging, plan_staging
from kvpool.core.transfer.write import SlabWrite, TokenSpan

SLABS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Llama-3.1-8B's KV: 8 heads of 128, bf16, in 16-token blocks; `layers` of its 32.
    Runs of `run_blocks` adjacent blocks lie apart. It is on `device`, "cpu" or "cuda", and workers
    that compute `chunk_tokens` at a time move it."""

    layers: int
    tokens: int
    run_blocks: int = 1
    device: str = "cpu"
    chunk_tokens: int = 512

    @property
    def layout(self) -> KvLayout:
        planes = tuple(Plane(name=name, heads=8, dim=128) for name in ("k", "v"))
        group = LayerGroup(layers=tuple(range(self.layers)), planes=planes)
        return KvLayout(groups=(group,), dtype="bfloat16", block_size=16)

    @property
    def blocks(self) -> int:
        return self.layout.blocks_for(self.tokens)

    @property
    def nbytes(self) -> int:
        return self.layout.bytes_per_token * self.tokens

    def tables(self, seed: int) -> Tables:
        """Blocks in an order in which hardly any follows its neighbour."""
        starts = list(range(0, self.blocks, self.run_blocks))
        random.Random(seed).shuffle(starts)
        runs = (range(start, min(start + self.run_blocks, self.blocks)) for start in starts)
        return (tuple(BlockId(block) for run in runs for block in run),)

    def span(self, tokens: int | None = None) -> TokenSpan:
        count = self.tokens if tokens is None else tokens
        return TokenSpan(start=0, tokens=count, next_position=count)

    def cut(self, tokens: int | None = None) -> tuple[SlabWrite, ...]:
        """As the workers cut it, into what their slabs hold."""
        return _cut(self, self.span(tokens), self.staging.payload_bytes)

    def whole(self, tokens: int | None = None) -> tuple[SlabWrite, ...]:
        """All in one write."""
        return _cut(self, self.span(tokens), self.nbytes)

    @property
    def staging(self) -> Staging:
        """A worker's own."""
        return plan_staging(
            self.layout,
            slabs=SLABS,
            chunk_tokens=self.chunk_tokens,
            total_bytes=None,
            on_cpu=self.device == "cpu",
        )


@lru_cache(maxsize=32)
def _cut(shape: Shape, span: TokenSpan, staging_bytes: int) -> tuple[SlabWrite, ...]:
    one = ShardLayout(model=shape.layout, shard=Shard())
    return cut(one, one, span=span, staging_bytes=staging_bytes)
