"""KV shared out among ranks: everything that moves it finds the same bytes as in one pool."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvpool.core.layout.codec import Codec
from kvpool.core.layout.layout import BlockId, KvLayout, LayerGroup, Plane
from kvpool.core.layout.shards import Shard, ShardLayout
from kvpool.core.transfer.messages import EXACT
from kvpool.core.transfer.piece import transfer_shape
from kvpool.core.transfer.plan import cut
from kvpool.core.transfer.pool_map import KvFacts, PoolMap
from kvpool.core.transfer.write import Side, SlabWrite, TokenSpan
from kvpool.memory import collate
from kvpool.memory.collate import gather_write, move_parts, scatter_write
from kvpool.memory.digest import digest
from kvpool.memory.direct import fetch
from kvpool.memory.host import HostBlocks
from kvpool.memory.kv_memory import KvMemory
from kvpool.memory.probe import measure_copies
from kvrelay.errors import PeerError
from tests.unit.pieces_kit import BLOCKS, random_memory, random_tables
from tests.unit.test_memory_direct import Unmapped, connected

PLANES = (Plane(name="k", heads=4, dim=3), Plane(name="v", heads=4, dim=5))
LAYOUT = KvLayout(
    groups=(
        LayerGroup(layers=(0, 2), planes=PLANES),
        LayerGroup(layers=(1,), planes=PLANES[:1], window=30),
    ),
    dtype="bfloat16",
    block_size=8,
)
SPAN = TokenSpan(start=5, tokens=41, next_position=46)


DEEP = replace(
    LAYOUT,
    groups=(
        LayerGroup(layers=(0, 2, 3, 5), planes=PLANES),
        LayerGroup(layers=(1, 4), planes=PLANES[:1], window=30),
        LayerGroup(layers=(6,), planes=(Plane(name="latent", heads=1, dim=7),)),
    ),
)
CUTS = [
    (range(3, 7), range(3)),
    (range(1, 7), range(1)),  # the first stage has none of two groups
    (range(5, 7), range(3, 5), range(3)),
]
"""Each stage's layers, the last stage's first."""
PARTS = [(stages, ranks) for stages in CUTS for ranks in (1, 2, 8)]


def numbers(seed: int, layout: KvLayout = LAYOUT) -> KvMemory:
    """One pool of finite numbers."""
    memory, generator = KvMemory(layout, BLOCKS, "cpu"), torch.Generator().manual_seed(seed)
    for planes in memory.planes:
        for plane in planes:
            plane.copy_(torch.randn(plane.shape, generator=generator))
    return memory


def split(
    memory: KvMemory, ranks: int, stages: tuple[range, ...] = (), *, apart: bool = False
) -> KvMemory:
    """The same KV, each head and layer with its ranks; `apart`: as on GPUs of their own."""
    pool = PoolMap(layout=memory.layout, blocks=memory.blocks, ranks=ranks, stages=stages)
    if apart or stages:
        flats = [torch.zeros(part.nbytes, dtype=torch.uint8) for part in pool.parts]
        shared = KvMemory.of_parts(pool, flats)
    else:
        shared = KvMemory(memory.layout, memory.blocks, "cpu", ranks=ranks)
    for rank, part in enumerate(shared.parts):
        layers = stages[rank // ranks] if stages else None
        fill(part, memory, Shard(rank=rank % ranks, size=ranks, layers=layers))
    return shared


def fill(part: KvMemory, memory: KvMemory, shard: Shard) -> None:
    for group, ours, whole in zip(memory.layout.groups, part.planes, memory.planes, strict=True):
        held = [layer in (shard.layers or group.layers) for layer in group.layers]
        for plane, values in zip(ours, whole, strict=True):
            heads = shard.heads(values.shape[2])
            plane.copy_(values[torch.tensor(held)][:, :, heads.start : heads.stop])


def planes_of(memory: KvMemory) -> list[list[torch.Tensor]]:
    """# plane |-> rank |-> `[layers, slots, heads, dim]`"""
    by_rank = [[plane for planes in part.planes for plane in planes] for part in memory.parts]
    return [list(planes) for planes in zip(*by_rank, strict=True)]


