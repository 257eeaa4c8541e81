"""Open stores and fetches of the host tier, with their leases. Pure; runs in the pool node.

Stores, which write to host places:

    granted --stored, abandoned, writer lost--> (its places are the tier's again)
    granted --expire--> fenced --stored, abandoned, writer lost--> (the same, and unread)

The writer of a fenced place may still write to it, so it is reused only once that has ended.

Fetches, which read chains:

waiting (for the disk) --served--> reading --done, expire, reader lost--> ended
                       `--------reader lost-------------------------------^
"""

from __future__ import annotations

from array import array
from collections.abc import ItemsView, Iterator
from dataclasses import dataclass, field

from kvpool.core.blocks.runs import Run, path
from kvpool.core.layout.hashes import BlockHashes
from kvpool.core.node.messages import ChainBlock
from kvpool.core.node.tier_blocks import HeldChain, NewChain, PoolPlace, blocks_of
from kvrelay.types import Incarnation

StoreKey = tuple[Incarnation, int]
"""(writer, its request number)"""


@dataclass(slots=True)
class Store:
    blocks: tuple[ChainBlock, ...]
    places: tuple[PoolPlace, ...]
    since_s: float
    deadline_s: float
    fenced: bool = False

    def chains(self) -> list[NewChain]:
        """Its blocks in chains, each below a block that is not in the chain."""
        parents = [block.parent for block in self.blocks]
        hashes = [block.hash for block in self.blocks]
        starts = [i for i, parent in enumerate(parents) if not i or parent != hashes[i - 1]]
        return [
            NewChain(
                parent=parents[first],
                hashes=BlockHashes.of(hashes[first:end]),
                places=array("i", self.places[first:end]),
                tenant=self.blocks[first].tenant,
            )
            for first, end in zip(starts, [*starts[1:], len(hashes)], strict=True)
        ]


@dataclass(slots=True)
class Stores:
    _open: dict[StoreKey, Store] = field(init=False, default_factory=dict)
    _coming: set[bytes] = field(init=False, default_factory=set)

    def __contains__(self, key: StoreKey) -> bool:
        return key in self._open

    def __len__(self) -> int:
        return len(self._open)

    @property
    def fenced(self) -> int:
        """Places that are neither useful nor free."""
        return sum(len(store.places) for store in self._open.values() if store.fenced)

    def items(self) -> ItemsView[StoreKey, Store]:
        return self._open.items()

    def places(self) -> Iterator[PoolPlace]:
        for store in self._open.values():
            yield from store.places

    def is_coming(self, block: ChainBlock) -> bool:
        """A writer is storing it."""
        return block.hash in self._coming

    def is_parent_coming(self, block: ChainBlock) -> bool:
        return block.parent in self._coming

    def open(self, key: StoreKey, store: Store) -> None:
        assert key not in self._open
        self._open[key] = store
        self._coming.update(block.hash for block in store.blocks)

    def close(self, key: StoreKey) -> Store | None:
        """The writer will not write any more; None when it holds no such store."""
        store = self._open.pop(key, None)
        if store is not None and not store.fenced:
            self._coming.difference_update(block.hash for block in store.blocks)
        return store

    def of(self, writer: Incarnation) -> list[StoreKey]:
        return [key for key in self._open if key[0] == writer]

    def expire(self, now_s: float) -> list[StoreKey]:
        """Fences every store whose time is over; another writer may then store its blocks."""
        over = [k for k, s in self._open.items() if not s.fenced and s.deadline_s <= now_s]
        for key in over:
            store = self._open[key]
            store.fenced = True
            self._coming.difference_update(block.hash for block in store.blocks)
        return over

    def validate(self) -> None:
        live = [b.hash for s in self._open.values() if not s.fenced for b in s.blocks]
        assert len(set(live)) == len(live), "two writers of one block"
        assert set(live) == self._coming
        assert all(store.places for store in self._open.values())


FetchKey = tuple[Incarnation, int]
"""(reader, its request number)"""


@dataclass(slots=True)
class Fetch:
    """`loads` are the reads from disk that it waits for; meanwhile `chain` is the part that was in
    memory. Both protect the chain from eviction."""

    hashes: BlockHashes
    skip: int
    loads: set[int]
    chain: HeldChain
    since_s: float
    deadline_s: float | None = None

    @property
    def blocks(self) -> int:
        return blocks_of(self.chain)


@dataclass(slots=True)
class Fetches:
    _open: dict[FetchKey, Fetch] = field(init=False, default_factory=dict)

    def __contains__(self, key: FetchKey) -> bool:
        return key in self._open

    def __len__(self) -> int:
        return len(self._open)

    def items(self) -> ItemsView[FetchKey, Fetch]:
        return self._open.items()

    def open(self, key: FetchKey, fetch: Fetch) -> None:
        assert key not in self._open
        self._open[key] = fetch

    def close(self, key: FetchKey) -> Fetch | None:
        """None when there is no such fetch."""
        return self._open.pop(key, None)

    def of(self, reader: Incarnation) -> list[FetchKey]:
        return [key for key in self._open if key[0] == reader]

    def loaded(self, load: int) -> list[tuple[FetchKey, Fetch]]:
        """A read from disk has ended. Returns the fetches that wait for nothing else."""
        ready = []
        for key, fetch in self._open.items():
            if load in fetch.loads:
                fetch.loads.remove(load)
                if not fetch.loads:
                    ready.append((key, fetch))
        return ready

    def expire(self, now_s: float) -> list[Fetch]:
        """Ends every fetch whose time is over."""
        over = [
            key
            for key, fetch in self._open.items()
            if fetch.deadline_s is not None and fetch.deadline_s <= now_s
        ]
        return [self._open.pop(key) for key in over]

    def is_reading(self, run: Run) -> bool:
        return any(part is run for fetch in self._open.values() for part in path(fetch.chain))

    def runs(self) -> set[Run]:
        """All runs that are held."""
        return {part for fetch in self._open.values() for part in path(fetch.chain)}
