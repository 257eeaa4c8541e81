"""The blocks of one group's device tier and their holders. Pure; runs in the worker that owns them.

Every block is in exactly one state. Shared blocks (the choices of one prompt, a cached prefix)
count their holders; a named block's KV is in the prefix index under a hash.

    free --allocate--> active --release (last holder)--> free, or cached when it has a name
    free --lease-----> leased --activate---------------> active
                          `----release-----------------> free
    cached --hold----> active
    cached --forget--> free
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

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
    _free: list[BlockId] = field(init=False)
    _holders: dict[BlockId, int] = field(init=False, default_factory=dict)
    _leased: set[BlockId] = field(init=False, default_factory=set)
    _named: set[BlockId] = field(init=False, default_factory=set)
    _cached: set[BlockId] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self._free = [BlockId(i) for i in reversed(range(self.count))]

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def available(self) -> int:
        """Blocks that can be taken: free, or cached without a holder."""
        return len(self._free) + len(self._cached)

    def counts(self) -> dict[BlockState, int]:
        """# state |-> blocks; the four always add up to `count`"""
        return {
            BlockState.FREE: len(self._free),
            BlockState.LEASED: len(self._leased),
            BlockState.ACTIVE: len(self._holders) - len(self._leased),
            BlockState.CACHED: len(self._cached),
        }

    def try_allocate(self, blocks: int, *, leased: bool = False) -> tuple[BlockId, ...] | None:
        """`blocks` free blocks with one holder each, or None and nothing changed."""
        if blocks > len(self._free):
            return None
        first = len(self._free) - blocks
        taken = tuple(reversed(self._free[first:]))
        del self._free[first:]
        self._holders.update(dict.fromkeys(taken, 1))
        if leased:
            self._leased.update(taken)
        return taken

    def activate(self, blocks: Collection[BlockId]) -> None:
        """The peer with the lease has delivered the blocks; now they belong to their owner."""
        assert self._leased.issuperset(blocks), f"some of {blocks} are not leased"
        self._leased.difference_update(blocks)

    def hold(self, blocks: Iterable[BlockId]) -> None:
        """Adds one holder to each block: to active ones, or to cached ones, which become active."""
        for block in blocks:
            assert block not in self._leased, f"block {block} is leased"
            if block in self._cached:
                self._cached.discard(block)
                self._holders[block] = 1
            else:
                self._holders[block] += 1

    def is_shared(self, block: BlockId) -> bool:
        return self._holders[block] > 1

    def is_cached(self, block: BlockId) -> bool:
        return block in self._cached

    def cached_among(self, blocks: Iterable[BlockId]) -> int:
        return len(self._cached.intersection(blocks))

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Drops one holder of each; a block without a holder is cached if it is named, else
        free."""
        holders, named = self._holders, self._named
        self._leased.difference_update(blocks)  # these have one holder
        for block in reversed(blocks):
            left = holders[block] - 1
            if left:
                holders[block] = left
                continue
            del holders[block]
            if block in named:
                self._cached.add(block)
            else:
                self._free.append(block)

    def name(self, block: BlockId) -> None:
        """A held block's KV is now in the prefix index."""
        assert block in self._holders and block not in self._leased, block
        self._named.add(block)

    def forget(self, block: BlockId) -> None:
        """The prefix index has dropped it: it is free, unless it has a holder."""
        self._named.remove(block)
        if block in self._cached:
            self._cached.discard(block)
            self._free.append(block)

    def validate(self) -> None:
        """The conservation law: each block is exactly once free, cached or held; no holder count is
        below 1."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        held = self._holders.keys()
        assert not free & held and not free & self._cached and not self._cached & held
        assert free | held | self._cached == set(range(self.count)), "a block is lost"
        assert all(n > 0 for n in self._holders.values())
        assert self._leased <= held
        assert self._cached <= self._named and not self._named & (free | self._leased)
        assert sum(self.counts().values()) == self.count
