"""Blocks found by hash in an open-addressing table, against a dict."""

from __future__ import annotations

from random import Random

import pytest

from kvpool.core.layout.hashes import HASH_BYTES, BlockHash
from kvpool.core.node.block_index import BlockAt, BlockIndex

FULL = 40


class Strands:
    """Strands that grow and shrink at their ends, with few different keys."""

    def __init__(self, seed: int, keys: int) -> None:
        self.random = Random(seed)
        self.strands: dict[int, list[BlockHash]] = {}
        self.index = BlockIndex(FULL, lambda at: self.strands[at.strand][at.depth])
        self._keys = keys
        self._hashes = 0

    @property
    def blocks(self) -> int:
        return sum(map(len, self.strands.values()))

    def new(self) -> BlockHash:
        self._hashes += 1
        key = self.random.randrange(self._keys) * (2**32 // self._keys) % 2**32
        return BlockHash(key.to_bytes(4, "little") + self._hashes.to_bytes(HASH_BYTES - 4, "big"))

    def grow(self) -> None:
        number = self.random.randrange(1, 8)
        hashes = [self.new() for _ in range(self.random.randrange(6))]
        if self.blocks + len(hashes) <= FULL:
            strand = self.strands.setdefault(number, [])
            self.index.add(b"".join(hashes), number, len(strand))
            strand += hashes

    def shrink(self) -> None:
        number = self.random.randrange(1, 8)
        if number in self.strands:
            kept = self.random.randrange(len(self.strands[number]) + 1)
            gone = self.strands[number][kept:]
            del self.strands[number][kept:]
            self.index.remove(b"".join(gone), number, kept)


@pytest.mark.parametrize("keys", [2**32, 50, 7, 1])
@pytest.mark.parametrize("seed", range(4))
def test_random_strands(seed: int, keys: int) -> None:
    """Also when many or all keys are equal, and the entries go around the table's end."""
    strands, was_full = Strands(seed, keys), False
    for _ in range(600):
        strands.random.choice((strands.grow, strands.shrink))()
        strands.index.validate(strands.blocks)
        for number, strand in strands.strands.items():
            for depth, name in enumerate(strand):
                assert strands.index.find(name) == BlockAt(number, depth)
        assert strands.index.find(strands.new()) is None
        was_full |= strands.blocks > 0.9 * FULL
    assert was_full


def test_a_tier_without_blocks_finds_nothing() -> None:
    index = BlockIndex(0, lambda _: BlockHash(b""))
    assert index.find(BlockHash(bytes(HASH_BYTES))) is None
    index.validate(0)
