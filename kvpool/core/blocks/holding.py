"""The blocks that one holder holds in a device tier: its tables, and the names of its full blocks.
Pure.

Also copy-on-write: a shared block is copied before one of its holders writes to it. Copies are made
before the step that needs them. The source stays unchanged until the step has ended, because
another holder holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvpool.core.blocks.device_cache import DeviceCache, GroupBlock
from kvpool.core.blocks.eviction import CachedBlock, Place
from kvpool.core.blocks.pool import BlockState
from kvpool.core.layout.layout import NO_BLOCK, BlockId, KvLayout, Tables
from kvrelay.types import RequestKey


@dataclass(slots=True, kw_only=True)
class Holding:
    """`seen_from`: no later query comes from before this position. `twins` are other requests'
    copies of blocks in `chain`, held because this holder has its own copy."""

    layout: KvLayout
    tables: list[list[BlockId]]
    since_s: float
    leased: bool
    seen_from: int
    chain: list[CachedBlock]
    twins: list[GroupBlock] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        layout: KvLayout,
        chain: list[CachedBlock],
        firsts: Sequence[int],
        *,
        seen_from: int,
        leased: bool,
        now_s: float,
    ) -> Holding:
        """Holds a cached chain, in each group from the first block that is still seen."""
        tables = [
            [NO_BLOCK] * first + [block.place[group] for block in chain[first:]]
            for group, first in enumerate(firsts)
        ]
        return cls(
            layout=layout,
            tables=tables,
            since_s=now_s,
            leased=leased,
            seen_from=seen_from,
            chain=chain,
        )

    def copy(self, now_s: float) -> Holding:
        """Another holder's holding, over the same blocks."""
        tables = [list(table) for table in self.tables]
        chain, twins = list(self.chain), list(self.twins)
        return replace(self, tables=tables, chain=chain, twins=twins, since_s=now_s)

    def real(self, group: int) -> list[BlockId]:
        return real(self.tables[group])

    def place(self, index: int, *, edges_full: bool) -> Place:
        """The block's parts, without those that may lack the KV of tokens that no query sees any
        more."""
        if edges_full or not self.layout.has_windows:
            return tuple([table[index] for table in self.tables])
        return tuple(
            NO_BLOCK if self._on_edge(group, index) else table[index]
            for group, table in enumerate(self.tables)
        )

    def _on_edge(self, group: int, index: int) -> bool:
        window, start = self.layout.groups[group].window, index * self.layout.block_size
        return window is not None and start < self.seen_from - window + 1

    def lacks(self, group: int, tokens: int, window_tokens: int | None) -> tuple[int, int]:
        """For `tokens` tokens in all (in a group with a window: `window_tokens`): the number of
        blocks to pass over, because no query will see them, and the number to take after those."""
        spec, table = self.layout.groups[group], self.tables[group]
        if spec.window is None:
            return 0, max(0, self.layout.blocks_for(tokens) - len(table))
        wanted = tokens if window_tokens is None else window_tokens
        more = max(0, self.layout.blocks_for(wanted) - len(table))
        unseen = spec.first_block(self.seen_from, self.layout.block_size) - len(table)
        passed = min(max(unseen, 0), more)
        return passed, more - passed

    def pass_over(self, group: int, position: int) -> list[BlockId]:
        """Removes and returns the blocks that the query at `position` does not see."""
        table, size = self.tables[group], self.layout.block_size
        spec = self.layout.groups[group]
        end = min(spec.first_block(position, size), len(table))
        unseen = range(min(spec.first_block(self.seen_from, size), end), end)
        passed = real([table[index] for index in unseen])
        for index in unseen:
            table[index] = NO_BLOCK
        return passed


def places(tables: Tables, blocks: range) -> tuple[Place, ...]:
    """# block |-> its part in every layer group"""
    return tuple(tuple(table[index] for table in tables) for index in blocks)


def real(table: Sequence[BlockId]) -> list[BlockId]:
    """Without the table entries whose blocks are not held."""
    return [block for block in table if block != NO_BLOCK]


class Holder(NamedTuple):
    """One choice of one attempt of a request, on one side of the worker ("prefill" or "decode")."""

    side: str
    key: RequestKey
    choice: int = 0

    def __str__(self) -> str:
        return f"{self.side} {self.key}/{self.choice}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTables:
    """`tables` without the entries whose blocks are not held."""

    holder: Holder
    state: BlockState
    tables: Tables
    since_s: float


CopyPairs = tuple[tuple[tuple[BlockId, BlockId], ...], ...]
"""# layer group |-> (source, destination) blocks to copy before writing"""


@dataclass(frozen=True, slots=True)
class Copies:
    cache: DeviceCache

    def try_own(self, entry: Holding, index: int) -> CopyPairs | None:
        """Replaces the `index`-th block by an own copy where it is shared.

        Returns the copies to make (empty tuples when none), or None when blocks run out.
        """
        assert index >= len(entry.chain), "a named block is never written"
        pools = self.cache.pools
        shared = [
            pool.is_shared(table[index]) for pool, table in zip(pools, entry.tables, strict=True)
        ]
        if any(own and not pool.available for own, pool in zip(shared, pools, strict=True)):
            return None
        return tuple(
            self._own_one(group, entry.tables[group], index) if wanted else ()
            for group, wanted in enumerate(shared)
        )

    def _own_one(
        self, group: int, table: list[BlockId], index: int
    ) -> tuple[tuple[BlockId, BlockId], ...]:
        (taken,) = self.cache.take(group, 1, leased=False)
        old, table[index] = table[index], taken
        self.cache.release(group, [old])
        return ((old, taken),)
