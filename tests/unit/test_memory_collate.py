"""Pieces through slabs between pools of different block sizes; slabs that are refused."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from kvpool.core.layout.codec import Codec
from kvpool.core.layout.layout import DTYPE_BYTES, BlockId, KvLayout, Tables
from kvpool.core.transfer.piece import Piece
from kvpool.core.transfer.slabs import HEADER_BYTES
from kvpool.core.transfer.write import SlabWrite, TokenSpan
from kvpool.memory.collate import read_slab, write_slab
from kvpool.memory.kv_memory import KvMemory
from kvrelay.errors import PeerError
from tests.unit.pieces_kit import (
    BLOCKS,
    assert_moved,
    layout,
    pieces,
    random_memory,
    random_tables,
    same,
    without_unseen,
)

_MODEL = "ab" * 16
_SPAN = TokenSpan(start=2, tokens=30, next_position=32)


def _write(memory: KvMemory, tables: Tables, piece: Piece, write: SlabWrite) -> torch.Tensor:
    """The slab, longer than it need be."""
    window = torch.zeros(HEADER_BYTES + write.nbytes + 17, dtype=torch.uint8)
    used = write_slab(memory, tables, piece, write, fingerprint=_MODEL, lease_id=5, window=window)
    assert used == HEADER_BYTES + write.nbytes
    return window


def _read(
    memory: KvMemory, tables: Tables, piece: Piece, write: SlabWrite, slab: torch.Tensor
) -> None:
    read_slab(memory, tables, piece, write, fingerprint=_MODEL, lease_id=5, window=slab)


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_kv_of_any_dtype_goes_through_a_slab(dtype: str) -> None:
    ours = replace(layout(4), dtype=dtype)
    source, target = KvMemory(ours, BLOCKS, "cpu"), KvMemory(ours, BLOCKS, "cpu")
    source.flat.random_(1, 100)
    tables = random_tables(ours, 12, 3)
    span = TokenSpan(start=0, tokens=12, next_position=12)
    ((piece, write),) = pieces(ours, span)
    _read(target, tables, piece, write, _write(source, tables, piece, write))
    slots = [block * 4 + token for block in tables[0] for token in range(4)]
    for before, found in zip(source.planes[0], target.planes[0], strict=True):
        assert torch.equal(found[:, slots].view(torch.uint8), before[:, slots].view(torch.uint8))


@pytest.mark.parametrize("seed", range(20))
def test_each_token_that_is_seen_arrives_once_and_nothing_else(seed: int) -> None:
    draw = random.Random(seed)
    window = draw.choice([None, 1, 8, 30])
    source = random_memory(layout(draw.choice([4, 8]), window=window), seed)
    ours = layout(draw.choice([3, 16]), window=window)
    target, before = random_memory(ours, 99), random_memory(ours, 99)
    prompt = draw.randrange(1, 60)
    start = draw.randrange(prompt)
    tokens = draw.randrange(prompt - start + 1)
    span = TokenSpan(start=start, tokens=tokens, next_position=prompt)
    theirs = without_unseen(random_tables(source.layout, prompt, seed), source.layout, span)
    held = without_unseen(random_tables(ours, prompt, seed + 1), ours, span)
    slab_bytes = draw.choice([100, 700, 1 << 20])
    for piece, write in pieces(ours, span, slab_bytes):
        assert (piece, write) in pieces(source.layout, span, slab_bytes)  # both cut alike
        _read(target, held, piece, write, _write(source, theirs, piece, write))
    assert_moved(source, theirs, target, held, span, before)


def test_the_fingerprint_does_not_depend_on_the_block_size() -> None:
    assert layout(8).logical_fingerprint("m") == layout(16).logical_fingerprint("m")
    assert layout(8).logical_fingerprint("m") != layout(8, window=9).logical_fingerprint("m")


def _filled(ours: KvLayout, tables: Tables) -> tuple[Piece, SlabWrite, torch.Tensor]:
    ((piece, write),) = pieces(ours, _SPAN)
    return piece, write, _write(random_memory(ours, 4), tables, piece, write)


def test_a_slab_that_is_not_for_us_touches_no_block() -> None:
    ours = layout(8)
    tables = random_tables(ours, 32, 6)
    piece, write, slab = _filled(ours, tables)

    def refused(
        reason: str,
        *,
        memory_layout: KvLayout = ours,
        piece: Piece = piece,
        write: SlabWrite = write,
        fingerprint: str = _MODEL,
        lease_id: int = 5,
    ) -> None:
        target = KvMemory(memory_layout, BLOCKS, "cpu")
        with pytest.raises(PeerError, match=reason):
            read_slab(
                target,
                tables,
                piece,
                write,
                fingerprint=fingerprint,
                lease_id=lease_id,
                window=slab,
            )
        assert not target.flat.any()

    refused("another model", fingerprint="cd" * 16)
    refused("lease 5, but 6 is current", lease_id=6)
    ((_, half),) = pieces(layout(8, "float16"), _SPAN)
    agreed = "slab of bfloat16 with codec none, but %s was agreed"
    half_pool = layout(8, "float16")
    refused(agreed % "float16 with codec none", memory_layout=half_pool, write=half)
    refused(agreed % "bfloat16 with codec int8", write=write.encoded(Codec.INT8))
    other = Piece(span=TokenSpan(start=2, tokens=29, next_position=32), index=0)
    refused(r"tokens \[2, 32\) of 32, but write 0 of tokens \[2, 31\) of 32", piece=other)
    refused("write 0 of .* but write 1 of", piece=Piece(span=_SPAN, index=1))
    wider = pieces(layout(8, window=None), _SPAN)[0][1]
    refused(f"slab length {write.nbytes} .* its cut has {wider.nbytes}", write=wider)
    slab[HEADER_BYTES + 300] ^= 1
    refused("payload is damaged")


def test_copy_blocks_copies_all_layers_of_its_group_only() -> None:
    memory, before = random_memory(layout(4), 3), random_memory(layout(4), 3)
    memory.copy_blocks((((BlockId(1), BlockId(5)), (BlockId(2), BlockId(6))), ()))
    for plane, old in zip(memory.planes[0], before.planes[0], strict=True):
        expected = old.clone()
        expected[:, 20:24], expected[:, 24:28] = old[:, 4:8], old[:, 8:12]
        assert same(plane, expected)
    for plane, old in zip(memory.planes[1], before.planes[1], strict=True):
        assert same(plane, old)


@pytest.mark.gpu
def test_device_memory_through_a_host_slab() -> None:
    ours = layout(8)
    host, tables = random_memory(ours, 4), random_tables(ours, 32, 6)
    device = KvMemory.over(host.map, host.flat.to("cuda"))
    ((piece, write),) = pieces(ours, _SPAN)
    slab = _write(device, tables, piece, write)
    assert torch.equal(slab, _write(host, tables, piece, write))
    back = KvMemory(ours, BLOCKS, "cuda")
    _read(back, tables, piece, write, slab)
    assert torch.equal(_write(back, tables, piece, write), slab)
