"""KV shared out among ranks: everything that moves it finds the same bytes as in one pool."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvpool.core.layout.codec import Codec
from kvpool.core.layout.layout import BlockId, KvLayout, LayerGroup, Plane
from kvpool.core.layout.shards import Shard, ShardLayout
from kvpool.core.transfer.piece import transfer_shape
from kvpool.core.transfer.plan import cut
from kvpool.core.transfer.pool_map import KvFacts
from kvpool.core.transfer.write import Side, SlabWrite, TokenSpan
from kvpool.memory import collate
from kvpool.memory.collate import gather_write, move_parts, scatter_write
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


def numbers(seed: int, layout: KvLayout = LAYOUT) -> KvMemory:
    """One pool of finite numbers."""
    memory, generator = KvMemory(layout, BLOCKS, "cpu"), torch.Generator().manual_seed(seed)
    for planes in memory.planes:
        for plane in planes:
            plane.copy_(torch.randn(plane.shape, generator=generator))
    return memory


def split(memory: KvMemory, ranks: int, *, apart: bool = False) -> KvMemory:
    """The same KV, each head with its rank; `apart`: as on GPUs of their own."""
    shared = KvMemory(memory.layout, memory.blocks, "cpu", ranks=ranks)
    if apart:
        flats = [torch.zeros(part.nbytes, dtype=torch.uint8) for part in shared.map.parts]
        shared = KvMemory.of_parts(shared.map, flats)
    for mine, whole in zip(planes_of(shared), planes_of(memory), strict=True):
        for rank, plane in enumerate(mine):
            held = Shard(rank=rank, size=ranks).heads(whole[0].shape[2])
            plane.copy_(whole[0][:, :, held.start : held.stop])
    return shared


def planes_of(memory: KvMemory) -> list[list[torch.Tensor]]:
    """# plane |-> rank |-> `[layers, slots, heads, dim]`"""
    by_rank = [[plane for planes in part.planes for plane in planes] for part in memory.parts]
    return [list(planes) for planes in zip(*by_rank, strict=True)]


def assert_same(one: KvMemory, other: KvMemory) -> None:
    """Whatever the ranks are; all copies of a head are alike."""
    for ours, theirs in zip(planes_of(one), planes_of(other), strict=True):
        assert torch.equal(all_heads(ours).view(torch.int16), all_heads(theirs).view(torch.int16))


def all_heads(by_rank: list[torch.Tensor]) -> torch.Tensor:
    total = LAYOUT.groups[0].planes[0].heads
    copies = max(1, len(by_rank) // total)
    for rank, plane in enumerate(by_rank):
        assert torch.equal(
            plane.view(torch.int16), by_rank[rank // copies * copies].view(torch.int16)
        )
    return torch.cat(by_rank[::copies], dim=2)


def side(seed: int) -> Side:
    return Side(tables=random_tables(LAYOUT, 46, seed), block_size=LAYOUT.block_size)


def written(codec: Codec = Codec.NONE, wire_dtype: str | None = None) -> SlabWrite:
    one = ShardLayout(model=LAYOUT, shard=Shard())
    (write,) = cut(one, one, span=SPAN, staging_bytes=1 << 20, codec=codec, wire_dtype=wire_dtype)
    return write


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
