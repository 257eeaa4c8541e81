"""Encoded and converted slabs between random shards: error bounds, layout, what isn't a number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from kvpool.core.layout.codec import CODEC_BLOCK_TOKENS, LEAST_SCALE, Codec, WireFormat
from kvpool.core.layout.layout import KvLayout, LayerGroup, Plane, Tables
from kvpool.core.layout.shards import Shard, ShardLayout
from kvpool.core.transfer.plan import cut
from kvpool.core.transfer.write import Side, SlabSection, SlabWrite, TokenSpan
from kvpool.memory.collate import gather_write, scatter_write
from kvpool.memory.kv_memory import KvMemory
from tests.unit.transfer_kit import Case, cases, draw_held

_DTYPES = st.sampled_from(["bfloat16", "float16", "float32"])
_LOSSY = st.sampled_from([Codec.FP8, Codec.INT8])
_STAGING_FOR_ANY_CODEC = 1024


@dataclass(frozen=True, kw_only=True)
class Rank:
    memory: KvMemory
    side: Side

    def tokens(self, section: SlabSection, plane: int, first_layer: int, head: int) -> torch.Tensor:
        """`[layers, tokens, heads, dim]` of a section's plane, looked up token by token."""
        table = self.side.tables[section.part.group]
        size = self.side.block_size
        wanted = range(section.start, section.start + section.tokens)
        slots = [table[token // size] * size + token % size for token in wanted]
        which = section.part.planes[plane]
        held = self.memory.planes[section.part.group][which.plane][:, slots]
        return held[first_layer : first_layer + section.part.layers, :, head : head + which.heads]


def _rank(layout: ShardLayout, tables: Tables) -> Rank:
    blocks = max(max(table, default=0) for table in tables) + 1
    memory = KvMemory(layout.local, blocks, "cpu")
    return Rank(memory=memory, side=Side(tables=tables, block_size=layout.model.block_size))


def _fill(memory: KvMemory, seed: int) -> None:
    """Numbers of very different sizes, from slot to slot and from head to head."""
    generator = torch.Generator().manual_seed(seed)
    for planes in memory.planes:
        for plane in planes:
            sizes = torch.randint(-12, 13, plane.shape[:3], generator=generator)
            values = torch.randn(plane.shape, generator=generator)
            plane.copy_(values * torch.exp2(sizes[..., None].float()))


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What one plane of a section was, what arrived, and what travelled."""

    before: torch.Tensor
    after: torch.Tensor
    section: SlabSection
    plane: int
    slab: torch.Tensor
    wire: WireFormat


def _with_dtype(layout: ShardLayout, dtype: str) -> ShardLayout:
    return replace(layout, model=replace(layout.model, dtype=dtype))


def _transferred(
    case: Case, dtypes: tuple[str, str], codec: Codec, wire_dtype: str | None = None
) -> Iterator[Piece]:
    draw = np.random.default_rng(case.seed)
    target_layout = _with_dtype(case.target, dtypes[1])
    target = _rank(target_layout, draw_held(case, target_layout, draw))
    for layout in (_with_dtype(source, dtypes[0]) for source in case.sources):
        source = _rank(layout, draw_held(case, layout, draw))
        _fill(source.memory, case.seed)
        writes = cut(
            layout,
            target_layout,
            span=case.span,
            staging_bytes=max(case.staging_bytes, _STAGING_FOR_ANY_CODEC),
            layer_groups=case.layer_groups,
            codec=codec,
            wire_dtype=wire_dtype,
        )
        for write in writes:
            slab = torch.full((write.nbytes,), 0xA5, dtype=torch.uint8)
            gather_write(source.memory, source.side, write, slab)
            scatter_write(target.memory, target.side, write, slab)
            yield from _pieces(write, slab, source, target)


def _pieces(write: SlabWrite, slab: torch.Tensor, source: Rank, target: Rank) -> Iterator[Piece]:
    for section in write.sections:
        part = section.part
        for i, plane in enumerate(part.planes):
            yield Piece(
                before=source.tokens(section, i, part.source_layer, plane.source_head),
                after=target.tokens(section, i, part.target_layer, plane.target_head),
                section=section,
                plane=i,
                slab=slab,
                wire=write.wire,
            )


def _encoded(piece: Piece) -> tuple[np.ndarray, np.ndarray]:
    """The plane's codes and scales, `[layers, tokens, heads, dim]` each, by a walk in order."""
    part, tokens = piece.section.part, piece.section.tokens
    at = piece.section.offset_bytes
    blocks = -(-tokens // CODEC_BLOCK_TOKENS)
    codes, scales = [], []
    for _ in range(part.layers):
        for i, plane in enumerate(part.planes):
            found = piece.slab[at : at + tokens * plane.elements]
            at += tokens * plane.elements
            if i == piece.plane:
                codes.append(found.reshape(tokens, plane.heads, plane.dim))
    at += -(at - piece.section.offset_bytes) % 16
    for _ in range(part.layers):
        for i, plane in enumerate(part.planes):
            count = blocks * plane.heads
            found = piece.slab[at : at + 4 * count].numpy().view(np.float32)
            at += 4 * count
            if i == piece.plane:
                block_scales = found.reshape(blocks, plane.heads, 1)
                scales.append(np.repeat(block_scales, CODEC_BLOCK_TOKENS, axis=0)[:tokens])
    assert 0 <= piece.section.offset_bytes + piece.section.nbytes - at < 16
    return _code_values(torch.stack(codes), piece.wire.codec), np.stack(scales)


def _code_values(codes: torch.Tensor, codec: Codec) -> np.ndarray:
    dtype = torch.int8 if codec is Codec.INT8 else torch.float8_e4m3fn
    return codes.view(dtype).float().numpy()


@settings(max_examples=60)
@given(cases(), _LOSSY, st.tuples(_DTYPES, _DTYPES))
def test_what_arrives_is_within_the_codecs_bounds(
    case: Case, codec: Codec, dtypes: tuple[str, str]
) -> None:
    for piece in _transferred(case, dtypes, codec):
        before, after = piece.before.float().numpy(), piece.after.float().numpy()
        codes, scales = _encoded(piece)
        decoded = torch.from_numpy(codes * scales)
        assert torch.equal(decoded.to(piece.after.dtype), piece.after)
        error = np.abs(before - decoded.numpy())
        if codec is Codec.INT8:
            assert (error <= scales * 0.50002).all()
        else:
            assert (error <= 1.0001 * np.maximum(np.abs(before) / 16, scales * 2.0**-10)).all()
        assert np.isfinite(after).all()
        _check_scales(before, scales, 127 if codec is Codec.INT8 else 448)


def _check_scales(before: np.ndarray, scales: np.ndarray, largest_code: int) -> None:
    for start in range(0, before.shape[1], CODEC_BLOCK_TOKENS):
        block = np.s_[:, start : start + CODEC_BLOCK_TOKENS]
        largest = np.abs(before[block]).max(axis=(1, 3), keepdims=True)
        wanted = np.maximum(largest / largest_code, LEAST_SCALE)
        assert np.allclose(scales[block], wanted, rtol=1e-6)


@settings(max_examples=60)
@given(cases(), st.tuples(_DTYPES, _DTYPES), st.none() | _DTYPES)
def test_other_dtypes_are_converted_once_on_each_side_that_needs_it(
    case: Case, dtypes: tuple[str, str], wire_dtype: str | None
) -> None:
    for piece in _transferred(case, dtypes, Codec.NONE, wire_dtype):
        assert piece.wire.dtype == (wire_dtype or dtypes[0])
        sent = piece.before.to(getattr(torch, piece.wire.dtype))
        assert torch.equal(sent.to(piece.after.dtype), piece.after)


_GROUP = LayerGroup(layers=(0,), planes=(Plane(name="k", heads=2, dim=4),))


def _round_trip(values: torch.Tensor, codec: Codec) -> torch.Tensor:
    """`values` `[tokens, 2, 4]` through a slab, from a float32 pool into another."""
    layout = KvLayout(groups=(_GROUP,), dtype="float32", block_size=len(values))
    one = ShardLayout(model=layout, shard=Shard())
    span = TokenSpan(start=0, tokens=len(values), next_position=len(values))
    (write,) = cut(one, one, span=span, staging_bytes=1 << 20, codec=codec)
    source, target = _rank(one, ((0,),)), _rank(one, ((0,),))
    source.memory.planes[0][0][0] = values
    slab = torch.zeros(write.nbytes, dtype=torch.uint8)
    gather_write(source.memory, source.side, write, slab)
    scatter_write(target.memory, target.side, write, slab)
    return target.memory.planes[0][0][0]


@pytest.mark.parametrize("codec", [Codec.FP8, Codec.INT8])
def test_all_zero_heads_stay_zero_and_do_not_touch_others(codec: Codec) -> None:
    values = torch.zeros(20, 2, 4)
    values[3, 1, 2] = 5.0
    assert torch.equal(_round_trip(values, codec), values)


@pytest.mark.parametrize("codec", [Codec.FP8, Codec.INT8])
@pytest.mark.parametrize("size", [3e38, 1.0, 1e-38, 1e-44])
def test_the_largest_and_the_least_floats_keep_their_size(codec: Codec, size: float) -> None:
    values = torch.full((20, 2, 4), size)
    values[0] = -values[0]
    assert torch.allclose(_round_trip(values, codec), values, rtol=1e-5, atol=LEAST_SCALE / 2)


@pytest.mark.parametrize("codec", [Codec.FP8, Codec.INT8])
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_none_marks_its_block_and_head_only(codec: Codec, broken: float) -> None:
    values = torch.ones(20, 2, 4)
    values[3, 1, 2] = broken
    found = _round_trip(values, codec)
    assert found[:16, 1].isnan().all()
    found[:16, 1] = 1.0
    assert torch.equal(found, torch.ones(20, 2, 4))


class _Largest(TorchDispatchMode):
    """The largest float32 that any operation makes."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.dtype is torch.float32:
            self.bytes = max(self.bytes, found.nbytes)
        return found


@pytest.mark.parametrize("codec", [Codec.FP8, Codec.INT8])
def test_no_copy_of_a_whole_slab_is_made(codec: Codec) -> None:
    group = LayerGroup(layers=(0, 1), planes=(Plane(name="k", heads=8, dim=128),))
    layout = KvLayout(groups=(group,), dtype="bfloat16", block_size=16)
    one = ShardLayout(model=layout, shard=Shard())
    span = TokenSpan(start=0, tokens=4096, next_position=4096)
    (write,) = cut(one, one, span=span, staging_bytes=1 << 30, codec=codec)
    rank = _rank(one, (tuple(range(256)),))
    slab = torch.zeros(write.nbytes, dtype=torch.uint8)
    with _Largest() as seen:
        gather_write(rank.memory, rank.side, write, slab)
        scatter_write(rank.memory, rank.side, write, slab)
    assert 0 < seen.bytes <= 4 << 20 < 2 * 4096 * 8 * 128 * 4
