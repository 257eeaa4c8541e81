"""Which blocks came and went since the last report. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvpool.core.layout.hashes import BlockHash


@dataclass(slots=True)
class BlockNews:
    """Parents come before their children."""

    _stored: dict[BlockHash, None] = field(default_factory=dict)
    _removed: dict[BlockHash, None] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """True if there are changes to report."""
        return bool(self._stored or self._removed)

    def stored(self, hashes: Iterable[BlockHash]) -> None:
        for block_hash in hashes:
            if self._removed.pop(block_hash, 0) is not None:
                self._stored[block_hash] = None

    def removed(self, hashes: Iterable[BlockHash]) -> None:
        for block_hash in hashes:
            if self._stored.pop(block_hash, 0) is not None:
                self._removed[block_hash] = None

    def take(self) -> tuple[tuple[BlockHash, ...], tuple[BlockHash, ...]]:
        """(stored, removed) since the last call."""
        news = tuple(self._stored), tuple(self._removed)
        self._stored.clear()
        self._removed.clear()
        return news
