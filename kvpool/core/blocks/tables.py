"""The block tables of all sequences, over all groups of the layout. Pure; runs in the owner.

A holder is one choice of one request. In groups without a window its tables hold all its tokens, in
the others those that its window still shows. Full blocks are named by their hashes, so that later
requests with the same prefix find them, also after the holder has gone. Operations are
all-or-nothing over the groups. Pinned prefixes are never evicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvpool.core.blocks.device_blocks import DeviceBlocks, NamedBlocks, pieces
from kvpool.core.blocks.eviction import DEFAULT_POLICY, open_policy
from kvpool.core.blocks.holding import Copies, CopyPairs, HeldTables, Holder, Holding, real
from kvpool.core.blocks.pool import BlockState
from kvpool.core.blocks.runs import Columns, Run, path
from kvpool.core.layout.block_names import BlockNames, HashChain
from kvpool.core.layout.hashes import NO_NAMES, BlockHashes, FullNames, Names, tenant_label
from kvpool.core.layout.layout import NO_BLOCK, BlockId, KvLayout, Tables
from kvrelay.types import RequestKey, RequestSpec


@dataclass(slots=True)
class BlockTables:
    """The tables of every holder over the `blocks` blocks of the worker's device tier.

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
    device: DeviceBlocks = field(init=False)
    _copies: Copies = field(init=False)
    _entries: dict[Holder, Holding] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.device = DeviceBlocks(self.layout, self.blocks, open_policy(self.policy))
        self._copies = Copies(self.device)

    def __contains__(self, holder: Holder) -> bool:
        return holder in self._entries

    @property
    def free_blocks(self) -> int:
        """Blocks that every group has free, or can free by evicting cached ones."""
        return self.device.available(self.scarcest)

    @property
    def total_tokens(self) -> int:
        return self.blocks * self.layout.block_size

    def capacity(self, holder: Holder) -> int:
        """Token slots in the shortest table."""
        entry = self._entries.get(holder)
        return min(map(len, entry.tables)) * self.layout.block_size if entry else 0

    def tables(self, holder: Holder) -> Tables:
        """The same object as long as they don't change."""
        entry = self._entries[holder]
        return entry.shown or self._show(entry)

    @staticmethod
    def _show(entry: Holding) -> Tables:
        entry.shown = tuple(map(tuple, entry.tables))
        return entry.shown

    def chain(self, tenant: str, prompt_tokens: int) -> HashChain:
        """Names for the blocks of a new sequence."""
        chain = self.names.chain(tenant, prompt_tokens, self.layout.block_size)
        return chain.told_to(self.device.roots, tenant_label(tenant)) if tenant else chain

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
        hashes: Names = NO_NAMES,
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
        run, length = self.device.find(hashes, seen_from)
        found = length * self.layout.block_size
        entry = self._found(run, length, seen_from, leased=leased, now_s=now_s)
        window_tokens = tokens if ahead_tokens is None else min(tokens, found + ahead_tokens)
        if not self._has_room(entry, tokens, window_tokens, opening=True):
            return None
        self._hold(entry, length)
        self._entries[holder] = entry
        self._extend(entry, tokens, window_tokens)
        self.queried_tokens += len(hashes) * self.layout.block_size
        self.hit_tokens += found
        return found

    def _found(
        self, run: Run | None, length: int, seen_from: int | None, *, leased: bool, now_s: float
    ) -> Holding:
        return Holding.of(
            self.layout,
            run,
            length,
            self.device.firsts(length, seen_from),
            seen_from=length * self.layout.block_size if seen_from is None else seen_from,
            leased=leased,
            now_s=now_s,
        )

    def _has_room(
        self, entry: Holding, tokens: int, window_tokens: int | None, *, opening: bool = False
    ) -> bool:
        """True if there are blocks for `tokens` tokens in all (in groups with a window:
        `window_tokens`). `opening`: its chain isn't held yet, and its cached blocks will no longer
        make room."""
        for group, table in enumerate(entry.tables):
            _, missing = entry.lacks(group, tokens, window_tokens)
            revived = self.device.revived(group, entry.run, table) if opening else 0
            if missing > self.device.available(group) - revived:
                return False
        return True

    def _extend(self, entry: Holding, tokens: int, window_tokens: int | None) -> None:
        """Call it only after `_has_room`: so all groups get blocks or none does."""
        for group, table in enumerate(entry.tables):
            passed, missing = entry.lacks(group, tokens, window_tokens)
            if passed or missing:
                entry.shown = None
            table.extend([NO_BLOCK] * passed)
            if missing:
                table.extend(self.device.take(group, missing, leased=entry.leased))

    def _hold(self, entry: Holding, length: int, *, used: bool = True) -> None:
        """Holds the first `length` named blocks, and the blocks that are held one by one."""
        if entry.run is not None:
            entry.run = self.device.tree.hold(entry.run, length, used=used)
        for group in range(len(entry.tables)):
            if held := entry.held(group):
                self.device.hold(group, held)

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
        if not self._has_room(entry, tokens, window_tokens):
            return False
        self._extend(entry, tokens, window_tokens)
        return True

    def grown(self, holder: Holder, tokens: int, *, now_s: float) -> Tables | None:
        """Its tables, with room for `tokens` tokens in all. None and nothing changed when blocks
        run out."""
        entry, layout = self._entries[holder], self.layout
        has_room = not layout.has_windows and tokens <= len(entry.tables[0]) * layout.block_size
        if has_room or self.try_grow(holder, tokens, now_s=now_s):
            return entry.shown or self._show(entry)
        return None

    def keep(self, holder: Holder, named: NamedBlocks, *, now_s: float) -> None:
        """Holds these named blocks unchanged until `release`. In groups without a window their run
        is held."""
        found = [columns for _, columns in pieces(named)]
        tables = [
            [BlockId(block) for columns in found for block in columns[group]]
            for group in range(len(self.layout.groups))
        ]
        entry = Holding(
            layout=self.layout,
            tables=tables,
            since_s=now_s,
            leased=False,
            seen_from=0,
            run=named.run,
        )
        self._hold(entry, named.end, used=False)
        self._entries[holder] = entry

    def keep_prefix(self, holder: Holder, hashes: Names, *, now_s: float) -> int:
        """Holds the longest cached prefix unchanged until `release`. Returns its number of
        blocks."""
        run, length = self.device.find(hashes, None)
        entry = self._found(run, length, None, leased=False, now_s=now_s)
        self._hold(entry, length)
        self._entries[holder] = entry
        return length

    def activate(self, holder: Holder) -> None:
        """The lease's peer has delivered; the blocks now belong to the running request."""
        entry = self._entries[holder]
        assert entry.leased, f"{holder} holds no lease"
        entry.leased = False
        for pool, table in zip(self.device.pools, entry.tables, strict=True):
            pool.activate(real(table[entry.named :]))

    def fork(self, source: Holder, target: Holder, *, now_s: float) -> None:
        """`target` shares all blocks of `source`; a writer copies them first."""
        entry = self._entries[source]
        assert not entry.leased
        assert target not in self._entries
        copy = entry.copy(now_s)
        self._hold(copy, copy.named)
        self._entries[target] = copy

    def try_replace(self, holder: Holder, left: Holder, blocks: int) -> bool:
        """Gives `holder` other blocks behind its first `blocks`, and `left` all that it had. False
        and nothing changed when blocks run out."""
        entry = self._entries[holder]
        assert entry.named <= blocks
        assert left not in self._entries
        groups = zip(self.layout.groups, entry.tables, strict=True)
        lengths = [(spec.window is None, len(table)) for spec, table in groups]
        size = self.layout.block_size
        window_tokens = size * max((n for is_whole, n in lengths if not is_whole), default=0)
        tokens = size * max(n for _, n in lengths)
        other = entry.copy(entry.since_s)
        for table in other.tables:
            del table[blocks:]
        if not self._has_room(other, tokens, window_tokens):
            return False
        self._hold(other, other.named)
        self._extend(other, tokens, window_tokens)
        self._entries[holder], self._entries[left] = other, entry
        return True

    def try_own(self, holder: Holder, position: int) -> CopyPairs | None:
        """Call it before writing at `position`: replaces a shared block there by an own copy.

        Returns the copies to make (empty tuples when none), or None when blocks run out.
        """
        return self._copies.try_own(self._entries[holder], position // self.layout.block_size)

    # --- naming and giving back -----------------------------------------------------------------

    def fill(self, holder: Holder, names: FullNames, *, edges_full: bool = False) -> None:
        """The holder's first `len(names)` blocks are full, and these are their names. In a group
        with a window the block on the window's edge gets no name, unless `edges_full`: tokens
        outside the window may be missing in it."""
        entry = self._entries[holder]
        assert not entry.leased
        if not self.caching or len(names) <= entry.named:
            return
        columns = entry.columns(len(names), edges_full=edges_full)
        own = self._unshared(columns)
        if own < len(columns[0]):
            columns, names = tuple(c[:own] for c in columns), names.until(entry.named + own)
        entry.run, kept = self.device.name(entry.run, names, columns)
        entry.own += kept

    def _unshared(self, columns: Columns) -> int:
        """The number of blocks before the first that another holder has too, which gets no name."""
        length = len(columns[0])
        for pool, column in zip(self.device.pools, columns, strict=True):
            if shared := pool.shared_among(column):
                length = min(length, *(column.index(block) for block in shared))
        return length

    def trim(self, holder: Holder, position: int) -> None:
        """Gives back the blocks that neither the query at `position` nor later ones see."""
        entry = self._entries[holder]
        if self.layout.has_windows:
            for group in range(len(entry.tables)):
                self.device.release(group, entry.pass_over(group, position))
        entry.seen_from = position

    def shrink(self, holder: Holder, tokens: int) -> None:
        """Gives back the room behind the first `tokens` tokens; none of it is named."""
        entry, kept = self._entries[holder], self.layout.blocks_for(tokens)
        assert kept >= entry.named, "a named block is not given back alone"
        entry.shown = None
        for group, table in enumerate(entry.tables):
            self.device.release(group, real(table[kept:]))
            del table[kept:]

    def release(self, holder: Holder) -> None:
        """Gives everything back. Does nothing for an unknown holder."""
        entry = self._entries.pop(holder, None)
        if entry is None:
            return
        for group in range(len(entry.tables)):
            if held := entry.held(group):
                self.device.release(group, held)
        self.device.release_run(entry.run)

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
        return self.device.counts(self.scarcest)

    @property
    def scarcest(self) -> int:
        """The group with the fewest available blocks."""
        if len(self.layout.groups) == 1:
            return 0
        return min(range(len(self.layout.groups)), key=self.device.available)

    def orphaned(self) -> int:
        """Blocks that are held, but are in no holder's table: always 0."""
        return sum(map(self._orphaned, range(len(self.layout.groups)))) + self._held_for_nobody()

    def _orphaned(self, group: int) -> int:
        known = {block for entry in self._entries.values() for block in entry.held(group)}
        held = self.blocks - self.device.available(group) - len(known)
        if self.layout.groups[group].window is None:
            held -= self.device.tree.blocks - self.device.tree.idle
        return held

    def _held_for_nobody(self) -> int:
        """Blocks of runs that are held, though no holder's chain has them."""
        tree, seen = self.device.tree, dict[Run, None]()
        for entry in self._entries.values():
            for run in path(entry.run):
                if run in seen:
                    break
                seen[run] = None
        return tree.blocks - tree.idle - sum(run.blocks for run in seen)

    def validate(self) -> None:
        self.device.validate()
        assert self.orphaned() == 0, f"{self.orphaned()} orphaned blocks"
        for entry in self._entries.values():
            shown, tables = entry.shown, tuple(map(tuple, entry.tables))
            assert shown is None or shown == tables, "the tables shown are old ones"
        holders = Counter(run for entry in self._entries.values() for run in path(entry.run))
        assert all(run.holders == holders[run] for run in self.device.tree), "a hold is lost"


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

    def _hashes(self, spec: RequestSpec) -> BlockHashes:
        names = self.tables.chain(spec.tenant, len(spec.prompt_ids))
        names.extend(spec.prompt_ids, len(spec.prompt_ids))
        return names.full(len(spec.prompt_ids)).hashes()

    @staticmethod
    def _holder(hashes: BlockHashes) -> Holder:
        return Holder(_SIDE, RequestKey(hashes[-1].hex()[:16] if hashes else "empty", 0))