def assert_same(one: KvMemory, other: KvMemory) -> None:
    """Whatever the ranks are; all copies of a head are alike."""
    for ours, theirs in zip(planes_of(one), planes_of(other), strict=True):
        assert torch.equal(all_heads(ours).view(torch.int16), all_heads(theirs).view(torch.int16))


def assert_split(shared: KvMemory, memory: KvMemory) -> None:
    """Each part has its share of `memory`, bit by bit."""
    expected = split(memory, shared.map.ranks, shared.map.stages)
    for ours, theirs in zip(shared.parts, expected.parts, strict=True):
        assert torch.equal(ours.flat, theirs.flat)


def all_heads(by_rank: list[torch.Tensor]) -> torch.Tensor:
    total = LAYOUT.groups[0].planes[0].heads
    copies = max(1, len(by_rank) // total)
    for rank, plane in enumerate(by_rank):
        assert torch.equal(
            plane.view(torch.int16), by_rank[rank // copies * copies].view(torch.int16)
        )
    return torch.cat(by_rank[::copies], dim=2)


def side(seed: int, layout: KvLayout = LAYOUT) -> Side:
    return Side(tables=random_tables(layout, 46, seed), block_size=layout.block_size)


def written(codec: Codec = Codec.NONE, wire_dtype: str | None = None) -> SlabWrite:
    one = ShardLayout(model=LAYOUT, shard=Shard())
    (write,) = cut(one, one, span=SPAN, staging_bytes=1 << 20, codec=codec, wire_dtype=wire_dtype)
    return write


def deep_writes(codec: Codec = Codec.NONE, wire_dtype: str | None = None) -> list[SlabWrite]:
    """Of some of the layers each; no write ends where a stage does."""
    one = ShardLayout(model=DEEP, shard=Shard())
    writes = cut(
        one,
        one,
        span=SPAN,
        staging_bytes=1 << 20,
        layer_groups=3,
        codec=codec,
        wire_dtype=wire_dtype,
    )
    assert [write.last_layer for write in writes] == [1, 3, 6]
    return [*writes]


SIDES = [(1, 2), (2, 1), (4, 2), (2, 4), (2, 2), (8, 1), (1, 8), (8, 2), (2, 16), (16, 8)]
FORMATS = [(Codec.NONE, None), (Codec.NONE, "float32"), (Codec.INT8, None), (Codec.FP8, None)]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("codec", "wire_dtype"), FORMATS)
def test_a_slab_is_the_same_whoever_holds_the_heads(
    ranks: int, codec: Codec, wire_dtype: str | None, apart: bool
) -> None:
    write, memory = written(codec, wire_dtype), numbers(1)
    slabs = [torch.zeros(write.nbytes, dtype=torch.uint8) for _ in range(2)]
    gather_write(memory, side(1), write, slabs[0])
    gather_write(split(memory, ranks, apart=apart), side(1), write, slabs[1])
    assert torch.equal(*slabs)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("codec", "wire_dtype"), FORMATS)
def test_a_slab_is_shared_out(
    ranks: int, codec: Codec, wire_dtype: str | None, apart: bool
) -> None:
    write, memory = written(codec, wire_dtype), numbers(1)
    slab = torch.zeros(write.nbytes, dtype=torch.uint8)
    gather_write(numbers(2), side(2), write, slab)
    shared = split(memory, ranks, apart=apart)
    scatter_write(memory, side(1), write, slab)
    scatter_write(shared, side(1), write, slab)
    assert_same(shared, memory)


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "unmapped"])
@pytest.mark.parametrize(("theirs", "ours"), SIDES)
def test_blocks_are_read_from_the_ranks_of_a_peer(theirs: int, ours: int, mapped: bool) -> None:
    source, target = numbers(1), numbers(2)
    expected = numbers(2)
    slab = torch.zeros(written().nbytes, dtype=torch.uint8)
    gather_write(source, side(1), written(), slab)
    scatter_write(expected, side(2), written(), slab)
    peer, shared = split(source, theirs), split(target, ours)
    with connected() as (owner, link):
        kv = facts(peer, owner.adopt(peer.flat).name)
        reader = link if mapped else Unmapped(link)
        fetch(shared, side(2), reader, kv, side(1), written())  # type: ignore[arg-type]
    if isinstance(reader, Unmapped):
        shape = transfer_shape(written(), side(1), side(2), (theirs, ours))
        assert reader.reads == shape.descriptors
    assert_same(shared, expected)


