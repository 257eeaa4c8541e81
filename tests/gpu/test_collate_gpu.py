"""Gather and scatter on a CUDA device against the CPU's executors, bit by bit."""

from __future__ import annotations

import random

import pytest
import torch

from kvpool.core.layout.codec import Codec
from kvpool.core.layout.layout import BlockId, KvLayout, LayerGroup, Plane
from kvpool.core.layout.shards import Shard, ShardLayout
from kvpool.core.transfer.plan import cut
from kvpool.core.transfer.write import Side, TokenSpan
from kvpool.memory.collate import gather_write, scatter_write
from kvpool.memory.kv_memory import KvMemory

pytestmark = pytest.mark.gpu
_BLOCKS = 64
_GROUPS = (
    LayerGroup(
        layers=(0, 2, 4),
        planes=(Plane(name="k", heads=8, dim=128), Plane(name="v", heads=8, dim=64)),
    ),
    LayerGroup(layers=(1, 3), planes=(Plane(name="latent", heads=1, dim=576),)),
    LayerGroup(layers=(5,), planes=(Plane(name="odd", heads=4, dim=5),)),
)


def _layout(dtype: str, shard: Shard) -> ShardLayout:
    return ShardLayout(model=KvLayout(groups=_GROUPS, dtype=dtype, block_size=16), shard=shard)


def _pair(layout: ShardLayout, seed: int) -> tuple[KvMemory, KvMemory]:
    """Equal contents on the CPU and on the device."""
    host, device = (KvMemory(layout.local, _BLOCKS, where) for where in ("cpu", "cuda"))
    generator = torch.Generator().manual_seed(seed)
    for ours, theirs in zip(host.planes, device.planes, strict=True):
        for plane, copy in zip(ours, theirs, strict=True):
            sizes = torch.randint(-12, 13, plane.shape[:3], generator=generator)
            values = torch.randn(plane.shape, generator=generator)
            plane.copy_(values * torch.exp2(sizes[..., None].float()))
            copy.copy_(plane)
    return host, device


def _side(seed: int) -> Side:
    draw = random.Random(seed)
    tables = tuple(tuple(map(BlockId, draw.sample(range(_BLOCKS), 50))) for _ in _GROUPS)
    return Side(tables=tables, block_size=16)


_DTYPES = [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("float16", "float32")]


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("dtypes", _DTYPES)
@pytest.mark.parametrize("rank", [Shard(), Shard(rank=1, size=2)])
def test_the_device_moves_the_same_bytes(
    codec: Codec, dtypes: tuple[str, str], rank: Shard
) -> None:
    source, target = _layout(dtypes[0], Shard()), _layout(dtypes[1], rank)
    host, device = _pair(source, 1)
    host_target, device_target = _pair(target, 2)
    span = TokenSpan(start=5, tokens=777, next_position=782)
    for write in cut(source, target, span=span, staging_bytes=1 << 20, codec=codec):
        slab = torch.zeros(write.nbytes, dtype=torch.uint8)
        on_device = torch.zeros_like(slab, device="cuda")
        gather_write(host, _side(3), write, slab)
        gather_write(device, _side(3), write, on_device)
        assert torch.equal(on_device.cpu(), slab)
        scatter_write(host_target, _side(4), write, slab)
        scatter_write(device_target, _side(4), write, on_device)
    for ours, theirs in zip(host_target.planes, device_target.planes, strict=True):
        for plane, copy in zip(ours, theirs, strict=True):
            assert torch.equal(plane.view(torch.uint8), copy.cpu().view(torch.uint8))
