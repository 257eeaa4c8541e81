"""One request's handoff as the prefill worker sees it: pieces of KV out, then the commit. Pure.

A piece is a run of tokens that fits one slab. It goes through

    planned (SlabWanted sent) -> computed and lent, in either order -> writing -> sent

The blocks stay the prefill worker's until the decode worker says Committed, and while a write of
them is in flight: `settled` says when they may be freed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpool.handoff import (
    Commit,
    RenewLeases,
    SendPeer,
    SlabLent,
    SlabWanted,
    TransferCancelled,
    WriteSlab,
)
from kvpool.layout import Tables
from kvrelay.messages import Prefill


@dataclass(frozen=True, slots=True)
class Piece:
    start: int
    tokens: int

    @property
    def end(self) -> int:
        return self.start + self.tokens


@dataclass(slots=True, kw_only=True)
class Sender:
    """`slab_tokens` is what one slab holds, `token_bytes` the KV of one token."""

    message: Prefill
    slab_tokens: int
    token_bytes: int
    cancelled: str | None = None
    _pieces: list[Piece] = field(default_factory=list)
    _lent: dict[int, SlabLent] = field(default_factory=dict)
    _writing: set[int] = field(default_factory=set)
    _sent: set[int] = field(default_factory=set)
    _computed: int = 0

    @property
    def settled(self) -> bool:
        """No write is in flight."""
        return not self._writing

    @property
    def all_sent(self) -> bool:
        return len(self._sent) == len(self._pieces)

    def plan(self, start: int, end: int) -> list[SendPeer]:
        """Tokens `[start, end)` are about to be computed: ask for their slabs already. Those that
        the decode worker holds are not sent."""
        wanted = []
        for at in range(max(start, self.message.held_tokens), end, self.slab_tokens):
            piece = Piece(at, min(self.slab_tokens, end - at))
            size = piece.tokens * self.token_bytes
            key = self.message.spec.key
            wanted.append(SlabWanted(key=key, piece=len(self._pieces), bytes=size))
            self._pieces.append(piece)
        return [self._to_peer(message) for message in wanted]

    def lent(self, lent: SlabLent, tables: Tables) -> list[WriteSlab]:
        """A slab for a piece that never was, or has one already, is left to its lease."""
        is_wanted = lent.piece < len(self._pieces) and lent.piece not in self._writing | self._sent
        if is_wanted:
            self._lent[lent.piece] = lent
        return self._writes(tables)

    def computed(self, end: int, tables: Tables) -> list[WriteSlab]:
        """The KV of tokens `[0, end)` is in the blocks of `tables`."""
        self._computed = end
        return self._writes(tables)

    def _writes(self, tables: Tables) -> list[WriteSlab]:
        ready = [n for n in self._lent if self._pieces[n].end <= self._computed]
        writes = []
        for number in ready:
            piece = self._pieces[number]
            self._writing.add(number)
            writes.append(
                WriteSlab(
                    peer=self.message.target,
                    lent=self._lent.pop(number),
                    tables=tables,
                    start=piece.start,
                    tokens=piece.tokens,
                )
            )
        return writes

    def written(self, piece: int) -> None:
        self._writing.discard(piece)
        self._sent.add(piece)

    def commit(self, first: tuple[int, ...], finished: tuple[int, ...]) -> SendPeer:
        """All pieces are sent and token 0 of each choice is known."""
        assert self.all_sent and self.settled
        return self._to_peer(
            Commit(
                key=self.message.spec.key,
                pieces=len(self._pieces),
                first_token_ids=first,
                finished_choices=finished,
            )
        )

    def fence(self, reason: str) -> SendPeer:
        """No write is in flight, and none will follow."""
        assert self.settled
        return self._to_peer(TransferCancelled(key=self.message.spec.key, reason=reason))

    def renew(self) -> SendPeer:
        return self._to_peer(RenewLeases(keys=(self.message.spec.key,)))

    def _to_peer(self, message: SlabWanted | Commit | TransferCancelled | RenewLeases) -> SendPeer:
        return SendPeer(
            peer=self.message.target, address=self.message.target_address, message=message
        )
