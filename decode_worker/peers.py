"""What a decode worker knows about prefill workers' KV, and how it takes each piece of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvpool.core.layout.codec import Codec
from kvpool.core.layout.layout import KvLayout, Tables
from kvpool.core.transfer.codec_choice import (
    NO_CODEC,
    CodecChoice,
    CodecOffer,
    choose_codec,
    wire_dtype,
)
from kvpool.core.transfer.commands import FetchPiece, WriteSlab
from kvpool.core.transfer.copy_watch import PeerCopy
from kvpool.core.transfer.link_cost import LinkCost, TransferShape, TransferWay
from kvpool.core.transfer.messages import PiecesAhead, allowed_distance
from kvpool.core.transfer.piece import check_cut, holds, source_side, transfer_shape
from kvpool.core.transfer.pool_map import KvFacts
from kvpool.core.transfer.write import Side, SlabSection, SlabWrite
from kvrelay.types import Incarnation

UNMEASURED_BYTES_PER_S = 1e8
"""Of a link whose cost is not known yet: Ethernet of 1 Gbit/s."""


@dataclass(slots=True, kw_only=True)
class PeerPools:
    """This worker has this `layout`, slabs of `slab_bytes`, and `ranks` that share the heads. It
    allows the codecs of `offer`."""

    layout: KvLayout
    slab_bytes: int
    offer: CodecOffer = NO_CODEC
    ranks: int = 1
    _facts: dict[Incarnation, KvFacts] = field(default_factory=dict)
    _costs: dict[Incarnation, LinkCost] = field(default_factory=dict)
    _choices: dict[Incarnation, CodecChoice] = field(default_factory=dict)
    """Kept while the facts and the cost stay the same."""

    def met(self, peer: Incarnation, facts: KvFacts) -> None:
        self._facts[peer] = facts
        self._choices.pop(peer, None)

    def measured(self, peer: Incarnation, cost: LinkCost) -> None:
        self._costs[peer] = cost
        self._choices.pop(peer, None)

    def forget_cost(self, peer: Incarnation) -> None:
        """A direct read has failed: pieces go through slabs until the link is measured again."""
        self._costs.pop(peer, None)
        self._choices.pop(peer, None)

    def lost(self, peer: Incarnation) -> None:
        self._facts.pop(peer, None)
        self.forget_cost(peer)

    def choice(self, peer: Incarnation) -> CodecChoice:
        """The codec of the peer's slabs, by its hello and the cost of the link."""
        chosen = self._choices.get(peer)
        if chosen is None:
            chosen = self._choices[peer] = self._choose(peer)
        return chosen

    def _choose(self, peer: Incarnation) -> CodecChoice:
        facts = self._facts.get(peer)
        if facts is None:
            return CodecChoice()
        return choose_codec(facts.offer, self.offer, self._wire_layout(peer), self._costs.get(peer))

    def predicted_s(self, copy: PeerCopy) -> float:
        """How long it takes by the cost of the link, or over a slow one."""
        cost, nbytes = self._costs.get(copy.peer), copy.write.nbytes
        if cost is None:
            return nbytes / UNMEASURED_BYTES_PER_S
        if isinstance(copy, WriteSlab):
            shape = TransferShape(nbytes=nbytes, descriptors=0, source_runs=0, target_runs=0)
            return cost.seconds(TransferWay.COLLATED, shape)
        target = Side(tables=copy.tables, block_size=self.layout.block_size)
        shape = transfer_shape(copy.write, copy.source, target, (copy.kv.ranks, self.ranks))
        return cost.seconds(TransferWay.DIRECT, shape)

    def canary_distance(self, peer: Incarnation) -> float:
        """How far apart the digests of the peer's KV and of its copy here may be."""
        facts, own = self._facts.get(peer), self.layout.dtype
        return allowed_distance(facts.dtype if facts else own, own, codecs=bool(self.offer.codecs))

    def writes_of(
        self, peer: Incarnation, ahead: PiecesAhead, wanted: range, next_position: int
    ) -> tuple[SlabWrite, ...]:
        """Which bytes these pieces are. `wanted` are the tokens that are not held here. Raises
        PeerError for a piece that is not in this worker's cut of them."""
        layout, size = self._wire_layout(peer), self.slab_bytes
        return check_cut(layout, ahead.piece, ahead.count, size, wanted, next_position)

    def _wire_layout(self, peer: Incarnation) -> KvLayout:
        """The layout that pieces are cut by, on both sides."""
        facts, own = self._facts.get(peer), self.layout.dtype
        dtype = wire_dtype(facts.dtype, own) if facts else own
        return self.layout if dtype == own else replace(self.layout, dtype=dtype)

    def ways(
        self, peer: Incarnation, ahead: PiecesAhead, writes: Sequence[SlabWrite], tables: Tables
    ) -> list[FetchPiece | SlabWrite]:
        """How each piece comes: it is read directly, if that is possible and faster; else it comes
        through a slab, in the codec of the link. Raises PeerError when the peer has not named its
        blocks."""
        target = Side(tables=tables, block_size=self.layout.block_size)
        sections = [section for write in writes for section in write.sections]
        assert holds(target, sections), f"{ahead.key} lacks blocks for {ahead.piece}"
        choice, facts = self.choice(peer), self._facts.get(peer)
        if facts is None or choice.cost is None or not self._is_readable(facts):
            return [_encoded(write, choice.codec) for write in writes]
        source = self._source(facts, ahead, sections)
        ranks, ways = (facts.ranks, self.ranks), list[FetchPiece | SlabWrite]()
        for number, write in enumerate(writes, ahead.number):
            shape = transfer_shape(write, source, target, ranks).times(len(writes))
            if choice.cost.choose(shape) is TransferWay.COLLATED:
                ways.append(_encoded(write, choice.codec))
                continue
            fetch = FetchPiece(
                peer=peer,
                key=ahead.key,
                piece=number,
                write=write,
                kv=facts,
                source=source,
                tables=tables,
            )
            ways.append(fetch)
        return ways

    def _is_readable(self, facts: KvFacts) -> bool:
        """A direct read converts nothing."""
        return bool(facts.region) and facts.dtype == self.layout.dtype

    def _source(self, facts: KvFacts, ahead: PiecesAhead, sections: Iterable[SlabSection]) -> Side:
        return source_side(
            sections,
            ahead.held,
            groups=len(self.layout.groups),
            block_size=facts.block_size,
            blocks=facts.blocks,
        )


def _encoded(write: SlabWrite, codec: Codec) -> SlabWrite:
    """Without the codec, where that takes fewer bytes."""
    encoded = write.encoded(codec)
    return encoded if encoded.nbytes < write.nbytes else write