def facts(memory: KvMemory, region: str) -> KvFacts:
    return KvFacts(
        dtype=LAYOUT.dtype,
        block_size=LAYOUT.block_size,
        blocks=memory.blocks,
        slab_bytes=0,
        region=region,
        ranks=memory.map.ranks,
    )


def test_a_peer_whose_ranks_can_not_share_the_heads_is_not_read() -> None:
    memory = numbers(1)
    with connected() as (owner, link):
        kv = replace(facts(memory, owner.adopt(memory.flat).name), ranks=3)
        with pytest.raises(PeerError, match=r"pool of 3 ranks: .* can't split 4 KV heads"):
            fetch(memory, side(2), link, kv, side(1), written())


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_a_pool_node_gets_whole_blocks(ranks: int, apart: bool) -> None:
    memory = random_memory(LAYOUT, 1)
    places = [(BlockId(i), BlockId((5 * i + 1) % BLOCKS)) for i in (7, 2, 3)]
    staging = [torch.empty(3 * LAYOUT.bytes_per_block, dtype=torch.uint8) for _ in range(2)]
    whole = HostBlocks(memory, staging[0])
    shared = HostBlocks(split(memory, ranks, apart=apart), staging[1])
    assert torch.equal(whole.gather(places), shared.gather(places))
    elsewhere = [(BlockId(11), BlockId(4)), (BlockId(12), BlockId(3)), (BlockId(0), BlockId(0))]
    whole.scatter(elsewhere)
    shared.scatter(elsewhere)
    assert_same(shared._memory, memory)


