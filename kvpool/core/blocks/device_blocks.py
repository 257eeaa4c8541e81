"""The blocks of a worker's device: free ones, held ones, and the tree of cached prefixes. Pure.

A cached block has a part in every layer group: a block id in the run's column of that group. In
groups without a window the tree holds the parts, and requests hold runs. In groups with a window
requests hold the parts one by one, and give up those that their window has passed. Those parts
*fade*: they stay cached while there is room, although the run that they belong to is held. So

    full group:   a part is cached when its run is idle (evicted leaves first, by the policy)
    window group: a part is cached when no request's window shows it (evicted longest first)
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from kvpool.core.blocks.news import RunNews
from kvpool.core.blocks.pool import BlockPool, BlockState
from kvpool.core.blocks.runs import Columns, Run, RunPolicy, RunTree, common_end, path
from kvpool.core.layout.hashes import (
    HASH_BYTES,
    BlockHash,
    BlockHashes,
    FullNames,
    Names,
    TenantRoots,
)
from kvpool.core.layout.layout import NO_BLOCK, BlockId, KvLayout

Place = tuple[BlockId, ...]
"""# layer group |-> block of this tier that holds the KV"""

GroupBlock = tuple[int, BlockId]
"""layer group, block"""


@dataclass(slots=True)
class NamedBlocks:
    """Blocks of one run that were named, from depth `start` to before `end`."""

    run: Run
    start: int
    end: int

    @property
    def parent(self) -> BlockHash | None:
        """The block before the first of them."""
        for run in path(self.run):
            if run.start < self.start:
                return run.at(self.start - 1)
        return None


