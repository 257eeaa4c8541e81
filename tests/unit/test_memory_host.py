"""Whole blocks to a pool node's places and back, over a link that maps and one that doesn't."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from kvpool.core.layout.layout import BlockId, KvLayout, LayerGroup, Plane
from kvpool.core.layout.shards import Shard, ShardLayout
from kvpool.core.node.tier_blocks import PoolPlace
from kvpool.core.transfer.plan import cut
from kvpool.core.transfer.write import Side as Blocks
from kvpool.core.transfer.write import TokenSpan
from kvpool.memory.collate import gather_write
from kvpool.memory.host import HostBlocks, checksums, fetch_blocks, store_blocks
from kvpool.memory.kv_memory import KvMemory
from kvpool.transport.peer.base import Connection, Region
from kvrelay.errors import PeerError
from tests.contract.transport_kit import Side as LinkSide

_BLOCKS = 12
_K, _V = Plane(name="k", heads=2, dim=8), Plane(name="v", heads=2, dim=4)
_LATENT = Plane(name="latent", heads=1, dim=10)
LAYOUT = KvLayout(
    groups=(
        LayerGroup(layers=(0, 2, 3), planes=(_K, _V)),
        LayerGroup(layers=(1,), planes=(_LATENT,), window=16),
    ),
    dtype="bfloat16",
    block_size=8,
)
SOURCES = [(BlockId(i), BlockId((5 * i + 1) % _BLOCKS)) for i in (7, 2, 3, 9, 0)]
PLACES = [PoolPlace(i) for i in (4, 0, 1, 9, 6)]


def random_memory(seed: int) -> KvMemory:
    memory = KvMemory(LAYOUT, _BLOCKS, "cpu")
    generator = torch.Generator().manual_seed(seed)
    for planes in memory.planes:
        for plane in planes:
            plane.copy_(torch.randn(plane.shape, generator=generator))
    return memory


def host_blocks(memory: KvMemory, batch: int = 2) -> HostBlocks:
    return HostBlocks(memory, torch.empty(batch * LAYOUT.bytes_per_block, dtype=torch.uint8))


@contextmanager
def linked(scheme: str) -> Iterator[tuple[Connection, Region]]:
    with LinkSide(scheme) as owner, LinkSide(scheme) as worker:
        region = owner.endpoint.register(10 * LAYOUT.bytes_per_block + 5)
        yield worker.endpoint.connect(owner.endpoint.address), region


@pytest.mark.parametrize("block", SOURCES)
def test_a_place_is_a_block_in_canonical_order(block: tuple[BlockId, BlockId]) -> None:
    memory = random_memory(0)
    expected = torch.empty(LAYOUT.bytes_per_block, dtype=torch.uint8)
    one = ShardLayout(model=LAYOUT, shard=Shard())
    span = TokenSpan(start=0, tokens=LAYOUT.block_size, next_position=0)
    (write,) = cut(one, one, span=span, staging_bytes=LAYOUT.bytes_per_block)
    side = Blocks(tables=tuple((b,) for b in block), block_size=LAYOUT.block_size)
    gather_write(memory, side, write, expected)
    rows = host_blocks(memory).gather([SOURCES[0], block])
    assert torch.equal(rows[1], expected)


@pytest.mark.parametrize("scheme", ["shm", "nixl"])
def test_stored_and_fetched(scheme: str) -> None:
    memory, other = random_memory(0), random_memory(1)
    before = [[plane.clone() for plane in planes] for planes in other.planes]
    targets = [(BlockId((b + 1) % _BLOCKS), a) for a, b in SOURCES]
    with linked(scheme) as (connection, region):
        sums = store_blocks(host_blocks(memory), connection, region.name, SOURCES, PLACES)
        done = fetch_blocks(host_blocks(other), connection, region.name, PLACES, sums, targets)
        assert done == len(PLACES)
        del region
    mine, theirs = host_blocks(memory, 5), host_blocks(other, 5)
    assert torch.equal(mine.gather(SOURCES), theirs.gather(targets))
    untouched = sorted(set(range(_BLOCKS)) - {t[0] for t in targets})
    for now, then in zip(other.planes[0], before[0], strict=True):
        size = LAYOUT.block_size
        for block in untouched:
            assert torch.equal(now[:, block * size :][:, :size], then[:, block * size :][:, :size])


@pytest.mark.parametrize("damaged", range(5))
def test_a_damaged_place_ends_the_fetch_and_touches_no_block(damaged: int) -> None:
    memory, other = random_memory(0), random_memory(1)
    with linked("shm") as (connection, region):
        sums = store_blocks(host_blocks(memory), connection, region.name, SOURCES, PLACES)
        region.memory[PLACES[damaged] * LAYOUT.bytes_per_block + 17] ^= 1
        before = host_blocks(other, 5).gather(SOURCES).clone()
        done = fetch_blocks(host_blocks(other), connection, region.name, PLACES, sums, SOURCES)
        assert done == damaged
        after = host_blocks(other, 5).gather(SOURCES)
        assert torch.equal(after[damaged:], before[damaged:])
        assert checksums(after[:damaged]) == sums[:damaged]
        del region


def test_a_place_that_is_not_there_is_the_nodes_fault() -> None:
    with linked("shm") as (connection, region):
        with pytest.raises(PeerError, match="place 10 of 10"):
            store_blocks(
                host_blocks(random_memory(0)),
                connection,
                region.name,
                SOURCES[:1],
                [PoolPlace(10)],
            )
        del region
