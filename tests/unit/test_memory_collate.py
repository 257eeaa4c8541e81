"""Gather and scatter against a loop over single tokens, byte by byte; copy-on-write; slabs."""

from __future__ import annotations

import random

import pytest
import torch

from kvpool.layout import BlockId, KvLayout, LayerGroup, Plane, Tables
from kvpool.memory import KvMemory
from kvpool.memory_collate import gather, read_slab, scatter, slab_bytes, write_slab
from kvpool.plan import chunk_bytes
from kvpool.slab import HEADER_BYTES
from kvrelay.errors import PeerError

_KV = (Plane(name="k", heads=2, dim=3), Plane(name="v", heads=2, dim=5))
_LATENT = (Plane(name="latent", heads=1, dim=7),)
_MODEL = "ab" * 16
_BLOCKS = 24


def _layout(block_size: int, dtype: str = "bfloat16") -> KvLayout:
    groups = (
        LayerGroup(layers=(0, 2, 4), planes=_KV),
        LayerGroup(layers=(1, 3), planes=_LATENT, window=8),
    )
    return KvLayout(groups=groups, dtype=dtype, block_size=block_size)


def _random_memory(layout: KvLayout, seed: int) -> KvMemory:
    memory, generator = KvMemory(layout, _BLOCKS, "cpu"), torch.Generator().manual_seed(seed)
    for planes in memory.planes:
        for plane in planes:
            raw = plane.view(torch.uint8)
            raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))
    return memory


def _random_tables(layout: KvLayout, tokens: int, seed: int) -> Tables:
    draw = random.Random(seed)
    return tuple(
        tuple(BlockId(b) for b in draw.sample(range(_BLOCKS), layout.blocks_for(tokens)))
        for _ in layout.groups
    )


def _slot(tables: Tables, group: int, token: int, block_size: int) -> int:
    return tables[group][token // block_size] * block_size + token % block_size


def _naive(memory: KvMemory, tables: Tables, start: int, tokens: int) -> bytes:
    """The canonical order, spelled out: group, layer, plane, token."""
    size, out = memory.layout.block_size, b""
    for group, spec in enumerate(memory.layout.groups):
        for layer in range(len(spec.layers)):
            for plane in memory.layer(group, layer):
                for token in range(start, start + tokens):
                    row = plane[_slot(tables, group, token, size)].contiguous()
                    out += row.view(torch.uint8).numpy().tobytes()
    return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("start", "tokens"), [(0, 40), (3, 1), (5, 22), (8, 16), (39, 1), (7, 0)])
def test_gather_is_the_canonical_order(start: int, tokens: int, dtype: str) -> None:
    layout = _layout(8, dtype)
    memory, tables = _random_memory(layout, 1), _random_tables(layout, 40, 2)
    out = torch.zeros(chunk_bytes(layout, tokens), dtype=torch.uint8)
    gather(memory, tables, start, tokens, out)
    assert out.numpy().tobytes() == _naive(memory, tables, start, tokens)


@pytest.mark.parametrize("seed", range(12))
def test_scatter_writes_each_token_once_and_nothing_else(seed: int) -> None:
    """Into a pool with another block size, from a random start."""
    draw = random.Random(seed)
    source = _random_memory(_layout(draw.choice([4, 8])), seed)
    layout = _layout(draw.choice([3, 16]))
    _check_transfer(source, _random_memory(layout, 99), _random_memory(layout, 99), draw)


def _check_transfer(
    source: KvMemory, target: KvMemory, untouched: KvMemory, draw: random.Random
) -> None:
    total = draw.randrange(1, 60)
    start = draw.randrange(total)
    tokens = draw.randrange(total - start + 1)
    theirs = _random_tables(source.layout, total, draw.randrange(99))
    ours = _random_tables(target.layout, total, draw.randrange(99))
    slab = torch.zeros(chunk_bytes(source.layout, tokens), dtype=torch.uint8)
    gather(source, theirs, start, tokens, slab)
    scatter(target, ours, start, tokens, slab)
    assert _naive(target, ours, start, tokens) == slab.numpy().tobytes()
    for group, planes in enumerate(target.planes):
        written = {
            _slot(ours, group, t, target.layout.block_size) for t in range(start, start + tokens)
        }
        others = [s for s in range(planes[0].shape[1]) if s not in written]
        for plane, before in zip(planes, untouched.planes[group], strict=True):
            ours_bytes = plane[:, others].view(torch.uint8)
            assert torch.equal(ours_bytes, before[:, others].view(torch.uint8))


