"""A request whose KV is on its way to this decode worker, and what becomes of it. Pure.

Blocks for the prompts that are handed over to this decode worker. Pure.

`push`: leased with the reservation. `pull`: leased when the prompt's first piece is announced, in
order, so one that is large is not passed by. `pool`: none, they are taken like those of a preempted
request.

The requests whose KV is expected at this decode worker, and the leases of their blocks. Pure.

A reservation ends by arriving, or cancelled; then its blocks are freed once no scatter or read into
them is in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field, replace

from kvpool.core.blocks.holding import Holder
from kvpool.core.blocks.leases import LeaseTable
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.layout.block_names import HashChain
from kvpool.core.layout.hashes import BlockHash
from kvpool.core.transfer.commands import FetchPiece, SendPeer
from kvpool.core.transfer.messages import Commit, Committed, HandoffMode, PiecesAhead
from kvpool.core.transfer.piece import Piece
from kvpool.core.transfer.write import SlabWrite
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
    awaiting_blocks: list[tuple[PiecesAhead, Ordered[SlabWrite]]] = field(default_factory=list)
    collated: dict[int, tuple[Piece, SlabWrite]] = field(default_factory=dict)
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


@dataclass(slots=True, kw_only=True)
class Room:
    tables: BlockTables
    mode: HandoffMode
    awaiting_blocks: deque[Reservation] = field(default_factory=deque)

    def try_reserve(self, reservation: Reservation, now_s: float) -> bool:
        """False and nothing changed when blocks have run out, or could never suffice."""
        if self.mode is not HandoffMode.PUSH:
            return reservation.prompt_tokens < self.tables.total_tokens
        hashes = reservation.names.full(reservation.prompt_tokens)
        return self._try_take(reservation, hashes, now_s)

    def want(self, reservation: Reservation) -> bool:
        """Whether it holds its blocks; if not, it waits for them from now on."""
        if reservation.holder in self.tables:
            return True
        if not any(reservation is waiting for waiting in self.awaiting_blocks):
            self.awaiting_blocks.append(reservation)
        return False

    def lacks(self, reservation: Reservation) -> bool:
        """Whether it can't go on without blocks."""
        return self.mode is not HandoffMode.POOL and reservation.holder not in self.tables

    def take(self, now_s: float) -> Iterator[Reservation]:
        """Those that get their blocks now. All their KV is on its way already, so nothing that is
        cached here is taken for it."""
        while self.awaiting_blocks and self._try_take(self.awaiting_blocks[0], (), now_s):
            yield self.awaiting_blocks.popleft()

    def _try_take(
        self, reservation: Reservation, hashes: Sequence[BlockHash], now_s: float
    ) -> bool:
        """Leases blocks for the prompt and token 0."""
        held_tokens = self.tables.try_open(
            reservation.holder,
            reservation.prompt_tokens + 1,
            hashes=hashes,
            seen_from=reservation.prompt_tokens,
            now_s=now_s,
            leased=True,
        )
        if held_tokens is None:
            return False
        reservation.held_tokens = held_tokens
        return True

    def forget(self, reservation: Reservation) -> None:
        """It waits no more."""
        kept = (waiting for waiting in self.awaiting_blocks if waiting is not reservation)
        self.awaiting_blocks = deque(kept)


@dataclass(slots=True, kw_only=True)
class ReservationTable:
    """`freed` hears who ended without a commit, and holds nothing any more. `choices` are of all
    but those that are cancelled."""

    tables: BlockTables
    leases: LeaseTable[RequestKey]
    room: Room
    freed: Callable[[RequestKey], None]
    choices: int = 0
    _by_key: dict[RequestKey, Reservation] = field(default_factory=dict)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._by_key

    def __iter__(self) -> Iterator[Reservation]:
        """Ending some on the way is fine."""
        return iter(tuple(self._by_key.values()))

    def __getitem__(self, key: RequestKey) -> Reservation:
        return self._by_key[key]

    def get(self, key: RequestKey) -> Reservation | None:
        return self._by_key.get(key)

    def live(self, key: RequestKey) -> Reservation | None:
        """None also for one that is cancelled, and waits for its last scatter or read."""
        reservation = self._by_key.get(key)
        return None if reservation is None or reservation.cancelled else reservation

    def of_peer(self, key: RequestKey, peer: Incarnation) -> Reservation | None:
        reservation = self.live(key)
        return reservation if reservation is not None and reservation.is_from(peer) else None

    def try_add(self, message: Reserve, now_s: float) -> Reservation | None:
        """None and nothing changed when there are no blocks for the prompt."""
        spec = message.spec
        names = self.tables.names_of(spec)
        holder = Holder("decode", spec.key)
        reservation = Reservation(
            message=message, source=message.source, holder=holder, names=names
        )
        if not self.room.try_reserve(reservation, now_s):
            return None
        self._by_key[spec.key] = reservation
        self.choices += spec.sampling.n
        self.leases.grant(spec.key, now_s)
        return reservation

    def expire(self, now_s: float) -> tuple[RequestKey, ...]:
        """Whom nobody renewed. One that nobody has come for yet is its router's, which gives it up
        when it goes."""
        for reservation in self:
            if reservation.source is None and not reservation.cancelled:
                self.leases.renew(reservation.key, now_s)
        return self.leases.expire(now_s)

    def take_complete(self, key: RequestKey) -> Arrived | None:
        """Once all pieces have landed and are committed: the blocks, if it has any, are the running
        request's."""
        reservation = self._by_key.get(key)
        arrived = reservation.arrived() if reservation else None
        if reservation is None or arrived is None or self.room.lacks(reservation):
            return None
        del self._by_key[key]
        self.choices -= reservation.message.spec.sampling.n
        self.leases.end(key)
        if reservation.holder in self.tables:
            self.tables.activate(reservation.holder)
        return arrived

    def end(self, reservation: Reservation) -> None:
        reservation.cancelled = True
        self.choices -= reservation.message.spec.sampling.n
        self.leases.end(reservation.key)
        self.room.forget(reservation)
        self.free_if_quiet(reservation)

    def free_if_quiet(self, reservation: Reservation) -> None:
        if reservation.moving == 0:
            del self._by_key[reservation.key]
            self.tables.release(reservation.holder)
            self.freed(reservation.key)

    def validate(self) -> None:
        live = {key for key, r in self._by_key.items() if not r.cancelled}
        assert self.choices == sum(self._by_key[key].message.spec.sampling.n for key in live)
        assert all(key in self.leases for key in live), "a reservation without a lease"
        assert len(self.leases) == len(live), "a lease without a reservation"
        assert {r.key for r in self.room.awaiting_blocks} <= live, "blocks for what is over"