@dataclass(slots=True)
class DeviceBlocks:
    """`pools[group]` belong to it: blocks are taken, held and released here.

    With `reports`, newly named blocks are kept for `take_named`. `changes`, if given, records every
    block that comes or goes.
    """

    layout: KvLayout
    count: int
    policy: RunPolicy
    reports: bool = False
    changes: RunNews | None = None
    roots: TenantRoots = field(default_factory=TenantRoots)
    pools: list[BlockPool] = field(init=False)
    tree: RunTree = field(init=False)
    _named: list[NamedBlocks] = field(init=False, default_factory=list)
    _faded: list[OrderedDict[BlockId, None]] = field(init=False)
    _runs: dict[int, list[Run | None]] = field(init=False)
    """# group with a window |-> block |-> the run that it is a part of, or was before a split"""

    def __post_init__(self) -> None:
        self.tree = RunTree(self.policy)
        self.pools = [BlockPool(self.count) for _ in self.layout.groups]
        self._faded = [OrderedDict() for _ in self.pools]
        windows = [g for g, one in enumerate(self.layout.groups) if one.window is not None]
        self._runs = {group: [None] * self.count for group in windows}

    # --- finding --------------------------------------------------------------------------------

    def find(self, names: Names, seen_from: int | None) -> tuple[Run | None, int]:
        """The longest cached prefix with all parts that a query at `seen_from` (None: right behind
        the prefix) needs: the run that has its last block, and its number of blocks. Changes
        nothing."""
        run, length = self.tree.find(names)
        if not self._runs:
            return run, length
        while run is not None and (lost := self._last_lost(run, length, seen_from)) is not None:
            length = lost
            while run is not None and run.start >= length:
                run = run.parent
        return run, length

    def _last_lost(self, run: Run, length: int, seen_from: int | None) -> int | None:
        """The depth of the last block that lacks a part which is needed."""
        firsts = self.firsts(length, seen_from)
        lost = [self._lost_part(group, run, firsts[group], length) for group in self._runs]
        return max((depth for depth in lost if depth is not None), default=None)

    @staticmethod
    def _lost_part(group: int, run: Run, first: int, length: int) -> int | None:
        for part in path(run):
            column, last = part.columns[group], min(length, part.end)
            for depth in range(last - 1, max(first, part.start) - 1, -1):
                if column[depth - part.start] == NO_BLOCK:
                    return depth
            if part.start <= first:
                break
        return None

    def firsts(self, length: int, seen_from: int | None) -> list[int]:
        """# layer group |-> index of the first of `length` blocks that is still seen"""
        size = self.layout.block_size
        position = length * size if seen_from is None else seen_from
        return [min(group.first_block(position, size), length) for group in self.layout.groups]

    # --- holding --------------------------------------------------------------------------------

    def available(self, group: int) -> int:
        """Blocks that can be taken: free, or cached without a holder."""
        return self.pools[group].free + self._cached(group)

    def _cached(self, group: int) -> int:
        return len(self._faded[group]) if group in self._runs else self.tree.idle

    def revived(self, group: int, run: Run | None, table: Sequence[BlockId]) -> int:
        """How many blocks of a table would make room no longer, once its chain is held."""
        if group in self._runs:
            return sum(block in self._faded[group] for block in table)
        length = len(table)
        return sum(min(p.end, length) - p.start for p in path(run) if not p.holders)

    def hold(self, group: int, blocks: Sequence[BlockId]) -> None:
        """Adds one holder to each: to held ones, or to cached ones, which become active."""
        faded = self._faded[group]
        self.pools[group].share([block for block in blocks if faded.pop(block, 0) is not None])

    def release(self, group: int, blocks: Sequence[BlockId]) -> None:
        """Drops one holder of each; a named block without a holder is cached, another one free."""
        left = self.pools[group].drop(blocks)
        if group in self._runs:
            runs = self._runs[group]
            self._faded[group].update((b, None) for b in left if runs[b] is not None)
            left = [block for block in left if runs[block] is None]
        self.pools[group].give_back(left)

    def release_run(self, run: Run | None) -> None:
        if run is not None:
            self.tree.release(run)
            self._bound()

    # --- naming ---------------------------------------------------------------------------------

    def name(
        self, tail: Run | None, names: FullNames, columns: Columns
    ) -> tuple[Run | None, list[GroupBlock]]:
        """Names the blocks behind `tail`, whose chain the caller holds. `columns` have their parts.
        From now on the caller holds the chain to the returned run.

        Others may have named some of them before. Then the caller keeps its own parts, and the
        second value lists those. Parts that the other copy has lost are replaced by the caller's.
        """
        kept: list[GroupBlock] = []
        depth = tail.end if tail is not None else 0
        first = depth
        while depth < len(names):
            known = self.tree.child(tail, names.at(depth))
            if known is None:
                tail = self._append(tail, names.packed_from(depth), _from(columns, depth - first))
                break
            tail = self.tree.hold_next(known, common_end(names, known.hashes, depth))
            kept += self._join(tail, _from(columns, depth - first))
            depth = tail.end
        self._bound()
        return tail, kept

    def _append(self, tail: Run | None, hashes: bytes, columns: Columns) -> Run:
        start = tail.end if tail is not None else 0
        root = BlockHash(hashes[:HASH_BYTES])
        run = self.tree.append(tail, hashes, columns, "" if tail else self.roots.label(root))
        for group, runs in self._runs.items():
            for block in columns[group]:
                if block != NO_BLOCK:
                    runs[block] = run
        if self.reports:
            self._named.append(NamedBlocks(run, start, run.end))
        if self.changes is not None:
            self.changes.stored(run.number)
        return run

    def _join(self, run: Run, columns: Columns) -> list[GroupBlock]:
        """The caller's own parts of blocks that `run` has already."""
        kept: list[GroupBlock] = []
        for group, (column, own) in enumerate(zip(run.columns, columns, strict=True)):
            if group not in self._runs:
                kept += [(group, BlockId(block)) for block in own[: run.blocks]]
                continue
            for index, block in enumerate(own[: run.blocks]):
                if column[index] == NO_BLOCK != block:
                    column[index] = block
                    self._runs[group][block] = run
        return kept

    def _bound(self) -> None:
        """Blocks can lose all their parts in groups with windows. They take no room in a pool, so
        their number is bounded here."""
        over = min(self.tree.blocks - self.count, self.tree.idle)
        if self._runs and over > 0:
            self._evict(over)

    def named_hashes(self) -> frozenset[BlockHash]:
        """Of the blocks that `take_named` will report."""
        return frozenset(chain.from_iterable(map(hashes_of, self._named)))

    @property
    def named_blocks(self) -> int:
        """How many `take_named` would report, and a few that are gone."""
        return sum([named.end - named.start for named in self._named])

    def take_named(self) -> list[NamedBlocks]:
        """What was named since the last call and is still cached."""
        found, self._named = self._named, []
        return [one for named in found if (one := self._still(named)) is not None]

    def _still(self, named: NamedBlocks) -> NamedBlocks | None:
        strand = self.tree.strand(named.run.number)
        if strand is None or strand.end <= named.start:
            return None
        end = min(named.end, strand.end)
        return NamedBlocks(self.tree.run_before(named.run.number, end), named.start, end)

    # --- room -----------------------------------------------------------------------------------

    def take(self, group: int, blocks: int, *, leased: bool) -> list[BlockId]:
        """Takes at most `available` blocks; cached blocks are evicted for them."""
        pool = self.pools[group]
        while (missing := blocks - pool.free) > 0:
            if self._faded[group]:
                self._drop_faded(group)
            else:
                self._evict(min(missing, self.tree.idle))
        taken = pool.try_allocate(blocks, leased=leased)
        assert taken is not None
        return taken

    def _drop_faded(self, group: int) -> None:
        block, _ = self._faded[group].popitem(last=False)
        run = self._runs[group][block]
        while run is not None and block not in run.columns[group]:
            run = run.parent
        assert run is not None, f"block {block} is in no run"
        column = run.columns[group]
        column[column.index(block)] = NO_BLOCK
        self._free(group, [block])

    def _evict(self, blocks: int) -> None:
        assert blocks, "nothing is idle"
        for gone in self.tree.evict(blocks):
            if self.changes is not None:
                self.changes.cut(gone.number, gone.end)
            for group, column in enumerate(gone.columns):
                self._free(group, column)

    def _free(self, group: int, column: Sequence[int]) -> None:
        """The tree holds these no longer, and nobody else does."""
        if group in self._runs:
            column = [block for block in column if block != NO_BLOCK]
            for block in column:
                self._faded[group].pop(BlockId(block), None)
                self._runs[group][block] = None
        self.pools[group].give_back([BlockId(block) for block in column])

    # --- looking --------------------------------------------------------------------------------

    def counts(self, group: int) -> dict[BlockState, int]:
        """# state |-> blocks; the four always add up to `count`"""
        pool = self.pools[group]
        free, leased, cached = pool.free, pool.leased, self._cached(group)
        return {
            BlockState.FREE: free,
            BlockState.LEASED: leased,
            BlockState.ACTIVE: self.count - free - leased - cached,
            BlockState.CACHED: cached,
        }

    def parts(self, group: int) -> Iterator[BlockId]:
        """All blocks of the group that the tree has."""
        for run in self.tree:
            yield from (BlockId(block) for block in run.columns[group] if block != NO_BLOCK)

    def validate(self) -> None:
        """No part is free or there twice, and faded parts are parts of the tree."""
        self.tree.validate()
        for group, pool in enumerate(self.pools):
            pool.validate()
            parts = list(self.parts(group))
            assert len(set(parts)) == len(parts), "a block is named twice"
            assert pool.free_ids().isdisjoint(parts), "a cached block is free"
            if group in self._runs:
                named = {b for b, run in enumerate(self._runs[group]) if run is not None}
                assert named == set(parts) >= self._faded[group].keys()


def hashes_of(named: NamedBlocks) -> Iterator[BlockHash]:
    return iter(BlockHashes(b"".join(part for part, _ in pieces(named))))


def pieces(named: NamedBlocks) -> list[tuple[bytes, Columns]]:
    """The packed hashes and the columns of these blocks, cut where their run was split since."""
    found: list[tuple[bytes, Columns]] = []
    for run in path(named.run):
        if run.start < named.end and named.start < run.end:
            first, last = max(named.start - run.start, 0), named.end - run.start
            hashes = bytes(run.hashes[first * HASH_BYTES : last * HASH_BYTES])
            found.append((hashes, tuple(column[first:last] for column in run.columns)))
        if run.start <= named.start:
            break
    return found[::-1]


def _from(columns: Columns, first: int) -> Columns:
    return tuple(column[first:] for column in columns) if first else columns


def column(blocks: Sequence[BlockId]) -> array[int]:
    return array("i", blocks)
