"""Which sequence holds which blocks, over all groups of the layout. Pure; runs in the owner.

A holder is one choice of one request. Its tables hold `capacity` token slots in every group.
Operations are all-or-nothing over the groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvpool.blocks import BlockPool, BlockState
from kvpool.layout import BlockId, KvLayout, Tables
from kvrelay.types import RequestKey

CopyPairs = tuple[tuple[tuple[BlockId, BlockId], ...], ...]
"""# layer group |-> (source, destination) blocks to copy before writing"""


@dataclass(frozen=True, slots=True, order=True)
class Holder:
    """One choice of one request's try, on one side of the worker ("prefill" or "decode")."""

    side: str
    key: RequestKey
    choice: int = 0

    def __str__(self) -> str:
        return f"{self.side} {self.key}/{self.choice}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTables:
    holder: Holder
    state: BlockState
    tables: Tables
    since_s: float


@dataclass(slots=True)
class _Entry:
    tables: list[list[BlockId]]
    since_s: float
    leased: bool


@dataclass(slots=True)
class BlockTables:
    """The worker's device tier: one block pool per layer group and every holder's tables."""

    layout: KvLayout
    blocks: int
    pools: list[BlockPool] = field(init=False)
    _entries: dict[Holder, _Entry] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.pools = [BlockPool(self.blocks) for _ in self.layout.groups]

    def __contains__(self, holder: Holder) -> bool:
        return holder in self._entries

    @property
    def free_blocks(self) -> int:
        """Blocks that every group still has."""
        return min(pool.free for pool in self.pools)

    @property
    def total_tokens(self) -> int:
        return self.blocks * self.layout.block_size

    def capacity(self, holder: Holder) -> int:
        entry = self._entries.get(holder)
        return len(entry.tables[0]) * self.layout.block_size if entry else 0

    def tables(self, holder: Holder) -> Tables:
        return tuple(tuple(table) for table in self._entries[holder].tables)

    def try_grow(self, holder: Holder, tokens: int, *, now_s: float, leased: bool = False) -> bool:
        """Make room for `tokens` tokens in all; False and nothing changed when blocks run out."""
        missing = self.layout.blocks_for(tokens) - self.capacity(holder) // self.layout.block_size
        if missing > self.free_blocks:
            return False
        entry = self._entries.get(holder)
        if entry is None:
            entry = _Entry(tables=[[] for _ in self.pools], since_s=now_s, leased=leased)
            self._entries[holder] = entry
        for pool, table in zip(self.pools, entry.tables, strict=True):
            if missing > 0:
                taken = pool.try_allocate(missing, leased=entry.leased)
                assert taken is not None
                table.extend(taken)
        return True

    def activate(self, holder: Holder) -> None:
        """The lease's peer delivered: the blocks now belong to the running request."""
        entry = self._entries[holder]
        assert entry.leased, f"{holder} holds no lease"
        entry.leased = False
        for pool, table in zip(self.pools, entry.tables, strict=True):
            pool.activate(table)

    def fork(self, source: Holder, target: Holder, *, now_s: float) -> None:
        """`target` shares all blocks of `source`; writers make them their own first."""
        entry = self._entries[source]
        assert not entry.leased
        assert target not in self._entries
        for pool, table in zip(self.pools, entry.tables, strict=True):
            pool.share(table)
        tables = [list(table) for table in entry.tables]
        self._entries[target] = _Entry(tables=tables, since_s=now_s, leased=False)

    def try_own(self, holder: Holder, position: int) -> CopyPairs | None:
        """Before writing at `position`: replace a shared block there by a copy of one's own.

        Returns the copies to make (empty tuples when none), or None when blocks run out.
        """
        index = position // self.layout.block_size
        entry = self._entries[holder]
        shared = [
            pool.is_shared(table[index])
            for pool, table in zip(self.pools, entry.tables, strict=True)
        ]
        if any(wanted and not pool.free for wanted, pool in zip(shared, self.pools, strict=True)):
            return None
        return tuple(
            self._own_one(pool, table, index) if wanted else ()
            for wanted, pool, table in zip(shared, self.pools, entry.tables, strict=True)
        )

    @staticmethod
    def _own_one(
        pool: BlockPool, table: list[BlockId], index: int
    ) -> tuple[tuple[BlockId, BlockId], ...]:
        taken = pool.try_allocate(1)
        assert taken is not None
        old, table[index] = table[index], taken[0]
        pool.release([old])
        return ((old, taken[0]),)

    def release(self, holder: Holder) -> None:
        """Give everything back; releasing what isn't held is fine."""
        entry = self._entries.pop(holder, None)
        if entry is None:
            return
        for pool, table in zip(self.pools, entry.tables, strict=True):
            pool.release(table)

    def held(self) -> Iterator[HeldTables]:
        for holder, entry in self._entries.items():
            yield HeldTables(
                holder=holder,
                state=BlockState.LEASED if entry.leased else BlockState.ACTIVE,
                tables=tuple(tuple(table) for table in entry.tables),
                since_s=entry.since_s,
            )

    def counts(self) -> dict[BlockState, int]:
        """Of the group with the fewest free blocks."""
        return min(self.pools, key=lambda pool: pool.free).counts()

    def orphaned(self) -> int:
        """Blocks that are held in a pool but stand in no holder's table: always 0."""
        lost = 0
        for group, pool in enumerate(self.pools):
            known = {b for entry in self._entries.values() for b in entry.tables[group]}
            lost += pool.count - pool.free - len(known)
        return lost

    def validate(self) -> None:
        for pool in self.pools:
            pool.validate()
        assert self.orphaned() == 0, f"{self.orphaned()} orphaned blocks"