@pytest.mark.parametrize("apart", [False, True])
def test_copies_are_measured_in_the_parts_of_the_pool(
    apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In those that lie apart, as each transfer does it: through a slab for each rank."""
    memory, moved = split(numbers(1), 2, apart=apart), []

    def move(pool: KvMemory, *rest: Any) -> None:
        moved.append(pool)
        move_parts(pool, *rest)

    monkeypatch.setattr(collate, "move_parts", move)
    assert measure_copies(memory, 1 << 20)["cpu"]
    assert [*dict.fromkeys(map(id, moved))] == ([id(memory)] if apart else [])
    assert not any(plane.any() for planes in planes_of(memory) for plane in planes)


@pytest.mark.parametrize("apart", [False, True])
def test_a_block_is_copied_on_every_rank(apart: bool) -> None:
    memory = numbers(1)
    shared = split(memory, 2, apart=apart)
    for one in (memory, shared):
        one.copy_blocks((((BlockId(3), BlockId(9)),), ((BlockId(2), BlockId(0)),)))
    assert_same(shared, memory)
    assert_same(shared, split(memory, 4))


@pytest.mark.parametrize(("stages", "ranks"), PARTS)
@pytest.mark.parametrize(("codec", "wire_dtype"), FORMATS)
def test_a_slab_is_the_same_whichever_stage_holds_the_layers(
    stages: tuple[range, ...], ranks: int, codec: Codec, wire_dtype: str | None
) -> None:
    memory = numbers(1, DEEP)
    shared = split(memory, ranks, stages)
    for write in deep_writes(codec, wire_dtype):
        slabs = [torch.zeros(write.nbytes, dtype=torch.uint8) for _ in range(2)]
        gather_write(memory, side(1, DEEP), write, slabs[0])
        gather_write(shared, side(1, DEEP), write, slabs[1])
        assert torch.equal(*slabs)


@pytest.mark.parametrize(("stages", "ranks"), PARTS)
@pytest.mark.parametrize(("codec", "wire_dtype"), FORMATS)
def test_a_slab_is_shared_out_to_stages_that_are_cut_otherwise(
    stages: tuple[range, ...], ranks: int, codec: Codec, wire_dtype: str | None
) -> None:
    source, memory = split(numbers(2, DEEP), 2, CUTS[0]), numbers(1, DEEP)
    shared = split(memory, ranks, stages)
    for write in deep_writes(codec, wire_dtype):
        slab = torch.zeros(write.nbytes, dtype=torch.uint8)
        gather_write(source, side(2, DEEP), write, slab)
        scatter_write(memory, side(1, DEEP), write, slab)
        scatter_write(shared, side(1, DEEP), write, slab)
    assert_split(shared, memory)


@pytest.mark.parametrize("wire_dtype", ["bfloat16", "float32"])
def test_layers_go_through_no_second_slab(wire_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless heads are apart too, or scales lie behind all values."""
    monkeypatch.delattr(collate, "move_parts")
    shared = split(numbers(1, DEEP), 1, CUTS[2])
    for write in deep_writes(Codec.NONE, wire_dtype):
        slab = torch.zeros(write.nbytes, dtype=torch.uint8)
        gather_write(shared, side(1, DEEP), write, slab)
        scatter_write(shared, side(1, DEEP), write, slab)


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "unmapped"])
@pytest.mark.parametrize("theirs", [1, 2, 8])
@pytest.mark.parametrize(("stages", "ranks"), PARTS)
def test_stages_read_the_blocks_of_a_peer(
    stages: tuple[range, ...], ranks: int, theirs: int, mapped: bool
) -> None:
    peer, expected = split(numbers(1, DEEP), theirs), numbers(2, DEEP)
    shared = split(expected, ranks, stages)
    with connected() as (owner, link):
        reader = link if mapped else Unmapped(link)
        kv = facts(peer, owner.adopt(peer.flat).name)
        for write in deep_writes():
            slab = torch.zeros(write.nbytes, dtype=torch.uint8)
            gather_write(peer, side(1, DEEP), write, slab)
            scatter_write(expected, side(2, DEEP), write, slab)
            fetch(shared, side(2, DEEP), reader, kv, side(1, DEEP), write)  # type: ignore[arg-type]
    if isinstance(reader, Unmapped):
        sides, pair = (side(1, DEEP), side(2, DEEP)), (theirs, ranks)
        shapes = [transfer_shape(write, *sides, pair) for write in deep_writes()]
        assert reader.reads == sum(shape.descriptors for shape in shapes)
    assert_split(shared, expected)


@pytest.mark.parametrize(("stages", "ranks"), PARTS)
def test_a_pool_node_gets_the_blocks_of_all_stages(stages: tuple[range, ...], ranks: int) -> None:
    memory = random_memory(DEEP, 1)
    places = [(BlockId(i), BlockId((5 * i + 1) % BLOCKS), BlockId(i + 9)) for i in (7, 2, 3)]
    staging = [torch.empty(3 * DEEP.bytes_per_block, dtype=torch.uint8) for _ in range(2)]
    pool = split(memory, ranks, stages)
    whole, shared = HostBlocks(memory, staging[0]), HostBlocks(pool, staging[1])
    assert torch.equal(whole.gather(places), shared.gather(places))
    for blocks in (whole, shared):
        blocks.scatter(
            [(BlockId(11), BlockId(4), BlockId(0)), (BlockId(0), BlockId(0), BlockId(5))]
        )
    assert_split(pool, memory)