def test_copy_blocks_copies_all_layers_of_its_group_only() -> None:
    layout = _layout(4)
    memory, before = _random_memory(layout, 3), _random_memory(layout, 3)
    memory.copy_blocks((((BlockId(1), BlockId(5)), (BlockId(2), BlockId(6))), ()))
    for plane, old in zip(memory.planes[0], before.planes[0], strict=True):
        expected = old.view(torch.uint8).clone()
        expected[:, 20:24], expected[:, 24:28] = expected[:, 4:8], expected[:, 8:12]
        assert torch.equal(plane.view(torch.uint8), expected)
    for plane, old in zip(memory.planes[1], before.planes[1], strict=True):
        assert torch.equal(plane.view(torch.uint8), old.view(torch.uint8))


def _filled_window(layout: KvLayout, tables: Tables) -> torch.Tensor:
    window = torch.zeros(slab_bytes(layout, 30) + 17, dtype=torch.uint8)
    used = write_slab(
        _random_memory(layout, 4),
        tables,
        2,
        30,
        fingerprint=_MODEL,
        lease_id=5,
        chunk=1,
        window=window,
    )
    assert used == slab_bytes(layout, 30)
    return window


def test_a_slab_says_what_it_holds_and_is_scattered() -> None:
    layout = _layout(8)
    tables = _random_tables(layout, 32, 6)
    window, target = _filled_window(layout, tables), KvMemory(layout, _BLOCKS, "cpu")
    header = read_slab(target, tables, fingerprint=_MODEL, lease_id=5, window=window)
    assert (header.chunk, header.start, header.tokens) == (1, 2, 30)
    assert _naive(target, tables, 2, 30) == _naive(_random_memory(layout, 4), tables, 2, 30)


def _expect_refusal(
    window: torch.Tensor, reason: str, layout: KvLayout | None = None, **expected: object
) -> None:
    layout = layout or _layout(8)
    target, tables = KvMemory(layout, _BLOCKS, "cpu"), _random_tables(layout, 32, 6)
    checks = {"fingerprint": _MODEL, "lease_id": 5, "tables": tables} | expected
    with pytest.raises(PeerError, match=reason):
        read_slab(target, window=window, **checks)  # type: ignore[arg-type]
    assert not any(p.view(torch.uint8).any() for planes in target.planes for p in planes)


def test_a_slab_that_is_not_for_us_touches_no_block() -> None:
    layout = _layout(8)
    tables = _random_tables(layout, 32, 6)
    window = _filled_window(layout, tables)
    _expect_refusal(window, "another model", fingerprint="cd" * 16)
    _expect_refusal(window, "lease 5, but 6 is current", lease_id=6)
    _expect_refusal(window, "holds blocks for 24", tables=tuple(t[:3] for t in tables))
    _expect_refusal(window, "slab of bfloat16", layout=_layout(8, "float16"))
    wider = (LayerGroup(layers=(0,), planes=_KV), LayerGroup(layers=(1,), planes=_LATENT))
    _expect_refusal(window, "slab length", KvLayout(groups=wider, dtype="bfloat16", block_size=8))
    window[HEADER_BYTES + 1000] ^= 1
    _expect_refusal(window, "payload is damaged")


@pytest.mark.gpu
def test_device_memory_through_a_host_slab() -> None:
    layout = _layout(8)
    host, tables = _random_memory(layout, 4), _random_tables(layout, 32, 6)
    device = KvMemory(layout, _BLOCKS, "cuda")
    for planes, ours in zip(device.planes, host.planes, strict=True):
        for plane, own in zip(planes, ours, strict=True):
            plane.copy_(own)
    slab = torch.zeros(chunk_bytes(layout, 30), dtype=torch.uint8)
    gather(device, tables, 2, 30, slab)
    assert slab.numpy().tobytes() == _naive(host, tables, 2, 30)
    back = KvMemory(layout, _BLOCKS, "cuda")
    scatter(back, tables, 2, 30, slab)
    again = torch.zeros_like(slab)
    gather(back, tables, 2, 30, again)
    assert torch.equal(again, slab)
