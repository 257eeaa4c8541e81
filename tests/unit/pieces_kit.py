"""Random KV pools, and what the pieces of a span carry, spelled out token by token."""

from __future__ import annotations

import random

import torch

from kvpool.core.layout.layout import NO_BLOCK, BlockId, KvLayout, LayerGroup, Plane, Tables
from kvpool.core.transfer.piece import Piece, cut_span
from kvpool.core.transfer.write import Side, SlabWrite, TokenSpan
from kvpool.memory import direct
from kvpool.memory.kv_memory import KvMemory

KV = (Plane(name="k", heads=2, dim=3), Plane(name="v", heads=2, dim=5))
LATENT = (Plane(name="latent", heads=1, dim=7),)
BLOCKS = 24


def layout(block_size: int, dtype: str = "bfloat16", window: int | None = 8) -> KvLayout:
    groups = (
        LayerGroup(layers=(0, 2, 4), planes=KV),
        LayerGroup(layers=(1, 3), planes=LATENT, window=window),
    )
    return KvLayout(groups=groups, dtype=dtype, block_size=block_size)


def random_memory(layout: KvLayout, seed: int, blocks: int = BLOCKS, *, ranks: int = 1) -> KvMemory:
    memory = KvMemory(layout, blocks, "cpu", ranks=ranks)
    generator = torch.Generator().manual_seed(seed)
    shape = memory.flat.shape
    memory.flat.copy_(torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8))
    return memory


def random_tables(layout: KvLayout, tokens: int, seed: int, blocks: int = BLOCKS) -> Tables:
    draw = random.Random(seed)
    return tuple(
        tuple(BlockId(b) for b in draw.sample(range(blocks), layout.blocks_for(tokens)))
        for _ in layout.groups
    )


def without_unseen(tables: Tables, layout: KvLayout, span: TokenSpan) -> Tables:
    """What lies outside the windows is not held."""
    held = []
    for group, table in zip(layout.groups, tables, strict=True):
        seen = 0 if group.window is None else max(0, span.next_position - group.window + 1)
        first = seen // layout.block_size
        held.append((NO_BLOCK,) * min(first, len(table)) + table[first:])
    return tuple(held)


def side(memory: KvMemory, tables: Tables) -> Side:
    return Side(tables=tables, block_size=memory.layout.block_size)


def pieces(
    layout: KvLayout, span: TokenSpan, slab_bytes: int = 1 << 20
) -> list[tuple[Piece, SlabWrite]]:
    writes = cut_span(layout, span, slab_bytes)
    return [(Piece(span=span, index=i), write) for i, write in enumerate(writes)]


def slot(tables: Tables, group: int, token: int, block_size: int) -> int:
    return tables[group][token // block_size] * block_size + token % block_size


def seen(layout: KvLayout, group: int, span: TokenSpan) -> list[int]:
    """Tokens of the span that a query at the end of the prompt still sees."""
    window = layout.groups[group].window
    tokens = range(span.start, span.start + span.tokens)
    return [t for t in tokens if window is None or span.next_position - t < window]


def assert_moved(
    source: KvMemory,
    theirs: Tables,
    target: KvMemory,
    ours: Tables,
    span: TokenSpan,
    before: KvMemory,
) -> None:
    """Every token that is seen has the source's bytes, and no other slot was touched."""
    sizes = source.layout.block_size, target.layout.block_size
    for group, planes in enumerate(target.planes):
        tokens = seen(target.layout, group, span)
        here = [slot(ours, group, token, sizes[1]) for token in tokens]
        there = [slot(theirs, group, token, sizes[0]) for token in tokens]
        others = [s for s in range(planes[0].shape[1]) if s not in set(here)]
        for plane, origin, old in zip(
            planes, source.planes[group], before.planes[group], strict=True
        ):
            assert same(plane[:, here], origin[:, there])
            assert same(plane[:, others], old[:, others])


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Byte for byte: random bytes are NaNs too."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def assert_copied_alike(seed: int, device: str) -> None:
    """From pool to pool by the device's kernel, on `device`, as by the CPU's copies; block sizes
    and the ranks that share the heads differ."""
    draw = random.Random(seed)
    groups, dtype = _random_groups(draw), draw.choice(["bfloat16", "float32"])
    theirs, ours = (
        random_memory(
            KvLayout(groups=groups, dtype=dtype, block_size=draw.choice(sizes)),
            draw.randrange(1 << 20),
            ranks=draw.choice([1, 2, 4]),
        )
        for sizes in ([4, 8], [3, 16])
    )
    tokens = draw.randrange(2, 60)
    span = TokenSpan(start=tokens // 3, tokens=tokens - tokens // 3, next_position=tokens)
    sides = [
        side(m, random_tables(m.layout, tokens, seed + i)) for i, m in enumerate((ours, theirs))
    ]
    there, peer = (KvMemory.over(m.map, m.flat.clone().to(device)) for m in (ours, theirs))
    before = ours.flat.clone()
    for _, write in pieces(ours.layout, span, draw.choice([2_000, 1 << 20])):
        direct._copy(ours, sides[0], theirs, sides[1], write)
        for section in write.sections:
            direct._copy_at_once(there, sides[0], peer, sides[1], section)
    assert same(ours.flat, there.flat.cpu())
    assert not same(ours.flat, before)


def _random_groups(draw: random.Random) -> tuple[LayerGroup, ...]:
    """All layers of one, and a window's of another."""
    planes = tuple(
        Plane(name=name, heads=draw.choice([1, 2, 4]), dim=draw.choice([3, 8, 64])) for name in "kv"
    )
    windowed = LayerGroup(layers=(3, 4), planes=planes[:1], window=draw.choice([8, 30]))
    return (LayerGroup(layers=(0, 1, 2), planes=planes), windowed)
