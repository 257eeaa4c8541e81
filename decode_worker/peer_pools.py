"""What a decode worker knows of prefill workers' KV pools, and so how it takes a piece. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpool.handoff import FetchPiece, PieceAhead
from kvpool.layout import KvLayout, Tables
from kvpool.link_cost import LinkCost, Way
from kvpool.piece import check_cut, holds, source_side, transfer_shape
from kvpool.pool_map import KvFacts
from kvpool.transfer_plan import Side, Write
from kvrelay.types import Incarnation


@dataclass(slots=True, kw_only=True)
class PeerPools:
    """`layout` is this worker's own, `slab_bytes` what one of its slabs holds."""

    layout: KvLayout
    slab_bytes: int
    _facts: dict[Incarnation, KvFacts] = field(default_factory=dict)
    _costs: dict[Incarnation, LinkCost] = field(default_factory=dict)

    def met(self, peer: Incarnation, facts: KvFacts) -> None:
        self._facts[peer] = facts

    def measured(self, peer: Incarnation, cost: LinkCost) -> None:
        self._costs[peer] = cost

    def forget_cost(self, peer: Incarnation) -> None:
        """A direct read has failed: slabs, until the link is measured again."""
        self._costs.pop(peer, None)

    def lost(self, peer: Incarnation) -> None:
        self._facts.pop(peer, None)
        self._costs.pop(peer, None)

    def write_of(self, ahead: PieceAhead, wanted: range, next_position: int) -> Write:
        """`wanted` are the tokens up to the prompt's end that are not held here. Raises PeerError
        for a piece that this worker's cut of them has not."""
        return check_cut(self.layout, ahead.piece, self.slab_bytes, wanted, next_position)

    def direct(
        self, peer: Incarnation, ahead: PieceAhead, write: Write, tables: Tables
    ) -> FetchPiece | None:
        """How to read the piece where it lies, where that is possible and the faster way.

        Raises PeerError when the peer has not named its blocks.
        """
        target = Side(tables=tables, block_size=self.layout.block_size)
        assert holds(target, write), f"{ahead.key} lacks blocks for {ahead.piece}"
        facts, cost = self._facts.get(peer), self._costs.get(peer)
        if facts is None or cost is None or not facts.region:
            return None
        source = self._source(facts, ahead, write)
        if cost.choose(transfer_shape(write, source, target)) is Way.COLLATED:
            return None
        return FetchPiece(
            peer=peer,
            key=ahead.key,
            piece=ahead.number,
            write=write,
            kv=facts,
            source=source,
            tables=tables,
        )

    def _source(self, facts: KvFacts, ahead: PieceAhead, write: Write) -> Side:
        return source_side(
            write,
            ahead.held,
            groups=len(self.layout.groups),
            block_size=facts.block_size,
            blocks=facts.blocks,
        )
