"""Finds a tier's blocks by their hashes: an open-addressing table in arrays. Pure.

It has 20 bytes for each block of the tier. An entry keeps the first 32 bits of the hash as its key,
and the block's strand and depth, which splits of runs do not change. A hit is verified against the
hash that the tier has there.

A removed entry leaves no mark: entries behind it move up.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from typing import NamedTuple

from kvpool.core.layout.hashes import HASH_BYTES, BlockHash

_KEY_TYPE = next(code for code in "IL" if array(code).itemsize == 4)
_KEY_BYTES = 4
_KEY_BITS = 8 * _KEY_BYTES
_DEPTH_BITS = 24
_DEPTHS = (1 << _DEPTH_BITS) - 1


class BlockAt(NamedTuple):
    """Where a block is in the tree, whatever splits come."""

    strand: int
    depth: int


class BlockIndex:
    """For at most `count` blocks. `hash_at` gives the hash of a block that is in the index."""

    def __init__(self, count: int, hash_at: Callable[[BlockAt], BlockHash]) -> None:
        self._slots = count + 2 * count // 3 + 1  # at most three of five are taken
        self._keys = array(_KEY_TYPE, [0]) * self._slots
        self._values = array("Q", [0]) * self._slots  # 0: no entry
        self._hash_at = hash_at

    def find(self, block_hash: BlockHash) -> BlockAt | None:
        keys, values, slots = self._keys, self._values, self._slots
        key = int.from_bytes(block_hash[:_KEY_BYTES], sys.byteorder)
        slot = key * slots >> _KEY_BITS
        while value := values[slot]:
            if keys[slot] == key:
                found = BlockAt(value >> _DEPTH_BITS, value & _DEPTHS)
                if self._hash_at(found) == block_hash:
                    return found
            slot = slot + 1 if slot + 1 < slots else 0
        return None

    def add(self, hashes: bytes, strand: int, start: int) -> None:
        """The strand has these blocks, which are new, from depth `start` on."""
        keys, values, slots = self._keys, self._values, self._slots
        value = _value(strand, start)
        for key in _keys_of(hashes):
            slot = key * slots >> _KEY_BITS
            while values[slot]:
                slot = slot + 1 if slot + 1 < slots else 0
            keys[slot], values[slot] = key, value
            value += 1

    def remove(self, hashes: bytes, strand: int, start: int) -> None:
        """The strand had these blocks from depth `start` on."""
        values, slots = self._values, self._slots
        value = _value(strand, start)
        for key in _keys_of(hashes):
            slot = key * slots >> _KEY_BITS
            while values[slot] != value:
                assert values[slot], "the block is not in the index"
                slot = slot + 1 if slot + 1 < slots else 0
            self._close(slot)
            value += 1

    def _close(self, hole: int) -> None:
        """Moves entries behind the hole up, until none would be found sooner for it."""
        keys, values, slots = self._keys, self._values, self._slots
        slot = hole
        while True:
            slot = slot + 1 if slot + 1 < slots else 0
            if not values[slot]:
                break
            first = keys[slot] * slots >> _KEY_BITS
            if (slot - first) % slots >= (slot - hole) % slots:
                keys[hole], values[hole] = keys[slot], values[slot]
                hole = slot
        values[hole] = 0

    def validate(self, blocks: int) -> None:
        """It has exactly this many entries, and each is found."""
        entries = [BlockAt(v >> _DEPTH_BITS, v & _DEPTHS) for v in self._values if v]
        assert len(entries) == blocks, f"{len(entries)} entries for {blocks} blocks"
        for entry in entries:
            assert self.find(self._hash_at(entry)) == entry, f"{entry} is not found"


def _value(strand: int, depth: int) -> int:
    return strand << _DEPTH_BITS | depth


def _keys_of(hashes: bytes) -> array[int]:
    return array(_KEY_TYPE, hashes)[:: HASH_BYTES // _KEY_BYTES]
