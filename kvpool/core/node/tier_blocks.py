"""The places of one pool tier and the blocks they hold. Pure; runs in the pool node.

A place is one host block or one slot on disk: the KV of a block in every layer group. Each is in
exactly one state.

    free --reserve--> reserved --adopt (under its parent)--> cached --evicted by reserve--> reserved
                      reserved --give_back, or no parent--> free

A spoiled block stays in the tree, because others are below it, but it is never served. When it is
adopted again it is whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NewType

from kvpool.core.blocks.eviction import CachedBlock, EvictionPolicy
from kvpool.core.blocks.prefix_index import PrefixIndex
from kvpool.core.layout.hashes import BlockHash
from kvpool.core.layout.layout import BlockId

PoolPlace = NewType("PoolPlace", int)
"""Index of a block-sized place in one tier of one pool node."""

BlockChain = Sequence[CachedBlock]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedRoom:
    """Reserved places, and the blocks that were evicted for them."""

    places: tuple[PoolPlace, ...]
    evicted: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredBlock:
    """A block that an earlier process left in the tier; a higher `written` is younger."""

    hash: BlockHash
    parent: BlockHash | None
    place: PoolPlace
    written: int


class TierBlocks:
    def __init__(self, count: int, policy: EvictionPolicy) -> None:
        self.count = count
        self._index = PrefixIndex(policy)
        self._free = [PoolPlace(place) for place in reversed(range(count))]
        self._reserved: set[PoolPlace] = set()
        self._cached: dict[BlockHash, CachedBlock] = {}
        self._spoiled: set[BlockHash] = set()

    def __contains__(self, block_hash: BlockHash) -> bool:
        """True if the block is in the tree, spoiled or not."""
        return block_hash in self._cached

    def __iter__(self) -> Iterator[BlockHash]:
        return iter(self._cached)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def reserved(self) -> frozenset[PoolPlace]:
        return frozenset(self._reserved)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def held(self) -> int:
        """Blocks that have a holder."""
        return self.cached - self._index.idle

    def serves(self, block_hash: BlockHash) -> bool:
        return block_hash in self._cached and block_hash not in self._spoiled

    def is_spoiled(self, block_hash: BlockHash) -> bool:
        return block_hash in self._spoiled

    def place(self, block_hash: BlockHash) -> PoolPlace:
        return place_of(self._cached[block_hash])

    def parent(self, block_hash: BlockHash) -> BlockHash | None:
        parent = self._cached[block_hash].parent
        return parent.hash if parent is not None else None

    def match(self, hashes: Sequence[BlockHash]) -> int:
        """Number of blocks in the longest prefix of the chain that can be served."""
        for length, block_hash in enumerate(hashes):
            if not self.serves(block_hash):
                return length
        return len(hashes)

    def reserve(self, count: int, *, below: Iterable[BlockHash | None]) -> ReservedRoom:
        """Up to `count` places. Evicts idle blocks if need be, leaves first, but none of the chains
        that end in `below`."""
        missing = max(0, count - len(self._free))
        evicted = self._evict(missing, below) if missing else []
        places = tuple(self._free.pop() for _ in range(min(count, len(self._free))))
        self._reserved.update(places)
        return ReservedRoom(places=places, evicted=tuple(block.hash for block in evicted))

    def _evict(self, count: int, below: Iterable[BlockHash | None]) -> list[CachedBlock]:
        with ExitStack() as kept:
            for block_hash in dict.fromkeys(below):
                if block_hash is not None and block_hash in self._cached:
                    kept.enter_context(self._index.kept(self._cached[block_hash]))
            evicted = self._index.try_evict(min(count, self._index.idle))
        assert evicted is not None
        for block in evicted:
            del self._cached[block.hash]
            self._spoiled.discard(block.hash)
            self._free.append(place_of(block))
        return evicted

    def give_back(self, places: Iterable[PoolPlace]) -> None:
        for place in places:
            self._reserved.remove(place)
            self._free.append(place)

    def adopt(
        self, parent: BlockHash | None, run: Sequence[tuple[BlockHash, PoolPlace]]
    ) -> list[BlockHash]:
        """`run`, a chain below `parent`, is readable from now on. Returns its new hashes.

        It ends before a block that isn't where its chain says. Nothing is adopted when the parent
        is gone. Reserved places that are not needed become free.
        """
        above = self._cached.get(parent) if parent is not None else None
        if parent is not None and above is None:
            self.give_back(place for _, place in run)
            return []
        with ExitStack() as kept:
            if above is not None:
                kept.enter_context(self._index.kept(above))
            return self._insert(above, run)

    def _insert(
        self, above: CachedBlock | None, run: Sequence[tuple[BlockHash, PoolPlace]]
    ) -> list[BlockHash]:
        chain: list[CachedBlock] = []
        new: list[BlockHash] = []
        for number, (block_hash, place) in enumerate(run):
            parent = chain[-1] if chain else above
            if block_hash in self._cached and self._cached[block_hash].parent is not parent:
                self.give_back(place for _, place in run[number:])
                break
            block = self._index.insert(block_hash, parent=parent, place=(BlockId(place),))
            chain.append(block)
            if self._settle(block, place):
                new.append(block_hash)
        self._index.release(chain)
        return new

    def _settle(self, block: CachedBlock, place: PoolPlace) -> bool:
        """`place` becomes the block's, or is free again when the block has a sound one."""
        self._reserved.remove(place)
        if place_of(block) == place:
            self._cached[block.hash] = block
            return True
        if block.hash not in self._spoiled:
            self._free.append(place)
            return False
        self._spoiled.remove(block.hash)
        self._free.append(place_of(block))
        block.place = (BlockId(place),)
        return True

    def hold(self, hashes: Sequence[BlockHash]) -> BlockChain:
        """The longest prefix that can be served; it is not evicted until `release`."""
        return self._index.acquire(hashes[: self.match(hashes)])

    def release(self, chain: BlockChain) -> None:
        self._index.release(chain)

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        """These blocks were useful."""
        self.release(self.hold(hashes))

    def spoil(self, block_hash: BlockHash) -> bool:
        """Stops serving the block: its bytes are wrong. False when it wasn't served anyway."""
        if not self.serves(block_hash):
            return False
        self._spoiled.add(block_hash)
        return True

    def restore(self, blocks: Iterable[RestoredBlock]) -> int:
        """Takes over the blocks of an earlier process, before anything else. Returns how many were
        kept."""
        assert not self._cached and not self._reserved
        kept = _rooted({b.hash: b for b in sorted(blocks, key=lambda b: b.written)})
        for block in kept:
            parent = self._cached[block.parent] if block.parent is not None else None
            place = (BlockId(block.place),)
            self._cached[block.hash] = self._index.insert(block.hash, parent=parent, place=place)
        self._index.release([self._cached[hash_] for hash_ in _youngest_first(kept)])
        taken = {block.place for block in kept}
        self._free = [place for place in self._free if place not in taken]
        return len(kept)

    def validate(self) -> None:
        """The conservation law: each place exactly once free, reserved or a block's."""
        self._index.validate()
        places = [place_of(block) for block in self._index]
        assert {b.hash for b in self._index} == self._cached.keys()
        assert self._spoiled <= self._cached.keys()
        every = [*self._free, *self._reserved, *places]
        assert len(every) == self.count, "a place is lost or there twice"
        assert set(every) == set(range(self.count))


def place_of(block: CachedBlock) -> PoolPlace:
    return PoolPlace(block.place[0])


def _rooted(blocks: dict[BlockHash, RestoredBlock]) -> list[RestoredBlock]:
    """Those whose whole chain is there, parents first."""
    below: dict[BlockHash | None, list[RestoredBlock]] = {}
    for block in blocks.values():
        below.setdefault(block.parent, []).append(block)
    found = list(below.get(None, ()))
    for block in found:
        found += below.get(block.hash, ())
    return found


def _youngest_first(parents_first: Sequence[RestoredBlock]) -> list[BlockHash]:
    """By the last time that a block or one below it was written, a parent before its children."""
    age: dict[BlockHash, tuple[int, int]] = {}
    for depth, block in enumerate(parents_first):
        age[block.hash] = (block.written, -depth)
    for block in reversed(parents_first):
        if block.parent is not None:
            written = max(age[block.parent][0], age[block.hash][0])
            age[block.parent] = (written, age[block.parent][1])
    return sorted(age, key=lambda block_hash: age[block_hash], reverse=True)
