"""One request's handoff at the prefill worker: it sends pieces of KV, then the commit. Pure.

Each span of tokens is cut into pieces, as large as the peer's slabs allow. A piece goes through

    planned -> announced (PiecesAhead) -> computed and lent  -> writing ------> done
                                     `-> computed and awaited -> being read --'

The decode worker chooses whether a piece is lent a slab or awaited, before or after it is computed.
Spans wait for the peer's hello. With `pool` there are no pieces.

The prefill worker holds the blocks until the decode worker says Committed, and while a write of
them is in flight: `settled` says when they may be freed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from kvpool.core.layout.layout import KvLayout, Tables
from kvpool.core.transfer.codec_choice import wire_dtype
from kvpool.core.transfer.commands import SendPeer, WriteSlab
from kvpool.core.transfer.messages import (
    Commit,
    HandoffMode,
    KvDigest,
    PeerMessage,
    PieceComputed,
    PiecesAhead,
    PrefixStored,
    RenewLeases,
    SlabLent,
    TransferCancelled,
    prompt_from,
)
from kvpool.core.transfer.piece import Piece, cut_span, piece_blocks, span_tokens_most
from kvpool.core.transfer.pool_map import KvFacts
from kvpool.core.transfer.write import SlabWrite, TokenSpan
from kvrelay.messages import Prefill
from kvrelay.types import Incarnation, RequestKey, value

SendCommands = list[SendPeer | WriteSlab]


@value
class _Announced:
    """It has tokens up to `end`, in layers up to `last_layer`."""

    piece: Piece
    write: SlabWrite
    end: int
    last_layer: int


@dataclass(slots=True, kw_only=True)
class Sender:
    """`peer` is None until the target has said hello. `cancelled` is the reason. Some of its KV has
    `moved` since leases were last renewed."""

    message: Prefill
    layout: KvLayout
    mode: HandoffMode
    peer: KvFacts | None
    cancelled: str | None = None
    moved: bool = False
    _planned: list[TokenSpan] = field(default_factory=list)
    _pieces: list[_Announced] = field(default_factory=list)
    _lent: dict[int, SlabLent] = field(default_factory=dict)
    _awaited: set[int] = field(default_factory=set)
    _writing: set[int] = field(default_factory=set)
    _readable: set[int] = field(default_factory=set)
    _done: set[int] = field(default_factory=set)
    _computed: int = 0
    _written: dict[int, int] = field(default_factory=dict)
    """# end of the tokens that a step on the device computes |-> the last layer it has written"""

    @property
    def has_target(self) -> bool:
        """There is a decode worker to hand over to."""
        return self.message.target is not None

    @property
    def settled(self) -> bool:
        """No write is in flight."""
        return not self._writing

    @property
    def all_sent(self) -> bool:
        return not self._planned and len(self._done) == len(self._pieces)

    # --- what is to be sent ---------------------------------------------------------------------

    def plan(self, start: int, end: int, tables: Tables) -> list[SendPeer]:
        """Announces tokens `[start, end)`, which are about to be computed, or are here already. The
        blocks that `tables` has for them must stay theirs until the end. Tokens that the decode
        worker holds are not sent."""
        start = max(start, self.message.held_tokens)
        if start >= end or self.mode is HandoffMode.POOL or not self.has_target:
            return []
        most = span_tokens_most(self.layout)
        for at in range(start, end, most):
            self._planned.append(self._span(at, min(at + most, end)))
        return self._announce(tables)

    def met(self, peer: KvFacts, tables: Tables) -> list[SendPeer]:
        """The target has said hello. `tables` cover all planned spans."""
        self.peer = peer
        return self._announce(tables)

    def _span(self, start: int, end: int) -> TokenSpan:
        return TokenSpan(start=start, tokens=end - start, next_position=self.next_position)

    @property
    def next_position(self) -> int:
        """KV that the query at this position sees is handed over."""
        return self.message.spec.context_tokens

    def _announce(self, tables: Tables) -> list[SendPeer]:
        if self.peer is None:
            return []
        spans, self._planned = self._planned, []
        if not spans:
            return []
        own = self.layout.dtype
        dtype = wire_dtype(own, self.peer.dtype)
        wire = self.layout if dtype == own else replace(self.layout, dtype=dtype)
        cuts = ((span, cut_span(wire, span, self.peer.slab_bytes)) for span in spans)
        return [self._ahead(span, writes, tables) for span, writes in cuts if writes]

    def _ahead(self, span: TokenSpan, writes: tuple[SlabWrite, ...], tables: Tables) -> SendPeer:
        sections = [section for write in writes for section in write.sections]
        ahead = PiecesAhead(
            key=self.message.spec.key,
            number=len(self._pieces),
            piece=Piece(span=span, index=0),
            held=piece_blocks(sections, tables, self.layout.block_size),
            count=len(writes),
        )
        end = span.start + span.tokens
        for (_, piece), write in zip(ahead.numbered(), writes, strict=True):
            announced = _Announced(piece=piece, write=write, end=end, last_layer=write.last_layer)
            self._pieces.append(announced)
        return self._to_peer(ahead)

    # --- what is there --------------------------------------------------------------------------

    def computed(self, end: int, tables: Tables) -> SendCommands:
        """The KV of tokens `[0, end)` is in the blocks of `tables`."""
        self._computed = end
        self._written.pop(end, None)
        self.moved = True
        return self._moves(tables)

    def layer_marks(self, start: int, end: int) -> set[int]:
        """Layers after which pieces of the step that computes `[start, end)` can leave early."""
        final = max(layer for group in self.layout.groups for layer in group.layers)
        return {p.last_layer for p in self._pieces if start < p.end <= end} - {final}

    def layers_written(self, end: int, layer: int, tables: Tables) -> SendCommands:
        """A step on the device, up to token `end`, has written all layers up to this one."""
        self._written[end] = layer
        return self._moves(tables)

    # --- what the decode worker says ------------------------------------------------------------

    def lent(self, lent: SlabLent, tables: Tables) -> SendCommands:
        """A slab for an unknown piece, or for one that has a way already, is left to its lease."""
        if self._is_waiting(lent.piece):
            self._lent[lent.piece] = lent
        return self._moves(tables)

    def awaited(self, numbers: Iterable[int], tables: Tables) -> SendCommands:
        """The decode worker will read them itself."""
        self._awaited.update(number for number in numbers if self._is_waiting(number))
        return self._moves(tables)

    def read(self, numbers: Iterable[int]) -> None:
        """The decode worker has read them, while their blocks were still held here."""
        read = self._readable.intersection(numbers)
        self._readable -= read
        self._done |= read
        self.moved = True

    def _is_waiting(self, number: int) -> bool:
        chosen = number in self._lent or number in self._awaited
        begun = number in self._writing or number in self._readable or number in self._done
        return number < len(self._pieces) and not chosen and not begun

    def _moves(self, tables: Tables) -> SendCommands:
        writes = [n for n in self._lent if self._is_computed(n)]
        reads = [n for n in self._awaited if self._is_computed(n)]
        return [*(self._write(n, tables) for n in writes), *map(self._offer, sorted(reads))]

    def _is_computed(self, number: int) -> bool:
        piece = self._pieces[number]
        return piece.end <= self._computed or any(
            piece.end <= end and piece.last_layer <= layer for end, layer in self._written.items()
        )

    def _write(self, number: int, tables: Tables) -> WriteSlab:
        self._writing.add(number)
        lent = self._lent.pop(number)
        return WriteSlab(
            peer=self._target,
            lent=lent,
            piece=self._pieces[number].piece,
            write=self._pieces[number].write.encoded(lent.codec),
            tables=tables,
        )

    def _offer(self, number: int) -> SendPeer:
        self._awaited.discard(number)
        self._readable.add(number)
        return self._to_peer(PieceComputed(key=self.message.spec.key, piece=number))

    def written(self, number: int) -> None:
        self._writing.discard(number)
        self._done.add(number)
        self.moved = True

    def stored(self, tokens: int) -> list[SendPeer]:
        """With `pool`: the decode worker can fetch these by now."""
        if not self.has_target:
            return []
        return [self._to_peer(PrefixStored(key=self.message.spec.key, tokens=tokens))]

    # --- endings --------------------------------------------------------------------------------

    @property
    def handed_over(self) -> TokenSpan | None:
        """The tokens that the decode worker did not hold; None: nothing is sent."""
        if not self._pieces:
            return None
        return prompt_from(self.message.held_tokens, self.next_position)

    def commit(
        self,
        first: tuple[int, ...],
        finished: tuple[int, ...],
        digest: KvDigest | None = None,
    ) -> SendPeer:
        """All pieces are sent and the first token drawn of each choice is known."""
        assert self.all_sent and self.settled
        spec = self.message.spec
        return self._to_peer(
            Commit(
                key=spec.key,
                pieces=len(self._pieces),
                first_token_ids=first,
                finished_choices=finished,
                resumed=self._resumed(),
                digest=digest,
            )
        )

    def _resumed(self) -> tuple[tuple[int, ...], ...]:
        spec = self.message.spec
        emitted = ((spec.resumed_by(choice), n) for choice, n in enumerate(self.message.since))
        return tuple(ids[len(ids) - n :] for ids, n in emitted)

    def fence(self, reason: str) -> list[SendPeer]:
        """No write is in flight, and none will follow."""
        assert self.settled
        if not self.has_target:
            return []
        return [self._to_peer(TransferCancelled(key=self.message.spec.key, reason=reason))]

    def take_moved(self) -> bool:
        moved, self.moved = self.moved, False
        return moved

    def renew(self, keys: tuple[RequestKey, ...], waiting: tuple[RequestKey, ...] = ()) -> SendPeer:
        """Of requests that have the same target."""
        return self._to_peer(RenewLeases(keys=keys, waiting=waiting))

    @property
    def _target(self) -> Incarnation:
        assert self.message.target is not None, "there is nobody to hand over to"
        return self.message.target

    def _to_peer(self, message: PeerMessage) -> SendPeer:
        return SendPeer(peer=self._target, addresses=self.message.target_addresses, message=message)
