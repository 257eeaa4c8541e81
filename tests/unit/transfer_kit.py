"""Random shards of random layouts, what each must hold by a walk over single tokens, layers and
heads, and an executor of plans in numpy that checks that nothing is written twice."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from kvpool.core.layout.layout import NO_BLOCK, BlockId, KvLayout, LayerGroup, Plane, Tables
from kvpool.core.layout.shards import PlaneSlice, Shard, ShardLayout
from kvpool.core.transfer.plan import TransferPlan, plan
from kvpool.core.transfer.write import Side, SlabSection, SlabWrite, TokenSpan

_ROW_BYTES_MOST = 2 * 12 * 8 * 4
"""One token of one layer: two planes of 12 heads of 8 elements."""
_DTYPES = {"bfloat16": np.uint16, "float32": np.uint32}
Pool = list[list[np.ndarray]]
"""# layer group |-> plane |-> `[layers, slots, heads, dim]`"""


@dataclass(frozen=True, kw_only=True)
class Case:
    sources: tuple[ShardLayout, ...]
    target: ShardLayout
    span: TokenSpan
    staging_bytes: int
    layer_groups: int
    seed: int


@st.composite
def layouts(draw: st.DrawFn, unit: int) -> tuple[LayerGroup, ...]:
    """Groups of interleaved layers; head counts that every degree of the family can split."""
    owners = draw(st.lists(st.integers(0, 2), min_size=1, max_size=5))
    groups = []
    for group in sorted(set(owners)):
        heads = st.sampled_from([1, unit, 2 * unit, 4 * unit])
        planes = tuple(
            Plane(name=f"p{i}", heads=draw(heads), dim=draw(st.sampled_from([1, 2, 3, 8])))
            for i in range(draw(st.integers(1, 2)))
        )
        layers = tuple(layer for layer, owner in enumerate(owners) if owner == group)
        window = draw(st.none() | st.integers(1, 300))
        groups.append(LayerGroup(layers=layers, planes=planes, window=window))
    return tuple(groups)


