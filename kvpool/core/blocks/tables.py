"""The block tables of all sequences, over all groups of the layout. Pure; runs in the owner.

A holder is one choice of one request. In groups without a window its tables hold all its tokens, in
the others those that its window still shows. Full blocks are named by their hashes, so that later
requests with the same prefix find them, also after the holder has gone. Operations are
all-or-nothing over the groups. Pinned prefixes are never evicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvpool.core.blocks.device_cache import DeviceCache
from kvpool.core.blocks.eviction import DEFAULT_POLICY, Place, open_policy
from kvpool.core.blocks.holding import Copies, CopyPairs, HeldTables, Holder, Holding, real
from kvpool.core.blocks.pool import BlockPool, BlockState
from kvpool.core.layout.block_names import BlockNames, HashChain
from kvpool.core.layout.hashes import BlockHash, tenant_label
from kvpool.core.layout.layout import NO_BLOCK, KvLayout, Tables
from kvrelay.types import RequestKey, RequestSpec


@dataclass(frozen=True, slots=True)
class GroupRoom:
    """Room in all groups of a layout. `has` is asked first, so that all groups get blocks or none
    does."""

    cache: DeviceCache

    def has(
        self, entry: Holding, tokens: int, window_tokens: int | None, *, opening: bool = False
    ) -> bool:
        """True if there are blocks for `tokens` tokens in all (in groups with a window:
        `window_tokens`). `opening`: its tables aren't held yet, and its cached blocks will no
        longer make room."""
        for group, pool in enumerate(self.cache.pools):
            _, missing = entry.lacks(group, tokens, window_tokens)
            revived = pool.cached_among(entry.tables[group]) if opening else 0
            if missing > pool.available - revived:
                return False
        return True

    def extend(self, entry: Holding, tokens: int, window_tokens: int | None) -> None:
        """Call it only after `has`."""
        for group, table in enumerate(entry.tables):
            passed, missing = entry.lacks(group, tokens, window_tokens)
            table.extend([NO_BLOCK] * passed)
            if missing:
                table.extend(self.cache.take(group, missing, leased=entry.leased))

    def hold(self, entry: Holding) -> None:
        """Adds one holder to all of the holding's blocks."""
        self.cache.hold_chain(entry.chain)
        for group in range(len(entry.tables)):
            self.cache.hold(group, entry.real(group))
        for group, block in entry.twins:
            self.cache.hold(group, [block])

    def release(self, entry: Holding) -> None:
        for group, block in entry.twins:
            self.cache.release(group, [block])
        for group in range(len(entry.tables)):
            self.cache.release(group, entry.real(group))
        self.cache.release_chain(entry.chain)


