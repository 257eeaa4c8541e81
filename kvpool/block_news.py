"""What a cache holds since it was last asked, and holds no more. Pure.

Coalesced: of a block that came and went, or went and came again, in between nothing is told. So
there are never more changes than twice the blocks that the cache has room for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpool.hashes import BlockHash


@dataclass(slots=True)
class BlockNews:
    """Parents before their children."""

    _stored: dict[BlockHash, None] = field(default_factory=dict)
    _removed: dict[BlockHash, None] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether there is anything to tell."""
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