def _stages(draw: st.DrawFn, layers: int) -> list[range | None]:
    cutting = draw(st.none() | st.integers(0, layers))
    return [None] if cutting is None else [range(cutting), range(cutting, layers)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    unit = draw(st.sampled_from([2, 3]))
    degrees = draw(st.sampled_from([(1, 1), (1, unit), (unit, 2 * unit), (1, 2 * unit)]))
    source_size, target_size = draw(st.permutations(degrees))
    groups = draw(layouts(unit))
    layers = sum(len(group.layers) for group in groups)
    dtype = draw(st.sampled_from(sorted(_DTYPES)))
    models = [
        KvLayout(groups=groups, dtype=dtype, block_size=draw(st.sampled_from([1, 3, 8, 16])))
        for _ in range(2)
    ]
    sources = tuple(
        ShardLayout(model=models[0], shard=Shard(rank=rank, size=source_size, layers=stage))
        for stage in _stages(draw, layers)
        for rank in range(source_size)
    )
    rank = draw(st.integers(0, target_size - 1))
    stage = draw(st.sampled_from(_stages(draw, layers)))
    target = ShardLayout(model=models[1], shard=Shard(rank=rank, size=target_size, layers=stage))
    start, tokens = draw(st.integers(0, 40)), draw(st.integers(0, 400))
    last = start + tokens + draw(st.integers(0, 60))
    return Case(
        sources=sources,
        target=target,
        span=TokenSpan(start=start, tokens=tokens, next_position=last),
        staging_bytes=draw(st.integers(_ROW_BYTES_MOST, 40_000)),
        layer_groups=draw(st.integers(1, 4)),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def draw_held(case: Case, layout: ShardLayout, draw: np.random.Generator) -> Tables:
    """Scattered blocks for the span; groups with a window may have freed what they don't see."""
    size, held = layout.model.block_size, []
    end = -(-(case.span.start + case.span.tokens) // size)
    for group in layout.model.groups:
        freed = min(_first_seen(case.span, group.window) // size, end)
        first = int(draw.integers(0, freed + 1))
        ids = draw.permutation(end + 4)[: end - first]
        if draw.integers(2):
            ids = np.sort(ids)
        held.append((NO_BLOCK,) * first + tuple(BlockId(int(i)) for i in ids))
    return tuple(held)


def _first_seen(span: TokenSpan, window: int | None) -> int:
    """By asking of each token whether a query at or after `next_position` may look at it."""
    token = span.start
    while token < span.start + span.tokens:
        if window is None or span.next_position - token < window:
            return token
        token += 1
    return token


def holds(shard: Shard, plane: Plane) -> list[int]:
    """The heads of a rank, asked head by head."""
    if plane.heads >= shard.size:
        return [h for h in range(plane.heads) if h * shard.size // plane.heads == shard.rank]
    return [h for h in range(plane.heads) if shard.rank * plane.heads // shard.size == h]


def stage_layers(shard: Shard, group: LayerGroup) -> list[int]:
    return [layer for layer in group.layers if shard.layers is None or layer in shard.layers]


def _empty_pool(layout: ShardLayout, held: Tables) -> Pool:
    pool: Pool = []
    for group, blocks in zip(layout.model.groups, held, strict=True):
        slots = (len(blocks) + 4) * layout.model.block_size
        layers = len(stage_layers(layout.shard, group))
        pool.append(
            [
                np.zeros(
                    (layers, slots, len(holds(layout.shard, plane)), plane.dim),
                    dtype=_DTYPES[layout.model.dtype],
                )
                for plane in group.planes
            ]
        )
    return pool


def _value(group: int, layer: int, plane: int, head: int, token: int, dim: int) -> np.ndarray:
    """`[dim]` 16-bit values that differ between neighbours in every direction; never zero."""
    mixed = hash((group, layer, plane, head, token))
    return np.array([(mixed + i * 7919) % 65_521 + 1 for i in range(dim)])


def _each_slot(
    case: Case, layout: ShardLayout, held: Tables
) -> list[tuple[int, int, tuple[int, int, int], np.ndarray]]:
    """(group, plane, (local layer, slot, local head), value) of all that the span needs there."""
    size, found = layout.model.block_size, []
    for g, group in enumerate(layout.model.groups):
        for token in range(_first_seen(case.span, group.window), _end(case.span)):
            block = held[g][token // size]
            slot = block * size + token % size
            for l, layer in enumerate(stage_layers(layout.shard, group)):  # noqa: E741
                for p, plane in enumerate(group.planes):
                    for h, head in enumerate(holds(layout.shard, plane)):
                        value = _value(g, layer, p, head, token, plane.dim)
                        found.append((g, p, (l, slot, h), value))
    return found


def _end(span: TokenSpan) -> int:
    return span.start + span.tokens


def _pieces(section: SlabSection, payload: np.ndarray) -> list[tuple[int, PlaneSlice, np.ndarray]]:
    """(layer within the part, plane, its `[token, head, dim]`), in canonical order."""
    assert section.offset_bytes % payload.itemsize == 0
    at, pieces = section.offset_bytes // payload.itemsize, []
    for layer in range(section.part.layers):
        for plane in section.part.planes:
            count = section.tokens * plane.elements
            shape = (section.tokens, plane.heads, plane.dim)
            pieces.append((layer, plane, payload[at : at + count].reshape(shape)))
            at += count
    assert at * payload.itemsize == section.offset_bytes + section.nbytes
    return pieces


def _gather(write: SlabWrite, side: Side, pool: Pool, payload: np.ndarray) -> None:
    for section in write.sections:
        part = section.part
        for layer, plane, tokens in _pieces(section, payload):
            tensor = pool[part.group][plane.plane][part.source_layer + layer]
            heads = slice(plane.source_head, plane.source_head + plane.heads)
            for run in side.runs(section):
                rows = slice(run.position, run.position + run.tokens)
                assert not tokens[rows].any(), "a slab token was written twice"
                tokens[rows] = tensor[run.slot : run.slot + run.tokens, heads]


def _scatter(write: SlabWrite, side: Side, pool: Pool, payload: np.ndarray) -> None:
    for section in write.sections:
        part = section.part
        for layer, plane, tokens in _pieces(section, payload):
            tensor = pool[part.group][plane.plane][part.target_layer + layer]
            heads = slice(plane.target_head, plane.target_head + plane.heads)
            for run in side.runs(section):
                into = tensor[run.slot : run.slot + run.tokens, heads]
                assert into.shape[1] == plane.heads
                assert not into.any(), "a target slot was written twice"
                into[:] = tokens[run.position : run.position + run.tokens]


def carry_out(transfer: TransferPlan, source: Pool, target: Pool, dtype: str) -> list[np.ndarray]:
    """Returns the slabs that travelled."""
    slabs = []
    for write in transfer.writes:
        payload = np.zeros(write.nbytes, dtype=np.uint8).view(_DTYPES[dtype])
        _gather(write, transfer.source, source, payload)
        assert payload.all(), "a part of the slab was not written"
        _scatter(write, transfer.target, target, payload)
        slabs.append(payload)
    return slabs


@dataclass(frozen=True, kw_only=True)
class Move:
    layout: ShardLayout
    pool: Pool
    transfer: TransferPlan


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One target rank, empty, what it must hold afterwards, and what every source rank sends."""

    target: Pool
    expected: Pool
    needed_bytes: int
    moves: tuple[Move, ...]


def new_trial(case: Case) -> Trial:
    draw = np.random.default_rng(case.seed)
    held = draw_held(case, case.target, draw)
    expected, needed_elements = _filled_pool(case, case.target, held)
    return Trial(
        target=_empty_pool(case.target, held),
        expected=expected,
        needed_bytes=needed_elements * case.target.model.element_bytes,
        moves=tuple(_new_move(case, source, held, draw) for source in case.sources),
    )


def _new_move(
    case: Case, source: ShardLayout, target_held: Tables, draw: np.random.Generator
) -> Move:
    held = draw_held(case, source, draw)
    transfer = plan(
        held,
        target_held,
        source,
        case.target,
        span=case.span,
        staging_bytes=case.staging_bytes,
        layer_groups=case.layer_groups,
    )
    return Move(layout=source, pool=_filled_pool(case, source, held)[0], transfer=transfer)


def _filled_pool(case: Case, layout: ShardLayout, held: Tables) -> tuple[Pool, int]:
    """A pool with the span's values in the right places, zero elsewhere; elements written."""
    pool, elements = _empty_pool(layout, held), 0
    for group, plane, where, value in _each_slot(case, layout, held):
        pool[group][plane][where] = value
        elements += len(value)
    return pool, elements
