"""The places of one pool tier and the blocks they hold. Pure; runs in the pool node.

A place is one host block or one slot on disk: the KV of a block in every layer group. Each is in
exactly one state.

    free --reserve--> reserved --adopt (under its parent)--> cached --evicted by reserve--> reserved
                      reserved --give_back, or no parent--> free

A spoiled block stays in the tree, because others are below it, but it is never served. When it is
adopted again it is whole.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain as chained
from typing import NamedTuple, NewType, Protocol

from kvpool.core.blocks.news import Strand
from kvpool.core.blocks.runs import Evicted, Run, RunPolicy, RunTree, common_end, path
from kvpool.core.layout.hashes import BlockHash, BlockHashes, Names
from kvpool.core.node.block_index import BlockAt, BlockIndex
from kvpool.core.node.tenants import TenantAges

PoolPlace = NewType("PoolPlace", int)
"""Index of a block-sized place in one tier of one pool node."""

HeldChain = Run | None
"""A held chain, by the run that ends it; None: no block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewChain:
    """Blocks below `parent` at reserved `places`. `tenant` is a label for reports."""

    parent: BlockHash | None
    hashes: BlockHashes
    places: array[int]
    tenant: str = ""


class StrandPart(NamedTuple):
    """Its blocks from depth `start` to before `end`."""

    strand: int
    start: int
    end: int


class StrandNews(Protocol):
    """Hears what can be served of each strand."""

    def stored(self, strand: int, /) -> None:
        """It is new, or longer."""

    def cut(self, strand: int, end: int, /) -> None:
        """It ends at this depth. It is gone if it begins there."""


