"""One request whose KV is on its way to this decode worker. Pure.

    RESERVED ----------> AWAITING_BLOCKS
        |                      |
        `----> RECEIVING <-----'          each piece comes through a slab, or is read directly
                 |    ^
                 v    |
               CHECKING                   its commit came with a digest

RECEIVING ends GONE: it joins the batch. What is given up is GONE at once, or DRAINING first while a
copy into its blocks is in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from kvpool.core.blocks.holding import Holder
from kvpool.core.layout.block_names import HashChain
from kvpool.core.layout.layout import Tables
from kvpool.core.transfer.commands import FetchPiece, SendPeer
from kvpool.core.transfer.messages import (
    Commit,
    Committed,
    DigestBlocks,
    PiecesAhead,
    PiecesRead,
    prompt_from,
)
from kvpool.core.transfer.piece import Piece
from kvpool.core.transfer.write import SlabWrite
from kvrelay.messages import PrefixSource, Reserve
from kvrelay.types import Incarnation, RequestKey, RequestSpec


class HandoffState(StrEnum):
    RESERVED = "reserved"
    """Nothing of its KV was announced."""
    AWAITING_BLOCKS = "awaiting_blocks"
    """Its KV was announced, or committed; it stands in line for blocks."""
    RECEIVING = "receiving"
    """It has its blocks, if it needs any; pieces come."""
    CHECKING = "checking"
    """All has come; the digest of its blocks is being computed."""
    DRAINING = "draining"
    """It was given up, but something in flight still touches its blocks."""
    GONE = "gone"
    """It holds nothing here."""


TRANSITIONS: dict[HandoffState, tuple[HandoffState, ...]] = {
    HandoffState.RESERVED: (
        HandoffState.AWAITING_BLOCKS,
        HandoffState.RECEIVING,
        HandoffState.GONE,
    ),
    HandoffState.AWAITING_BLOCKS: (HandoffState.RECEIVING, HandoffState.GONE),
    HandoffState.RECEIVING: (HandoffState.CHECKING, HandoffState.DRAINING, HandoffState.GONE),
    HandoffState.CHECKING: (HandoffState.RECEIVING, HandoffState.DRAINING, HandoffState.GONE),
    HandoffState.DRAINING: (HandoffState.GONE,),
    HandoffState.GONE: (),
}


@dataclass(slots=True, kw_only=True, eq=False)
class IncomingHandoff:
    """`source` None: the first prefill worker that announces or commits its KV becomes its source.
    The first `held_tokens` tokens are cached here. `stopped` choices need no more tokens.

    `in_flight` counts the scatters, reads and digests that touch its blocks now, and what is being
    fetched ahead for it: with `pool` the pool has the first `stored_tokens` tokens, and
    `sought_tokens` of them were asked for. The prefill worker is told of the pieces in `read` when
    none of the announced ones is `unread`. `prompt_tokens` are with those emitted by earlier
    attempts.
    """

    message: Reserve
    holder: Holder
    names: HashChain
    source: Incarnation | None
    state: HandoffState = HandoffState.RESERVED
    held_tokens: int = 0
    commit: Commit | None = None
    stopped: set[int] = field(default_factory=set)
    landed: int = 0
    in_flight: int = 0
    stored_tokens: int = 0
    sought_tokens: int = 0
    announced: set[int] = field(default_factory=set)
    _undecided: list[tuple[PiecesAhead, Sequence[SlabWrite]]] = field(default_factory=list)
    _by_slab: dict[int, tuple[Piece, SlabWrite]] = field(default_factory=dict)
    _by_read: dict[int, FetchPiece] = field(default_factory=dict)
    unread: int = 0
    read: list[int] = field(default_factory=list)
    key: RequestKey = field(init=False)
    choices: int = field(init=False)
    prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        spec = self.message.spec
        self.key, self.choices = spec.key, spec.sampling.n
        self.prompt_tokens = spec.context_tokens

    @property
    def sender(self) -> Incarnation:
        assert self.source is not None, f"no prefill worker has announced {self.key}"
        return self.source

    def is_from(self, peer: Incarnation) -> bool:
        """Whether its KV comes from there."""
        if self.source is None:
            self.source = peer
        return self.source == peer

    def enter(self, state: HandoffState) -> None:
        assert state in TRANSITIONS[self.state], f"{self.key}: {self.state} -> {state}"
        self.state = state

    @property
    def waits_here(self) -> bool:
        """It is this worker's turn. A copy that hangs ends by its own limit."""
        return self.in_flight > 0 or self.state is HandoffState.AWAITING_BLOCKS

    # --- pieces ---------------------------------------------------------------------------------

    def announce(self, ahead: PiecesAhead, writes: Sequence[SlabWrite]) -> None:
        """These pieces will come, once it has blocks."""
        self.announced.update(range(ahead.number, ahead.number + ahead.count))
        self._undecided.append((ahead, writes))

    def take_undecided(self) -> list[tuple[PiecesAhead, Sequence[SlabWrite]]]:
        """The announcements whose pieces have no way yet."""
        taken, self._undecided = self._undecided, []
        return taken

    def set_ways(
        self, ahead: PiecesAhead, ways: Sequence[FetchPiece | SlabWrite]
    ) -> tuple[list[tuple[int, SlabWrite]], list[int]]:
        """The pieces that need a slab, and the numbers of those that are read directly."""
        by_slab, by_read = [], []
        for (number, piece), way in zip(ahead.numbered(), ways, strict=True):
            if isinstance(way, SlabWrite):
                self._by_slab[number] = piece, way
                by_slab.append((number, way))
            else:
                self._by_read[number] = way
                by_read.append(number)
        self.unread += len(by_read)
        return by_slab, by_read

    def begin_scatter(self, number: int) -> tuple[Piece, SlabWrite]:
        self.in_flight += 1
        return self._by_slab.pop(number)

    def try_begin_read(self, number: int) -> FetchPiece | None:
        """None for a piece that was not awaited."""
        fetch = self._by_read.pop(number, None)
        if fetch is not None:
            self.in_flight += 1
        return fetch

    def end_read(self, number: int) -> list[SendPeer]:
        """The prefill worker is told, because only it knows whether the blocks were still the
        request's."""
        self.unread -= 1
        self.read.append(number)
        if self.unread:
            return []
        pieces, self.read = tuple(self.read), []
        return [SendPeer(peer=self.sender, message=PiecesRead(key=self.key, pieces=pieces))]

    # --- the end --------------------------------------------------------------------------------

    @property
    def is_complete(self) -> bool:
        """All pieces have landed and are committed."""
        commit = self.commit
        if commit is None or self.in_flight or self.state is not HandoffState.RECEIVING:
            return False
        return self.landed == commit.pieces

    def begin_check(self, start: int, tables: Tables) -> DigestBlocks:
        self.enter(HandoffState.CHECKING)
        self.in_flight += 1
        span = prompt_from(start, self.prompt_tokens)
        return DigestBlocks(holder=self.holder, span=span, tables=tables)

    def pass_check(self) -> None:
        assert self.commit is not None, self.key
        self.commit = replace(self.commit, digest=None)
        self.enter(HandoffState.RECEIVING)

    def arrive(self) -> Arrived:
        assert self.commit is not None, self.key
        self.enter(HandoffState.GONE)
        return Arrived(
            spec=self.message.spec,
            names=self.names,
            source=self.sender,
            hint=self.message.prefix_source,
            begun=self._begun(self.commit),
            finished=frozenset(self.commit.finished_choices) | self.stopped,
        )

    def _begun(self, commit: Commit) -> tuple[tuple[int, ...], ...]:
        spec = self.message.spec
        resumed = commit.resumed or ((),) * len(commit.first_token_ids)
        drawn = zip(commit.first_token_ids, resumed, strict=True)
        return tuple(
            (*spec.resumed_by(choice), *since) or (token,)
            for choice, (token, since) in enumerate(drawn)
        )

    def validate(self, *, holds_blocks: bool, needs_blocks: bool) -> None:
        """`needs_blocks`: it can't receive without."""
        state, has_announced = self.state, bool(self._by_slab or self._by_read or self.landed)
        assert state is not HandoffState.GONE, f"{self.key} is gone"
        assert self.in_flight > 0 or state not in _BUSY, f"{self.key}: nothing is in flight"
        if state in (HandoffState.RESERVED, HandoffState.AWAITING_BLOCKS):
            assert not has_announced, f"{self.key} receives without blocks"
            assert not self.in_flight, f"{self.key}: in flight before it began"
        if state is HandoffState.AWAITING_BLOCKS:
            assert not holds_blocks, f"{self.key} has blocks, and awaits them"
        elif state is not HandoffState.RESERVED:
            assert holds_blocks or not needs_blocks, f"{self.key} is {state} without blocks"


_BUSY = (HandoffState.CHECKING, HandoffState.DRAINING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """A request whose KV is here, or can be fetched from a pool; `hint` is who else may have it.
    Each choice has `begun` with its first token, or goes on after all that it has emitted since the
    choices parted; the `finished` ones need no decoding."""

    spec: RequestSpec
    names: HashChain
    source: Incarnation
    hint: PrefixSource | None
    begun: tuple[tuple[int, ...], ...]
    finished: frozenset[int]

    @property
    def answer(self) -> SendPeer:
        return SendPeer(peer=self.source, message=Committed(key=self.spec.key))
