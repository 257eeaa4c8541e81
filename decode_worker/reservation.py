"""A request whose KV is on its way to this decode worker, and what becomes of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpool.block_names import HashChain
from kvpool.handoff import Commit, Committed, SendPeer
from kvpool.tables import Holder
from kvrelay.messages import Reserve
from kvrelay.types import RequestKey


@dataclass(slots=True, kw_only=True)
class Reservation:
    """`stopped` are choices that nobody wants more of; the first `held_tokens` are cached here."""

    message: Reserve
    holder: Holder
    names: HashChain
    held_tokens: int = 0
    scattering: int = 0
    scattered: int = 0
    commit: Commit | None = None
    stopped: set[int] = field(default_factory=set)
    cancelled: bool = False

    @property
    def key(self) -> RequestKey:
        return self.message.spec.key

    def arrived(self) -> Arrived | None:
        """Once all pieces are scattered and committed."""
        commit = self.commit
        if self.cancelled or commit is None or self.scattering or self.scattered != commit.pieces:
            return None
        return Arrived(
            message=self.message,
            names=self.names,
            first_token_ids=commit.first_token_ids,
            finished=frozenset(commit.finished_choices) | self.stopped,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """A request whose KV is here. `finished` choices need no decoding."""

    message: Reserve
    names: HashChain
    first_token_ids: tuple[int, ...]
    finished: frozenset[int]

    @property
    def answer(self) -> SendPeer:
        return SendPeer(peer=self.message.source, message=Committed(key=self.message.spec.key))


@dataclass(frozen=True, slots=True)
class Failure:
    key: RequestKey
    reason: str
    message: str
