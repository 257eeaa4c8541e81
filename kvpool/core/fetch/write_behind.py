"""Offers newly named blocks to the host's pool node, from prefill and from decode alike. Pure.

An offer keeps its blocks unchanged until it is settled. PoolStores bounds how many blocks may wait.
A batch that decodes names a block in nearly every step: they are offered together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import cast

from kvpool.core.blocks.device_blocks import NamedBlocks, Place, pieces
from kvpool.core.blocks.holding import Holder
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.fetch.client_events import OfferBlocks, OfferedBlock
from kvpool.core.layout.hashes import BlockHash, BlockHashes
from kvpool.core.layout.layout import NO_BLOCK
from kvrelay.types import RequestKey

OFFER_BLOCKS = 32
"""As many are offered at once, also while a step runs."""
OFFER_AFTER_S = 0.25
"""So long fewer may wait."""


@dataclass(slots=True)
class WriteBehind:
    """`at_once`: blocks never wait for others, because someone waits for them."""

    tables: BlockTables
    at_once: bool = False
    _since_s: float | None = None
    _offers: int = 0
    _pending: dict[int, frozenset[BlockHash]] = field(default_factory=dict)
    _kept: dict[int, int] = field(default_factory=dict)
    """# offer |-> its runs, which are held"""

    @property
    def idle(self) -> bool:
        """The node has, or will not take, all that was named."""
        return not (self._pending or self.tables.device.named_blocks)

    def settled_blocks(self, hashes: BlockHashes) -> int:
        """How many of these blocks, from the first on, are neither on their way to the node nor
        still to be offered."""
        busy = [*self._pending.values(), self.tables.device.named_hashes()]
        unsettled = (i for i, one in enumerate(hashes) if any(one in among for among in busy))
        return next(unsettled, len(hashes))

    def offer(self, now_s: float, *, is_busy: bool = False) -> OfferBlocks | None:
        """Offers all blocks named since the last offer, unless they wait for more because a step is
        running. A block without one of its parts is passed over. An empty offer is made all the
        same, so that waiting callers learn that it is settled."""
        if is_busy and not self.at_once and self._awaits_more(now_s):
            return None
        self._since_s = None
        named = self.tables.device.take_named()
        if not named:
            return None
        self._offers += 1
        offered = tuple(chain.from_iterable(map(_offered, named)))
        self._kept[self._offers] = len(named)
        for number, one in enumerate(named):
            self.tables.keep(_holder(self._offers, number), one, now_s=now_s)
        self._pending[self._offers] = frozenset(block.hash for block in offered)
        return OfferBlocks(offer=self._offers, blocks=offered)

    def _awaits_more(self, now_s: float) -> bool:
        waiting = self.tables.device.named_blocks
        if self._since_s is None and waiting:
            self._since_s = now_s
        is_due = self._since_s is not None and now_s - self._since_s >= OFFER_AFTER_S
        return waiting < OFFER_BLOCKS and not is_due

    def settled(self, offer: int) -> None:
        """Its blocks are no longer read."""
        for number in range(self._kept.pop(offer)):
            self.tables.release(_holder(offer, number))

    def confirmed(self, offer: int) -> None:
        """The blocks that the node has taken can now be found there."""
        del self._pending[offer]


def _holder(offer: int, run: int) -> Holder:
    return Holder("offer", RequestKey(str(offer), 0), run)


def _offered(named: NamedBlocks) -> Iterator[OfferedBlock]:
    """A block that lacks one of its parts is passed over."""
    parent = named.parent
    for hashes, columns in pieces(named):
        places = cast(Iterator[Place], zip(*columns, strict=True))
        for block_hash, place in zip(BlockHashes(hashes), places, strict=True):
            if NO_BLOCK not in place:
                yield OfferedBlock(block_hash, parent, place, named.run.tenant)
            parent = block_hash
