"""A request whose KV is on its way to this decode worker, and what becomes of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field, replace

from kvpool.block_names import HashChain
from kvpool.handoff import Commit, Committed, PiecesAhead
from kvpool.handoff_events import FetchPiece, SendPeer
from kvpool.holder import Holder
from kvpool.piece import Piece
from kvpool.write import Write
from kvrelay.messages import Reserve
from kvrelay.types import Incarnation, RequestKey


@dataclass(slots=True, kw_only=True)
class Reservation:
    """`source` None: nobody has come with its KV yet, and anyone may. `stopped` are choices that
    nobody wants more of; the first `held_tokens` are cached here.

    A piece is announced, waits for blocks (`pull`), and comes in one of two ways; `moving` counts
    the scatters and reads that touch the blocks just now. Of those that come directly so many are
    still `unread`, and those that are `read` the prefill worker is told once none is.
    """

    message: Reserve
    source: Incarnation | None
    holder: Holder
    names: HashChain
    held_tokens: int = 0
    announced: set[int] = field(default_factory=set)
    awaiting_blocks: list[tuple[PiecesAhead, Ordered[Write]]] = field(default_factory=list)
    collated: dict[int, tuple[Piece, Write]] = field(default_factory=dict)
    direct: dict[int, FetchPiece] = field(default_factory=dict)
    unread: int = 0
    read: list[int] = field(default_factory=list)
    moving: int = 0
    landed: int = 0
    commit: Commit | None = None
    stopped: set[int] = field(default_factory=set)
    cancelled: bool = False

    @property
    def key(self) -> RequestKey:
        return self.message.spec.key

    @property
    def sender(self) -> Incarnation:
        """Of one whose KV is on its way."""
        assert self.source is not None, f"nobody has come for {self.key}"
        return self.source

    @property
    def prompt_tokens(self) -> int:
        """With those emitted by earlier attempts."""
        return self.message.spec.context_tokens

    def is_from(self, peer: Incarnation) -> bool:
        """Whether its KV comes from there: from the first that says so, if it may be anyone."""
        self.source = self.source or peer
        return self.source == peer

    @property
    def complete(self) -> Commit | None:
        """Once all pieces have landed and are committed."""
        commit = self.commit
        if self.cancelled or commit is None or self.moving or self.landed != commit.pieces:
            return None
        return commit

    def arrived(self) -> Arrived | None:
        """Once it is complete and needs no check (any more)."""
        commit = self.complete
        if commit is None or commit.digest is not None:
            return None
        return Arrived(
            message=self.message,
            source=self.sender,
            holder=self.holder,
            names=self.names,
            held_tokens=self.held_tokens,
            first_token_ids=commit.first_token_ids,
            resumed_ids=commit.resumed_ids,
            finished=frozenset(commit.finished_choices) | self.stopped,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """A request whose KV is here. `finished` choices need no decoding. A moved request may have
    several tokens instead of its first one: `resumed_ids`."""

    message: Reserve
    source: Incarnation
    holder: Holder
    names: HashChain
    held_tokens: int
    first_token_ids: tuple[int, ...]
    resumed_ids: tuple[int, ...]
    finished: frozenset[int]

    @property
    def key(self) -> RequestKey:
        return self.message.spec.key

    @property
    def prompt_tokens(self) -> int:
        """With those emitted by earlier attempts."""
        return self.message.spec.context_tokens

    def without(self, choice: int) -> Arrived:
        return replace(self, finished=self.finished | {choice})

    @property
    def answer(self) -> SendPeer:
        return SendPeer(peer=self.source, message=Committed(key=self.key))


@dataclass(frozen=True, slots=True)
class Failure:
    key: RequestKey
    reason: str
    message: str