class TierBlocks:
    def __init__(self, count: int, policy: RunPolicy) -> None:
        self.count = count
        self.news: StrandNews | None = None
        self.ages = TenantAges()
        self._tree = RunTree(policy)
        self._index = BlockIndex(count, self.hash_at)
        self._free = array("i", range(count - 1, -1, -1))
        self._reserved: set[PoolPlace] = set()
        self._spoiled: dict[int, set[int]] = {}  # strand |-> depths

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def reserved(self) -> frozenset[PoolPlace]:
        return frozenset(self._reserved)

    @property
    def cached(self) -> int:
        return self._tree.blocks

    @property
    def held(self) -> int:
        """Blocks that have a holder."""
        return self._tree.blocks - self._tree.idle

    @property
    def has_spoiled(self) -> bool:
        return bool(self._spoiled)

    # --- finding --------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[BlockHash]:
        for run in self._tree:
            yield from BlockHashes(bytes(run.hashes))

    def __contains__(self, block_hash: BlockHash) -> bool:
        """True if the block is in the tree, spoiled or not."""
        return self._index.find(block_hash) is not None

    def find(self, block_hash: BlockHash) -> BlockAt | None:
        return self._index.find(block_hash)

    def serves(self, block_hash: BlockHash) -> bool:
        at = self._index.find(block_hash)
        return at is not None and not self.is_spoiled(at)

    def is_spoiled(self, at: BlockAt) -> bool:
        return at.depth in self._spoiled.get(at.strand, ())

    def run_with(self, at: BlockAt) -> Run:
        return self._tree.run_before(at.strand, at.depth + 1)

    def hash_at(self, at: BlockAt) -> BlockHash:
        return self.run_with(at).at(at.depth)

    def end(self, strand: int) -> int:
        """Its depth, spoiled blocks included; 0: it is gone."""
        found = self._tree.strand(strand)
        return found.end if found is not None else 0

    def place(self, at: BlockAt) -> PoolPlace:
        run = self.run_with(at)
        return PoolPlace(run.columns[0][at.depth - run.start])

    def parent(self, at: BlockAt) -> BlockHash | None:
        run = self.run_with(at)
        above = run if at.depth > run.start else run.parent
        return above.at(at.depth - 1) if above is not None else None

    def tenant(self, at: BlockAt) -> str:
        return self.run_with(at).tenant

    def match(self, names: Names) -> int:
        """Number of blocks in the longest prefix of the chain that can be served."""
        return self._sound_end(*self._tree.find(names))

    def _sound_end(self, run: Run | None, end: int) -> int:
        """The depth of the first spoiled block of the chain that ends in `run`; at most `end`."""
        for part in path(run) if self._spoiled else ():
            depths = self._spoiled.get(part.number, ())
            end = min([end, *(depth for depth in depths if part.start <= depth < part.end)])
        return end

    def places(self, names: Names, start: int) -> tuple[PoolPlace, ...]:
        """Of the chain's longest prefix here, from depth `start` on."""
        run, end = self._tree.find(names)
        return _places(run, start, end)

    # --- holding --------------------------------------------------------------------------------

    def hold(self, names: Names) -> HeldChain:
        """The longest prefix that can be served; it is not evicted until `release`."""
        run, end = self._tree.find(names)
        end = self._sound_end(run, end)
        while run is not None and run.start >= end:
            run = run.parent
        return self._tree.hold(run, end) if run is not None else None

    def release(self, chain: HeldChain) -> None:
        if chain is not None:
            self._tree.release(chain)

    def touch(self, names: Names) -> int:
        """The longest prefix that can be served was useful. Returns its number of blocks."""
        chain = self.hold(names)
        self.release(chain)
        return blocks_of(chain)

    def renew(self, block_hash: BlockHash) -> None:
        """Of all idle chains, the one that ends with this block is now evicted last."""
        self.release(self._hold_to(block_hash))

    def _hold_to(self, block_hash: BlockHash | None) -> HeldChain:
        """Holds the chain that ends with this block, if it is there. That is no use."""
        at = self._index.find(block_hash) if block_hash is not None else None
        if at is None:
            return None
        return self._tree.hold(self.run_with(at), at.depth + 1, used=False)

    # --- room -----------------------------------------------------------------------------------

    def reserve(self, count: int, *, below: Iterable[BlockHash | None]) -> tuple[PoolPlace, ...]:
        """Up to `count` places. Evicts idle blocks if need be, leaves first, but none of the chains
        that end in `below`."""
        missing = count - len(self._free)
        if missing > 0:
            self._evict(missing, below)
        first = max(0, len(self._free) - count)
        places = tuple(map(PoolPlace, reversed(self._free[first:])))
        del self._free[first:]
        self._reserved.update(places)
        return places

    def _evict(self, count: int, below: Iterable[BlockHash | None]) -> None:
        held = [self._hold_to(block_hash) for block_hash in dict.fromkeys(below)]
        evicted = self._tree.evict(min(count, self._tree.idle))
        for chain in held:
            self.release(chain)
        for gone in evicted:
            self._forget(gone)

    def _forget(self, gone: Evicted) -> None:
        self._free.extend(reversed(gone.columns[0]))
        self._index.remove(gone.hashes, gone.number, gone.end)
        is_gone = self._tree.strand(gone.number) is None
        blocks = len(gone.columns[0])
        self.ages.went(gone.tenant, gone.number, blocks, is_gone=is_gone)
        if gone.number in self._spoiled:
            left = {depth for depth in self._spoiled.pop(gone.number) if depth < gone.end}
            if left:
                self._spoiled[gone.number] = left
        if self.news is not None:
            self.news.cut(gone.number, gone.end)

    def claim(self, places: Collection[PoolPlace]) -> None:
        """Reserves these places, before anything else."""
        assert not self.cached and not self._reserved
        self._free = array("i", (place for place in self._free if place not in places))
        self._reserved.update(places)

    def give_back(self, places: Iterable[PoolPlace]) -> None:
        for place in places:
            self._reserved.remove(place)
            self._free.append(place)

    # --- storing --------------------------------------------------------------------------------

    def adopt(self, chain: NewChain, now_s: float) -> list[StrandPart]:
        """The chain is readable from now on. Returns the blocks that could not be served before.

        It ends before a block that isn't where its chain says. Nothing is adopted when the parent
        is gone. Reserved places that are not needed become free.
        """
        self._reserved.difference_update(chain.places)
        tail = self._hold_to(chain.parent)
        if chain.parent is not None and tail is None:
            self._free.extend(chain.places)
            return []
        return self._adopt_below(tail, chain, now_s)

    def _adopt_below(self, tail: HeldChain, chain: NewChain, now_s: float) -> list[StrandPart]:
        start = depth = blocks_of(tail)
        names, places, new = _NamesFrom(start, chain.hashes), chain.places, list[StrandPart]()
        while depth < len(names):
            known = self._tree.child(tail, names.at(depth))
            if known is None:
                hashes = self._unknown(chain.hashes[depth - start :])
                self._free.extend(places[len(hashes) :])
                if hashes:
                    tail = self._append(tail, hashes, places[: len(hashes)], chain.tenant, now_s)
                    new.append(StrandPart(tail.number, depth, tail.end))
                break
            tail = self._tree.hold_next(known, common_end(names, known.hashes, depth))
            new += self._join(tail, places[: tail.blocks])
            places = places[tail.blocks :]
            depth = tail.end
        self.release(tail)
        return new

    def _unknown(self, hashes: BlockHashes) -> BlockHashes:
        """Those before the first that is in the tree."""
        return hashes[: next((i for i, name in enumerate(hashes) if name in self), len(hashes))]

    def _append(
        self, tail: HeldChain, hashes: BlockHashes, places: array[int], tenant: str, now_s: float
    ) -> Run:
        start = blocks_of(tail)
        run = self._tree.append(tail, hashes.packed, (places,), tenant)
        self._index.add(hashes.packed, run.number, start)
        self.ages.came(run.tenant, run.number, len(hashes), now_s)
        self._stored(run.number)
        return run

    def _join(self, run: Run, places: array[int]) -> list[StrandPart]:
        """Blocks that are there already keep their places, unless they are spoiled. Returns
        those."""
        spoiled = sorted(self._spoiled.get(run.number, ()))
        healed = [depth for depth in spoiled if run.start <= depth < run.end]
        (column,) = run.columns
        for depth in healed:
            index = depth - run.start
            column[index], places[index] = places[index], column[index]
            self._heal(run, depth)
        self._free.extend(places)
        return [StrandPart(run.number, depth, depth + 1) for depth in healed]

    # --- damage ---------------------------------------------------------------------------------

    def spoil(self, block_hash: BlockHash) -> bool:
        """Stops serving the block: its bytes are wrong. False when it wasn't served anyway."""
        at = self._index.find(block_hash)
        if at is None or self.is_spoiled(at):
            return False
        self._spoiled.setdefault(at.strand, set()).add(at.depth)
        if self.news is not None:
            self.news.cut(at.strand, at.depth)
            for strand, begin in _strands_below(self.run_with(at)).items():
                self.news.cut(strand, begin)
        return True

    def _heal(self, run: Run, depth: int) -> None:
        self._spoiled[run.number].remove(depth)
        if not self._spoiled[run.number]:
            del self._spoiled[run.number]
        for strand in sorted({run.number, *_strands_below(run)}):
            self._stored(strand)

    def _stored(self, strand: int) -> None:
        """A strand of which nothing can be served is told when that changes."""
        if self.news is not None and self.strand(strand) is not None:
            self.news.stored(strand)

    # --- what routers are told ------------------------------------------------------------------

    def strands(self) -> Iterator[int]:
        """Parents before their children."""
        return self._tree.strands()

    def strand(self, number: int) -> Strand | None:
        """As much of the strand as can be served; None: nothing."""
        strand = self._tree.strand(number)
        if strand is None or not self._spoiled:
            return strand
        end = self._sound_end(self._tree.run_before(number, strand.end), strand.end)
        return strand._replace(end=end) if end > strand.begin else None

    def hashes(self, number: int, start: int, end: int) -> bytes:
        return self._tree.hashes(number, start, end)

    def validate(self) -> None:
        """The conservation law: each place exactly once free, reserved or a block's."""
        self._tree.validate()
        self._index.validate(self._tree.blocks)
        places = [place for run in self._tree for place in run.columns[0]]
        every = [*self._free, *self._reserved, *places]
        assert len(every) == self.count, "a place is lost or there twice"
        assert set(every) == set(range(self.count))
        for strand, depths in self._spoiled.items():
            assert depths and all(self.run_with(BlockAt(strand, depth)) for depth in depths)
        held: dict[str, dict[int, int]] = {}
        for run in self._tree:
            of_label = held.setdefault(run.tenant, {})
            of_label[run.number] = of_label.get(run.number, 0) + run.blocks
        self.ages.validate(held)


