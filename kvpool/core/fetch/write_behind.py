"""Offers newly named blocks to the host's pool node, from prefill and from decode alike. Pure.

An offer keeps its blocks unchanged until it is settled. The pool client bounds how many blocks may
wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvpool.core.blocks.eviction import CachedBlock
from kvpool.core.blocks.holding import Holder
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.fetch.client_events import OfferBlocks, OfferedBlock
from kvpool.core.layout.hashes import BlockHash
from kvpool.core.layout.layout import NO_BLOCK
from kvrelay.types import RequestKey


@dataclass(slots=True)
class WriteBehind:
    tables: BlockTables
    _offers: int = 0
    _pending: dict[int, frozenset[BlockHash]] = field(default_factory=dict)

    def has_settled(self, hashes: Iterable[BlockHash]) -> bool:
        """None of these is on its way to the node, or still to be offered."""
        pending = set().union(*self._pending.values())
        return pending.isdisjoint(hashes) and not self.tables.cache.has_news(hashes)

    def offer(self, now_s: float) -> OfferBlocks | None:
        """Offers all blocks named since the last call. A block without one of its parts is passed
        over. An empty offer is made all the same, so that waiting callers learn that it is
        settled."""
        news = self.tables.cache.take_news()
        if not news:
            return None
        fresh = [block for block in news if NO_BLOCK not in block.place]
        self._offers += 1
        self._pending[self._offers] = frozenset(block.hash for block in fresh)
        self.tables.keep(_holder(self._offers), [block.place for block in fresh], now_s=now_s)
        return OfferBlocks(offer=self._offers, blocks=tuple(map(_offered, fresh)))

    def settled(self, offer: int) -> None:
        """Its blocks are no longer read."""
        self.tables.release(_holder(offer))

    def confirmed(self, offer: int) -> None:
        """The blocks that the node has taken can now be found there."""
        del self._pending[offer]


def _holder(offer: int) -> Holder:
    return Holder("offer", RequestKey(str(offer), 0))


def _offered(block: CachedBlock) -> OfferedBlock:
    parent = block.parent.hash if block.parent is not None else None
    return OfferedBlock(block.hash, parent, block.place, block.tenant)
