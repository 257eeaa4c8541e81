"""The blocks that one holder holds in a device tier: its tables, and the names of its full blocks.
Pure.

Also copy-on-write: a shared block is copied before one of its holders writes to it. Copies are made
before the step that needs them. The source stays unchanged until the step has ended, because
another holder holds it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple, cast

from kvpool.core.blocks.device_blocks import DeviceBlocks, GroupBlock, Place
from kvpool.core.blocks.pool import BlockState
from kvpool.core.blocks.runs import Columns, Run, path
from kvpool.core.layout.layout import NO_BLOCK, BlockId, KvLayout, Tables
from kvrelay.types import RequestKey


@dataclass(slots=True, kw_only=True)
class Holding:
    """`run` ends the chain of the first `named` blocks. `seen_from`: no later query comes from
    before this position. `own` are this holder's own copies of named blocks: others had named
    theirs first. Whoever changes `tables` clears `shown`."""

    layout: KvLayout
    tables: list[list[BlockId]]
    since_s: float
    leased: bool
    seen_from: int
    run: Run | None = None
    own: list[GroupBlock] = field(default_factory=list)
    shown: Tables | None = field(init=False, default=None)

    @classmethod
    def of(
        cls,
        layout: KvLayout,
        run: Run | None,
        length: int,
        firsts: Sequence[int],
        *,
        seen_from: int,
        leased: bool,
        now_s: float,
    ) -> Holding:
        """The first `length` blocks of a cached chain, in each group from the first that is still
        seen. `run` has the last of them."""
        parts = [*path(run)][::-1]
        tables = [
            [NO_BLOCK] * first + _column(parts, group, length)[first:]
            for group, first in enumerate(firsts)
        ]
        return cls(
            layout=layout,
            tables=tables,
            since_s=now_s,
            leased=leased,
            seen_from=seen_from,
            run=run,
        )

    @property
    def named(self) -> int:
        """Blocks from the start that have names."""
        return self.run.end if self.run is not None else 0

    def copy(self, now_s: float) -> Holding:
        """Another holder's holding, over the same blocks."""
        tables = [list(table) for table in self.tables]
        return replace(self, tables=tables, own=list(self.own), since_s=now_s)

    def held(self, group: int) -> list[BlockId]:
        """The blocks that it holds one by one: in groups without a window those that the tree does
        not have."""
        if self.layout.groups[group].window is not None:
            return real(self.tables[group])
        own = [block for of, block in self.own if of == group] if self.own else []
        return own + self.tables[group][self.named :]

    def columns(self, end: int, *, edges_full: bool) -> Columns:
        """The parts of the blocks behind the named ones, up to `end`, without those that may lack
        the KV of tokens that no query sees any more."""
        columns = tuple(array("i", table[self.named : end]) for table in self.tables)
        if not edges_full and self.layout.has_windows:
            for group, column in enumerate(columns):
                for index in range(min(len(column), self._first_whole(group) - self.named)):
                    column[index] = NO_BLOCK
        return columns

    def _first_whole(self, group: int) -> int:
        """The first block that no window's edge has cut."""
        window = self.layout.groups[group].window
        if window is None:
            return 0
        return self.layout.blocks_for(max(0, self.seen_from - window + 1))

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
        if unseen:
            self.shown = None
        return passed


def places(tables: Tables, blocks: range) -> tuple[Place, ...]:
    """# block |-> its part in every layer group"""
    return tuple(tuple(table[index] for table in tables) for index in blocks)


def _column(parts: Sequence[Run], group: int, length: int) -> list[BlockId]:
    """The blocks of one group, from the chain's start."""
    ids = chain.from_iterable(part.columns[group].tolist() for part in parts)
    return cast(list[BlockId], list(ids)[:length])


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
    blocks: DeviceBlocks

    def try_own(self, entry: Holding, index: int) -> CopyPairs | None:
        """Replaces the `index`-th block by an own copy where it is shared.

        Returns the copies to make (empty tuples when none), or None when blocks run out.
        """
        assert index >= entry.named, "a named block is never written"
        pools = self.blocks.pools
        shared = [
            pool.is_shared(table[index]) for pool, table in zip(pools, entry.tables, strict=True)
        ]
        if any(own and not self.blocks.available(group) for group, own in enumerate(shared)):
            return None
        if any(shared):
            entry.shown = None
        return tuple(
            self._own_one(group, entry.tables[group], index) if wanted else ()
            for group, wanted in enumerate(shared)
        )

    def _own_one(
        self, group: int, table: list[BlockId], index: int
    ) -> tuple[tuple[BlockId, BlockId], ...]:
        (taken,) = self.blocks.take(group, 1, leased=False)
        old, table[index] = table[index], taken
        self.blocks.release(group, [old])
        return ((old, taken),)
