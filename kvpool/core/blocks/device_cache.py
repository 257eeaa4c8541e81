"""The named blocks of a worker's device tier: found by hash, held, evicted. Pure.

A cached block has a part in every layer group. In groups with a window a running request gives up
the parts that its window has passed. They *fade*: they stay cached while there is room, although
the chain that they belong to is held. So

    full group:   a part is cached when its chain is idle (evicted leaves first, by the policy)
    window group: a part is cached when no request's window shows it (evicted longest first)

and when no copy elsewhere holds the part alone.

BlockNews are the changes since the last report. They are coalesced: a block that came and went in
between, or went and came again, is not reported. So there are never more changes than twice the
blocks that the cache has room for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from kvpool.core.blocks.eviction import CachedBlock, EvictionPolicy, Place
from kvpool.core.blocks.pool import BlockPool
from kvpool.core.blocks.prefix_index import PrefixIndex
from kvpool.core.layout.hashes import BlockHash, TenantRoots
from kvpool.core.layout.layout import NO_BLOCK, BlockId, KvLayout


@dataclass(slots=True)
class BlockNews:
    """Parents come before their children."""

    _stored: dict[BlockHash, None] = field(default_factory=dict)
    _removed: dict[BlockHash, None] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """True if there are changes to report."""
        return bool(self._stored or self._removed)

    def stored(self, block_hash: BlockHash) -> None:
        if block_hash in self._removed:
            del self._removed[block_hash]
        else:
            self._stored[block_hash] = None

    def removed(self, block_hash: BlockHash) -> None:
        if block_hash in self._stored:
            del self._stored[block_hash]
        else:
            self._removed[block_hash] = None

    def take(self) -> tuple[tuple[BlockHash, ...], tuple[BlockHash, ...]]:
        """(stored, removed) since the last call."""
        news = tuple(self._stored), tuple(self._removed)
        self._stored.clear()
        self._removed.clear()
        return news


GroupBlock = tuple[int, BlockId]
"""layer group, block"""


@dataclass(slots=True)
class DeviceCache:
    """`pools[group]` belong to this cache: blocks are taken, held and released through it.

    With `reports`, newly named blocks are kept for `take_news`. `changes`, if given, records every
    block that comes or goes.
    """

    layout: KvLayout
    pools: list[BlockPool]
    policy: EvictionPolicy
    reports: bool = False
    changes: BlockNews | None = None
    roots: TenantRoots = field(default_factory=TenantRoots)
    index: PrefixIndex = field(init=False)
    _news: list[CachedBlock] = field(init=False, default_factory=list)
    _faded: list[OrderedDict[BlockId, CachedBlock]] = field(init=False)
    _of: dict[GroupBlock, CachedBlock] = field(init=False, default_factory=dict)
    _windowed: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.index = PrefixIndex(self.policy)
        self._faded = [OrderedDict() for _ in self.pools]
        self._windowed = [g for g, one in enumerate(self.layout.groups) if one.window is not None]

    # --- finding --------------------------------------------------------------------------------

    def find(self, hashes: Sequence[BlockHash], seen_from: int | None) -> list[CachedBlock]:
        """The longest cached prefix with all parts that a query at `seen_from` (None: right behind
        the prefix) needs. Changes nothing."""
        chain = self.index.find(hashes)
        if not self._windowed:
            return chain
        runs = {g: _run_lengths(chain, g) for g in self._windowed}
        for length in range(len(chain), 0, -1):
            firsts = self.firsts(length, seen_from)
            if all(runs[g][length - 1] >= length - firsts[g] for g in self._windowed):
                return chain[:length]
        return []

    def firsts(self, length: int, seen_from: int | None) -> list[int]:
        """# layer group |-> index of the first of `length` blocks that is still seen"""
        size = self.layout.block_size
        position = length * size if seen_from is None else seen_from
        return [min(group.first_block(position, size), length) for group in self.layout.groups]

    # --- holding --------------------------------------------------------------------------------

    def hold_chain(self, chain: Sequence[CachedBlock]) -> None:
        """Holds the whole chain; its parts are held one by one."""
        self.index.acquire([block.hash for block in chain])

    def hold(self, group: int, blocks: Sequence[BlockId]) -> None:
        self.pools[group].hold(blocks)
        if faded := self._faded[group]:
            for block in blocks:
                faded.pop(block, None)

    def release(self, group: int, blocks: Sequence[BlockId]) -> None:
        pool = self.pools[group]
        pool.release(blocks)
        if self.layout.groups[group].window is not None:
            for block in filter(pool.is_cached, blocks):
                self._faded[group][block] = self._of[group, block]

    def release_chain(self, chain: Sequence[CachedBlock]) -> None:
        self.index.release(chain)
        if self._windowed:
            self._bound()

    # --- naming ---------------------------------------------------------------------------------

    def insert(
        self, block_hash: BlockHash, parent: CachedBlock | None, place: Place
    ) -> tuple[CachedBlock, list[GroupBlock]]:
        """Names a block. The caller holds `parent` and the parts in `place`, and from now on the
        block.

        If another request has named the block before, the caller keeps its own copy. It holds the
        returned parts as long as the block. Parts that the other copy has lost are replaced by the
        caller's.
        """
        block = self.index.insert(block_hash, parent=parent, place=place)
        if block.place is place:
            block.tenant = parent.tenant if parent is not None else self.roots.label(block_hash)
            for part in enumerate(place):
                if part[1] != NO_BLOCK:
                    self._name(part, block)
            self._report(block)
            if self._windowed:
                self._bound()
            return block, []
        return block, self._join(block, place)

    def _report(self, block: CachedBlock) -> None:
        if self.reports:
            self._news.append(block)
        if self.changes is not None:
            self.changes.stored(block.hash)

    def has_news(self, hashes: Iterable[BlockHash]) -> bool:
        """True if `take_news` will report one of these blocks."""
        return not {block.hash for block in self._news}.isdisjoint(hashes)

    def take_news(self) -> list[CachedBlock]:
        """The blocks named since the last call that are still cached."""
        news, self._news = self._news, []
        return [block for block in news if self.index.find([block.hash]) == [block]]

    def _join(self, block: CachedBlock, place: Place) -> list[GroupBlock]:
        fresh = [g for g, part in enumerate(block.place) if part == NO_BLOCK != place[g]]
        block.place = tuple(place[g] if g in fresh else part for g, part in enumerate(block.place))
        for group in fresh:
            self._name((group, place[group]), block)
        full = [g for g, group in enumerate(self.layout.groups) if group.window is None]
        twins = [(g, block.place[g]) for g in full if block.place[g] != place[g]]
        for group, part in twins:
            self.hold(group, [part])
        return twins

    def _name(self, part: GroupBlock, block: CachedBlock) -> None:
        group, block_id = part
        self.pools[group].name(block_id)
        self._of[part] = block

    def _bound(self) -> None:
        """Blocks can lose all their parts in groups with windows. They take no room in a pool, so
        their number is bounded here."""
        while len(self.index) > self.pools[0].count and self.index.idle:
            self._evict_one()

    # --- room -----------------------------------------------------------------------------------

    def take(self, group: int, blocks: int, *, leased: bool) -> tuple[BlockId, ...]:
        """Takes at most `available` blocks; cached blocks are evicted for them."""
        pool = self.pools[group]
        while pool.free < blocks:
            if self._faded[group]:
                self._drop_faded(group)
            else:
                self._evict_one()
        taken = pool.try_allocate(blocks, leased=leased)
        assert taken is not None
        return taken

    def _drop_faded(self, group: int) -> None:
        block_id, block = self._faded[group].popitem(last=False)
        block.place = tuple(NO_BLOCK if g == group else p for g, p in enumerate(block.place))
        self._forget((group, block_id))

    def _evict_one(self) -> None:
        evicted = self.index.try_evict(1)
        assert evicted is not None, "nothing is idle"
        self._free(evicted[0])

    def _free(self, block: CachedBlock) -> None:
        if self.changes is not None:
            self.changes.removed(block.hash)
        for group, block_id in _parts(block.place):
            self._faded[group].pop(block_id, None)
            self._forget((group, block_id))

    def _forget(self, part: GroupBlock) -> None:
        group, block_id = part
        del self._of[part]
        self.pools[group].forget(block_id)

    def validate(self) -> None:
        """Every part is named once, and cached blocks are available."""
        self.index.validate()
        parts = {part: block for block in self.index for part in _parts(block.place)}
        assert parts == self._of
        for g, (pool, group) in enumerate(zip(self.pools, self.layout.groups, strict=True)):
            pool.validate()
            named = {block for index, block in parts if index == g}
            cached = {block for block in named if pool.is_cached(block)}
            assert len(cached) == pool.available - pool.free, "a cached block without a name"
            idle = {p for (index, p), b in parts.items() if index == g and not b.holders}
            free = cached if group.window is None else set(self._faded[g])
            assert free == cached and (group.window is not None or cached <= idle)


def _parts(place: Place) -> list[GroupBlock]:
    return [(group, block) for group, block in enumerate(place) if block != NO_BLOCK]


def _run_lengths(chain: Sequence[CachedBlock], group: int) -> list[int]:
    """# block |-> number of parts of the group, up to and with it, that follow one another"""
    present = (block.place[group] != NO_BLOCK for block in chain)
    return list(accumulate(present, lambda run, here: (run + 1) * here, initial=0))[1:]