@pytest.mark.parametrize(("stages", "ranks"), PARTS)
def test_the_digest_is_the_same_whoever_holds_heads_and_layers(
    stages: tuple[range, ...], ranks: int
) -> None:
    memory = numbers(1, DEEP)
    (whole,) = digest(memory, side(1, DEEP).tables, SPAN)
    found = digest(split(memory, ranks, stages), side(1, DEEP).tables, SPAN)
    assert len(found) == ranks, "each rank has a copy of the latent"
    assert max(whole.distance(one) for one in found) < EXACT / 10


def test_a_wrong_layer_of_any_stage_is_found() -> None:
    memory = numbers(1, DEEP)
    shared = split(memory, 2, CUTS[2])
    (whole,) = digest(memory, side(1, DEEP).tables, SPAN)
    keys = shared.parts[5].planes[0][0]  # of layers 0 and 2, heads 2 and 3
    keys.copy_(keys.flip(0))
    assert max(whole.distance(one) for one in digest(shared, side(1, DEEP).tables, SPAN)) > EXACT


@pytest.mark.parametrize(("stages", "ranks"), PARTS)
def test_a_block_is_copied_in_every_stage(stages: tuple[range, ...], ranks: int) -> None:
    memory = numbers(1, DEEP)
    shared = split(memory, ranks, stages)
    pairs = tuple(((BlockId(3 + group), BlockId(9)),) for group in range(3))
    for one in (memory, shared):
        one.copy_blocks(pairs)
    assert_split(shared, memory)


@pytest.mark.parametrize("ranks", [1, 2])
def test_copies_are_measured_in_the_parts_of_stages(ranks: int) -> None:
    memory = split(numbers(1, DEEP), ranks, CUTS[2])
    assert measure_copies(memory, 1 << 20)["cpu"]
    assert not any(part.flat.any() for part in memory.parts)


@pytest.mark.parametrize(("stages", "ranks"), PARTS)
def test_every_head_of_every_layer_is_held_once(stages: tuple[range, ...], ranks: int) -> None:
    """By each copy; a part has room for what its rank holds and no more."""
    pool = PoolMap(layout=DEEP, blocks=BLOCKS, ranks=ranks, stages=stages)
    places = [(g, p) for g, group in enumerate(DEEP.groups) for p in range(len(group.planes))]
    for group, plane in places:
        spec = DEEP.groups[group]
        every = [
            (i, head) for i in range(len(spec.layers)) for head in range(spec.planes[plane].heads)
        ]
        holders = set[int]()
        for copy in range(pool.copies(group, plane)):
            shares = [*pool.shares(group, plane, copy)]
            assert sorted((i, h) for s in shares for i in s.layers for h in s.heads) == every
            assert not holders & {share.rank for share in shares}
            holders |= {share.rank for share in shares}
            for share in shares:
                held = pool.parts[share.rank].layout.groups[group]
                layers = tuple(spec.layers[i] for i in share.layers)
                assert (held.layers, held.planes[plane].heads) == (layers, len(share.heads))
    assert pool.nbytes == sum(part.nbytes for part in pool.parts)
    assert (pool.bytes_per_block == DEEP.bytes_per_block) == (ranks == 1), "the latent has copies"


def test_a_pool_of_stages_is_no_flat_memory() -> None:
    pool = PoolMap(layout=LAYOUT, blocks=3, ranks=2, stages=(range(1, 3), range(1)))
    assert pool.bytes_per_block == LAYOUT.bytes_per_block
    with pytest.raises(AssertionError, match="lie apart"):
        KvMemory.over(pool, torch.zeros(pool.nbytes, dtype=torch.uint8))
    with pytest.raises(AssertionError, match="lies apart"):
        pool.part_offset(1)


def test_stages_that_miss_a_layer_are_refused() -> None:
    pool = PoolMap(layout=LAYOUT, blocks=3, stages=(range(2, 3), range(1)))
    with pytest.raises(AssertionError, match=r"range\(2, 3\)"):
        next(pool.shares(0, 0, 0))
