"""The block ids of one layer group on a device. Pure; runs in the worker that owns them.

A taken block has one holder, and more while the choices of a request share it. The prefix tree is a
holder too: it takes over the hold of the request that has named a block.

    free --try_allocate--> held --drop (last holder)--> (its owner decides) --give_back--> free
    free --try_allocate--> leased --activate--> held
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import cast

from kvpool.core.layout.layout import BlockId


class BlockState(Enum):
    FREE = auto()
    LEASED = auto()
    ACTIVE = auto()
    CACHED = auto()


@dataclass(slots=True)
class BlockPool:
    """`count` blocks of one layer group; all-or-nothing allocation."""

    count: int
    _free: array[int] = field(init=False)
    _leased: set[BlockId] = field(init=False, default_factory=set)
    _more: dict[BlockId, int] = field(init=False, default_factory=dict)
    """# shared block |-> holders beside the first"""

    def __post_init__(self) -> None:
        self._free = array("i", reversed(range(self.count)))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def leased(self) -> int:
        return len(self._leased)

    def free_ids(self) -> frozenset[BlockId]:
        return frozenset(map(BlockId, self._free))

    def try_allocate(self, blocks: int, *, leased: bool = False) -> list[BlockId] | None:
        """`blocks` free blocks with one holder each, or None and nothing changed."""
        if blocks > len(self._free):
            return None
        first = len(self._free) - blocks
        taken = cast(list[BlockId], self._free[first:].tolist()[::-1])
        del self._free[first:]
        if leased:
            self._leased.update(taken)
        return taken

    def activate(self, blocks: Collection[BlockId]) -> None:
        """The peer with the lease has delivered the blocks; now they belong to their owner."""
        assert self._leased.issuperset(blocks), f"some of {blocks} are not leased"
        self._leased.difference_update(blocks)

    def share(self, blocks: Iterable[BlockId]) -> None:
        """Adds one holder to each of these held blocks."""
        for block in blocks:
            assert block not in self._leased, f"block {block} is leased"
            self._more[block] = self._more.get(block, 0) + 1

    def is_shared(self, block: BlockId) -> bool:
        return block in self._more

    def shared_among(self, blocks: Sequence[int]) -> set[int]:
        return {block for block in blocks if block in self._more} if self._more else set()

    def drop(self, blocks: Sequence[BlockId]) -> Sequence[BlockId]:
        """Drops one holder of each. Returns the blocks that have none now."""
        if self._leased:
            self._leased.difference_update(blocks)
        if not self._more:
            return blocks
        return [block for block in blocks if not self._has_dropped_one(block)]

    def _has_dropped_one(self, block: BlockId) -> bool:
        more = self._more.pop(block, 0)
        if more > 1:
            self._more[block] = more - 1
        return more > 0

    def give_back(self, blocks: Sequence[BlockId]) -> None:
        """These are free again; nobody holds them. The first of them is taken first."""
        self._free.extend(reversed(blocks))

    def validate(self) -> None:
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert all(0 <= block < self.count for block in free)
        assert not free & self._leased and not free & self._more.keys(), "a free block is held"
        assert not self._leased & self._more.keys() and all(n > 0 for n in self._more.values())