@dataclass(slots=True)
class BlockTables:
    """The worker's device tier: one block pool per layer group, and the tables of every holder.

    With `caching` False no prefix is found again. `policy` names an eviction policy
    (kvpool.core.blocks.eviction).
    """

    layout: KvLayout
    blocks: int
    names: BlockNames = field(default_factory=BlockNames)
    caching: bool = True
    policy: str = DEFAULT_POLICY
    queried_tokens: int = field(init=False, default=0)
    hit_tokens: int = field(init=False, default=0)
    pools: list[BlockPool] = field(init=False)
    cache: DeviceCache = field(init=False)
    _room: GroupRoom = field(init=False)
    _copies: Copies = field(init=False)
    _entries: dict[Holder, Holding] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.pools = [BlockPool(self.blocks) for _ in self.layout.groups]
        self.cache = DeviceCache(self.layout, self.pools, open_policy(self.policy))
        self._room, self._copies = GroupRoom(self.cache), Copies(self.cache)

    def __contains__(self, holder: Holder) -> bool:
        return holder in self._entries

    @property
    def free_blocks(self) -> int:
        """Blocks that every group has free, or can free by evicting cached ones."""
        return self.scarcest.available

    @property
    def total_tokens(self) -> int:
        return self.blocks * self.layout.block_size

    def capacity(self, holder: Holder) -> int:
        """Token slots in the shortest table."""
        entry = self._entries.get(holder)
        return min(map(len, entry.tables)) * self.layout.block_size if entry else 0

    def tables(self, holder: Holder) -> Tables:
        return tuple(map(tuple, self._entries[holder].tables))

    def chain(self, tenant: str, prompt_tokens: int) -> HashChain:
        """Names for the blocks of a new sequence."""
        chain = self.names.chain(tenant, prompt_tokens, self.layout.block_size)
        return chain.told_to(self.cache.roots, tenant_label(tenant)) if tenant else chain

    def names_of(self, spec: RequestSpec) -> HashChain:
        """The names of the blocks that the request begins with."""
        return self.chain(spec.tenant, spec.context_tokens).begin(spec)

    # --- taking ---------------------------------------------------------------------------------

    def try_open(
        self,
        holder: Holder,
        tokens: int,
        *,
        now_s: float,
        hashes: Sequence[BlockHash] = (),
        ahead_tokens: int | None = None,
        seen_from: int | None = None,
        leased: bool = False,
    ) -> int | None:
        """Room for `tokens` tokens in all, starting with the blocks cached under `hashes`.

        Groups with a window get room for `ahead_tokens` (None: all) behind the cached ones, without
        the blocks that a query at `seen_from` (None: right behind the cached ones) no longer sees.
        Returns the number of tokens whose KV is there already, or None and nothing changed when
        blocks run out.
        """
        assert holder not in self._entries, f"{holder} is here already"
        chain = self.cache.find(hashes, seen_from)
        found = len(chain) * self.layout.block_size
        entry = Holding.of(
            self.layout,
            chain,
            self.cache.firsts(len(chain), seen_from),
            seen_from=found if seen_from is None else seen_from,
            leased=leased,
            now_s=now_s,
        )
        window_tokens = tokens if ahead_tokens is None else min(tokens, found + ahead_tokens)
        if not self._room.has(entry, tokens, window_tokens, opening=True):
            return None
        self._room.hold(entry)
        self._entries[holder] = entry
        self._room.extend(entry, tokens, window_tokens)
        self.queried_tokens += len(hashes) * self.layout.block_size
        self.hit_tokens += found
        return found

    def try_grow(
        self,
        holder: Holder,
        tokens: int,
        *,
        now_s: float,
        leased: bool = False,
        window_tokens: int | None = None,
    ) -> bool:
        """Makes room for `tokens` tokens in all; False and nothing changed when blocks run out."""
        entry = self._entries.get(holder)
        if entry is None:
            return self.try_open(holder, tokens, now_s=now_s, leased=leased) is not None
        layout = self.layout
        if not layout.has_windows and tokens <= len(entry.tables[0]) * layout.block_size:
            return True
        if not self._room.has(entry, tokens, window_tokens):
            return False
        self._room.extend(entry, tokens, window_tokens)
        return True

    def keep(self, holder: Holder, places: Sequence[Place], *, now_s: float) -> None:
        """Holds these named blocks unchanged until `release`."""
        tables = [[place[group] for place in places] for group in range(len(self.pools))]
        entry = Holding(
            layout=self.layout, tables=tables, since_s=now_s, leased=False, seen_from=0, chain=[]
        )
        self._room.hold(entry)
        self._entries[holder] = entry

    def keep_prefix(self, holder: Holder, hashes: Sequence[BlockHash], *, now_s: float) -> int:
        """Holds the longest cached prefix unchanged until `release`. Returns its number of
        blocks."""
        chain = self.cache.find(hashes, None)
        firsts = self.cache.firsts(len(chain), None)
        entry = Holding.of(self.layout, chain, firsts, seen_from=0, leased=False, now_s=now_s)
        self._room.hold(entry)
        self._entries[holder] = entry
        return len(chain)

    def activate(self, holder: Holder) -> None:
        """The lease's peer has delivered; the blocks now belong to the running request."""
        entry = self._entries[holder]
        assert entry.leased, f"{holder} holds no lease"
        entry.leased = False
        for pool, table in zip(self.pools, entry.tables, strict=True):
            pool.activate(real(table[len(entry.chain) :]))

    def fork(self, source: Holder, target: Holder, *, now_s: float) -> None:
        """`target` shares all blocks of `source`; a writer copies them first."""
        entry = self._entries[source]
        assert not entry.leased
        assert target not in self._entries
        copy = entry.copy(now_s)
        self._room.hold(copy)
        self._entries[target] = copy

    def try_own(self, holder: Holder, position: int) -> CopyPairs | None:
        """Call it before writing at `position`: replaces a shared block there by an own copy.

        Returns the copies to make (empty tuples when none), or None when blocks run out.
        """
        return self._copies.try_own(self._entries[holder], position // self.layout.block_size)

    # --- naming and giving back -----------------------------------------------------------------

    def fill(
        self, holder: Holder, hashes: Sequence[BlockHash], *, edges_full: bool = False
    ) -> None:
        """The holder's first `len(hashes)` blocks are full, and these are their names. In a group
        with a window the block on the window's edge gets no name, unless `edges_full`: tokens
        outside the window may be missing in it."""
        if self.caching:
            entry = self._entries[holder]
            assert not entry.leased
            for block_hash in hashes[len(entry.chain) :]:
                self._name(entry, block_hash, edges_full=edges_full)

    def _name(self, entry: Holding, block_hash: BlockHash, *, edges_full: bool) -> None:
        """Names the block behind the chain."""
        place = entry.place(len(entry.chain), edges_full=edges_full)
        parent = entry.chain[-1] if entry.chain else None
        block, twins = self.cache.insert(block_hash, parent, place)
        entry.chain.append(block)
        entry.twins += twins

    def trim(self, holder: Holder, position: int) -> None:
        """Gives back the blocks that neither the query at `position` nor later ones see."""
        entry = self._entries[holder]
        if self.layout.has_windows:
            for group in range(len(self.pools)):
                self.cache.release(group, entry.pass_over(group, position))
        entry.seen_from = position

    def shrink(self, holder: Holder, tokens: int) -> None:
        """Gives back the room behind the first `tokens` tokens; none of it is named."""
        entry, kept = self._entries[holder], self.layout.blocks_for(tokens)
        assert kept >= len(entry.chain), "a named block is not given back alone"
        for group, table in enumerate(entry.tables):
            self.cache.release(group, real(table[kept:]))
            del table[kept:]

    def release(self, holder: Holder) -> None:
        """Gives everything back. Does nothing for an unknown holder."""
        entry = self._entries.pop(holder, None)
        if entry is None:
            return
        self._room.release(entry)

    # --- looking --------------------------------------------------------------------------------

    def held(self) -> Iterator[HeldTables]:
        for holder, entry in self._entries.items():
            yield HeldTables(
                holder=holder,
                state=BlockState.LEASED if entry.leased else BlockState.ACTIVE,
                tables=tuple(tuple(real(table)) for table in entry.tables),
                since_s=entry.since_s,
            )

    def counts(self) -> dict[BlockState, int]:
        return self.scarcest.counts()

    @property
    def scarcest(self) -> BlockPool:
        """The counts of the group with the fewest available blocks."""
        if len(self.pools) == 1:
            return self.pools[0]
        return min(self.pools, key=lambda pool: pool.available)

    def orphaned(self) -> int:
        """Blocks that are held in a pool but are in no holder's table: always 0."""
        lost = 0
        for group, pool in enumerate(self.pools):
            known = {b for entry in self._entries.values() for b in entry.real(group)}
            known |= {b for e in self._entries.values() for g, b in e.twins if g == group}
            lost += pool.count - pool.available - len(known)
        return lost

    def validate(self) -> None:
        self.cache.validate()
        assert self.orphaned() == 0, f"{self.orphaned()} orphaned blocks"


_SIDE = "pinned"


@dataclass(frozen=True, slots=True)
class Pins:
    """Pins prefixes, as long as a sequence of `longest_tokens` still fits beside them."""

    tables: BlockTables
    longest_tokens: int

    def __contains__(self, spec: RequestSpec) -> bool:
        return self._holder(self._hashes(spec)) in self.tables

    def try_pin(self, spec: RequestSpec, now_s: float) -> bool:
        """Holds the full blocks of its prompt for good. False unless all of them are cached and the
        longest sequence still fits."""
        hashes = self._hashes(spec)
        holder = self._holder(hashes)
        tokens = len(hashes) * self.tables.layout.block_size
        if holder in self.tables:
            return True
        found = self.tables.try_open(holder, tokens, hashes=hashes, now_s=now_s)
        if found == tokens and self._leave_room():
            return True
        self.tables.release(holder)
        return False

    def _leave_room(self) -> bool:
        pinned = [held.tables for held in self.tables.held() if held.holder.side == _SIDE]
        layout = self.tables.layout
        most = max(
            len({block for tables in pinned for block in tables[group]})
            for group in range(len(layout.groups))
        )
        return self.tables.blocks - most >= layout.blocks_for(self.longest_tokens)

    def _hashes(self, spec: RequestSpec) -> tuple[BlockHash, ...]:
        names = self.tables.chain(spec.tenant, len(spec.prompt_ids))
        names.extend(spec.prompt_ids, len(spec.prompt_ids))
        return tuple(names.full(len(spec.prompt_ids)))

    @staticmethod
    def _holder(hashes: tuple[BlockHash, ...]) -> Holder:
        return Holder(_SIDE, RequestKey(hashes[-1].hex()[:16] if hashes else "empty", 0))
