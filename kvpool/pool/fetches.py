"""Who reads which chains of the host tier, and until when. Pure; runs in the pool node.

waiting (for the disk) --served--> reading --done, expire, reader lost--> ended
                       `--------reader lost-------------------------------^
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator
from dataclasses import dataclass, field

from kvpool.cached_block import CachedBlock
from kvpool.hashes import BlockHash
from kvpool.tiers.tier_blocks import Chain
from kvrelay.types import Incarnation

FetchKey = tuple[Incarnation, int]
"""(reader, its request number)"""


@dataclass(slots=True)
class Fetch:
    """`loads` are the reads from disk that it waits for; meanwhile `chain` is what was in memory
    already. Both hold the chain against eviction."""

    hashes: tuple[BlockHash, ...]
    skip: int
    loads: set[int]
    chain: Chain
    since_s: float
    deadline_s: float | None = None


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
        """None when there is no such fetch (any more)."""
        return self._open.pop(key, None)

    def of(self, reader: Incarnation) -> list[FetchKey]:
        return [key for key in self._open if key[0] == reader]

    def loaded(self, load: int) -> list[tuple[FetchKey, Fetch]]:
        """A read from disk has ended; the fetches that wait for nothing else."""
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

    def is_reading(self, block_hash: BlockHash) -> bool:
        return any(block_hash == block.hash for block in self._chains())

    def _chains(self) -> Iterator[CachedBlock]:
        for fetch in self._open.values():
            yield from fetch.chain