def places_of(chain: HeldChain, skip: int) -> tuple[PoolPlace, ...]:
    """Of the blocks of a held chain, without the first `skip`."""
    return _places(chain, skip, blocks_of(chain))


def _places(run: Run | None, start: int, end: int) -> tuple[PoolPlace, ...]:
    """At the depths from `start` to before `end` of a chain; `run` has its end."""
    parts = [part for part in path(run) if part.end > start]
    slices = (p.columns[0][max(0, start - p.start) : end - p.start] for p in reversed(parts))
    return tuple(map(PoolPlace, chained.from_iterable(slices)))


def blocks_of(chain: HeldChain) -> int:
    return chain.end if chain is not None else 0


class _NamesFrom:
    """Some hashes of a chain, from depth `start` on."""

    def __init__(self, start: int, hashes: BlockHashes) -> None:
        self._start = start
        self._hashes = hashes

    def __len__(self) -> int:
        return self._start + len(self._hashes)

    def at(self, depth: int) -> BlockHash:
        return self._hashes.at(depth - self._start)


def _strands_below(run: Run) -> dict[int, int]:
    """# strand that begins below `run` |-> its first depth"""
    found: dict[int, int] = {}
    waiting = list(run.children.values())
    while waiting:
        below = waiting.pop()
        if below.number != run.number:
            found.setdefault(below.number, below.start)
        waiting += below.children.values()
    return found
