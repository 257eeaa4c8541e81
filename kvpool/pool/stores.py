"""Who may write to which host places, and until when. Pure; runs in the pool node.

    granted --stored, abandoned, writer lost--> (its places are the tier's again)
    granted --expire--> fenced --stored, abandoned, writer lost--> (the same, and unread)

Its writer may still write to a fenced place, so it is used again only once that has ended.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator
from dataclasses import dataclass, field

from kvpool.pool.messages import ChainBlock
from kvpool.tiers.tier_blocks import PoolPlace
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

    def runs(self) -> Iterator[list[tuple[ChainBlock, PoolPlace]]]:
        """Its blocks in chains, each below a block that is not in the chain."""
        run: list[tuple[ChainBlock, PoolPlace]] = []
        for block, place in zip(self.blocks, self.places, strict=True):
            if run and block.parent != run[-1][0].hash:
                yield run
                run = []
            run.append((block, place))
        if run:
            yield run


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
        """Places that are neither of use nor free."""
        return sum(len(store.places) for store in self._open.values() if store.fenced)

    def items(self) -> ItemsView[StoreKey, Store]:
        return self._open.items()

    def places(self) -> Iterator[PoolPlace]:
        for store in self._open.values():
            yield from store.places

    def is_coming(self, block: ChainBlock) -> bool:
        """A writer is at it."""
        return block.hash in self._coming

    def is_parent_coming(self, block: ChainBlock) -> bool:
        return block.parent in self._coming

    def open(self, key: StoreKey, store: Store) -> None:
        assert key not in self._open
        self._open[key] = store
        self._coming.update(block.hash for block in store.blocks)

    def close(self, key: StoreKey) -> Store | None:
        """The writer will not write (any more); None when it holds no such store."""
        store = self._open.pop(key, None)
        if store is not None and not store.fenced:
            self._coming.difference_update(block.hash for block in store.blocks)
        return store

    def of(self, writer: Incarnation) -> list[StoreKey]:
        return [key for key in self._open if key[0] == writer]

    def expire(self, now_s: float) -> list[StoreKey]:
        """Fences every store whose time is over; its blocks may come from another writer."""
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
