"""The decode worker's side of handoffs: reservations, pieces on their way in, commits. Pure.

A reservation leases blocks to the prefill worker until the commit.

Staging slabs that this decode worker lends to writers, in order of asking. Pure.

A lent slab is the writer's until it is filled, or fenced, or its lease ends and it is retired.

Pieces of KV on their way into a decode worker's reserved blocks. Pure.

Each comes through a lent slab or is read where it lies, as the link's cost says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import NamedTuple

from decode_worker.incoming import Arrived, Failure, Reservation, ReservationTable, Room
from decode_worker.peers import PeerPools
from engine.core.step import Command
from kvpool.core.blocks.leases import LeaseTable
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.transfer.codec_choice import NO_CODEC, CodecOffer
from kvpool.core.transfer.commands import (
    PieceFetched,
    ReplaceSlab,
    ScatterSlab,
    SendPeer,
    SlabReplaced,
    SlabScattered,
)
from kvpool.core.transfer.messages import (
    BlocksDigested,
    CancelTransfer,
    Commit,
    Committed,
    DigestBlocks,
    HandoffMode,
    PieceComputed,
    PiecesAhead,
    PiecesAwaited,
    PiecesRead,
    SlabFilled,
    SlabLent,
    mismatch,
    prompt_from,
)
from kvpool.core.transfer.slabs import Expired, LeaseId, SlabId, SlabPool
from kvpool.core.transfer.write import SlabWrite
from kvrelay.errors import PeerError
from kvrelay.messages import Reserve
from kvrelay.types import Incarnation, RequestKey, RequestSpec


class _Asked(NamedTuple):
    """For a piece, by its number."""

    peer: Incarnation
    key: RequestKey
    number: int
    write: SlabWrite


@dataclass(slots=True, kw_only=True)
class Lending:
    """`regions` names each slab's registered region, as peers are told."""

    slabs: SlabPool
    regions: dict[SlabId, str]
    ttl_s: float
    _awaiting_slab: deque[_Asked] = field(default_factory=deque)
    _lent: dict[RequestKey, dict[SlabId, tuple[LeaseId, int]]] = field(default_factory=dict)
    """# key |-> slab |-> lease, number of the piece"""

    def ask(self, peer: Incarnation, key: RequestKey, number: int, write: SlabWrite) -> None:
        self._awaiting_slab.append(_Asked(peer, key, number, write))

    def forget_asked(self, key: RequestKey) -> None:
        self._awaiting_slab = deque(asked for asked in self._awaiting_slab if asked.key != key)

    def lend(self, now_s: float) -> list[SendPeer]:
        """As many of those asked for as are free."""
        sends = []
        while self._awaiting_slab:
            peer, key, number, write = self._awaiting_slab[0]
            lent = self.slabs.try_lend(peer, write.nbytes, now_s, self.ttl_s)
            if lent is None:
                break
            self._awaiting_slab.popleft()
            self._lent.setdefault(key, {})[lent.slab_id] = (lent.lease_id, number)
            answer = SlabLent(
                key=key,
                piece=number,
                slab_id=lent.slab_id,
                region=self.regions[lent.slab_id],
                lease_id=lent.lease_id,
                codec=write.wire.codec,
            )
            sends.append(SendPeer(peer=peer, message=answer))
        return sends

    def try_fill(self, filled: SlabFilled) -> int | None:
        """The piece that it was lent for. None, and nothing changed, for a late writer: its lease
        is not current."""
        lease_id, number = self._lent.get(filled.key, {}).get(filled.slab_id, (None, 0))
        if lease_id != filled.lease_id:
            return None
        if not self.slabs.mark_filled(filled.slab_id, filled.lease_id):
            return None
        self._forget(filled.key, filled.slab_id)
        return number

    def renew(self, key: RequestKey, now_s: float) -> None:
        for lease_id, _ in self._lent.get(key, {}).values():
            self.slabs.renew(lease_id, now_s, self.ttl_s)

    def begin_fence(self, key: RequestKey, now_s: float) -> None:
        for slab_id, (lease_id, _) in self._lent.get(key, {}).items():
            self.slabs.begin_fence(slab_id, lease_id, now_s, self.ttl_s)

    def fenced(self, key: RequestKey) -> None:
        """The writer says that it stopped, asked or by itself."""
        for slab_id, (lease_id, _) in self._lent.pop(key, {}).items():
            self.slabs.fence_acknowledged(slab_id, lease_id)

    def replaced(self, event: SlabReplaced) -> None:
        self.regions[event.slab_id] = event.region
        self.slabs.replaced(event.slab_id)

    def expire(self, now_s: float) -> tuple[list[ReplaceSlab], list[RequestKey]]:
        """Silent writers' slabs are retired; whose they were: a piece lost so never comes."""
        return self._retired(self.slabs.expire(now_s))

    def peer_lost(self, peer: Incarnation) -> list[ReplaceSlab]:
        """Declared dead is not gone: what it may still write to is retired, not reused."""
        return self._retired(self.slabs.holder_lost(peer))[0]

    def _retired(self, expired: tuple[Expired, ...]) -> tuple[list[ReplaceSlab], list[RequestKey]]:
        slab_ids = [one.slab_id for one in expired]
        lost = [(key, s) for key, lent in self._lent.items() for s in slab_ids if s in lent]
        for key, slab_id in lost:
            self._forget(key, slab_id)
        return [ReplaceSlab(slab_id=s) for s in slab_ids], [key for key, _ in lost]

    def _forget(self, key: RequestKey, slab_id: SlabId) -> None:
        lent = self._lent[key]
        del lent[slab_id]
        if not lent:
            del self._lent[key]

    def validate(self) -> None:
        self.slabs.validate()


def cancel_at(peer: Incarnation, key: RequestKey, reason: str) -> SendPeer:
    return SendPeer(peer=peer, message=CancelTransfer(key=key, reason=reason))


@dataclass(slots=True, kw_only=True)
class Pieces:
    """`transfers` are pieces that have landed."""

    reservations: ReservationTable
    lending: Lending
    pools: PeerPools
    transfers: int = 0
    transfer_bytes: int = 0
    transfer_s: float = 0.0

    def ahead(self, peer: Incarnation, ahead: PiecesAhead, now_s: float) -> list[Command]:
        reservation = self.reservations.of_peer(ahead.key, peer)
        if reservation is None:
            return [cancel_at(peer, ahead.key, "no such reservation")]
        if ahead.number in reservation.announced:
            return []
        span = range(reservation.held_tokens, reservation.prompt_tokens)
        try:
            writes = self.pools.writes_of(peer, ahead, span, reservation.prompt_tokens)
        except PeerError as error:
            return [cancel_at(peer, ahead.key, str(error))]
        self.reservations.leases.renew(ahead.key, now_s)
        reservation.announced.update(range(ahead.number, ahead.number + ahead.count))
        if not self.reservations.room.want(reservation):
            reservation.awaiting_blocks.append((ahead, writes))
            return []
        return self._choose(reservation, ahead, writes, now_s)

    def begin(self, reservation: Reservation, now_s: float) -> list[Command]:
        """It has got its blocks: those that waited for them."""
        return [
            command
            for ahead, writes in reservation.awaiting_blocks
            for command in self._choose(reservation, ahead, writes, now_s)
        ]

    def _choose(
        self,
        reservation: Reservation,
        ahead: PiecesAhead,
        writes: Sequence[SlabWrite],
        now_s: float,
    ) -> list[Command]:
        """Each through a slab, or directly."""
        peer = reservation.sender
        tables = self.reservations.tables.tables(reservation.holder)
        try:
            ways = self.pools.ways(peer, ahead, writes, tables)
        except PeerError as error:
            return [cancel_at(peer, ahead.key, str(error))]
        awaited: list[int] = []
        for (number, piece), way in zip(ahead.numbered(), ways, strict=True):
            if isinstance(way, SlabWrite):
                reservation.collated[number] = (piece, way)
                self.lending.ask(peer, ahead.key, number, way)
            else:
                reservation.direct[number] = way
                awaited.append(number)
        reservation.unread += len(awaited)
        lent: list[Command] = [*self.lending.lend(now_s)]
        if not awaited:
            return lent
        message = PiecesAwaited(key=ahead.key, pieces=tuple(awaited))
        return [*lent, SendPeer(peer=peer, message=message)]

    def filled(self, filled: SlabFilled, now_s: float) -> list[Command]:
        """A late writer's slab is ignored: its lease is not current."""
        number = self.lending.try_fill(filled)
        if number is None:
            return []
        reservation = self.reservations.live(filled.key)
        if reservation is None:
            self.lending.slabs.release(filled.slab_id, filled.lease_id)
            return [*self.lending.lend(now_s)]
        self.reservations.leases.renew(filled.key, now_s)
        reservation.moving += 1
        piece, write = reservation.collated.pop(number)
        tables, peer = self.reservations.tables.tables(reservation.holder), reservation.sender
        return [ScatterSlab(peer=peer, filled=filled, piece=piece, write=write, tables=tables)]

    def scattered(self, done: SlabScattered, now_s: float) -> tuple[list[Command], list[Failure]]:
        """The slab is free again."""
        self.lending.slabs.release(done.slab_id, done.lease_id)
        commands: list[Command] = [*self.lending.lend(now_s)]
        ended, failures = self._landed(done, now_s)
        return commands + ended, failures

    def computed(self, peer: Incarnation, computed: PieceComputed, now_s: float) -> list[Command]:
        """A piece that was awaited may be read."""
        reservation = self.reservations.of_peer(computed.key, peer)
        fetch = reservation.direct.pop(computed.piece, None) if reservation else None
        if reservation is None or fetch is None:
            return []
        self.reservations.leases.renew(computed.key, now_s)
        reservation.moving += 1
        return [fetch]

    def fetched(self, done: PieceFetched, now_s: float) -> tuple[list[Command], list[Failure]]:
        """The prefill worker is told: only it knows that the blocks were still the request's."""
        reservation = self.reservations[done.key]
        peer = reservation.sender
        ended, failures = self._landed(done, now_s)
        if failures:
            self.pools.forget_cost(peer)
        if reservation.cancelled:
            return ended, failures
        reservation.unread -= 1
        reservation.read.append(done.piece)
        return ([] if reservation.unread else [self._tell_read(reservation)]), []

    @staticmethod
    def _tell_read(reservation: Reservation) -> SendPeer:
        pieces, reservation.read = tuple(reservation.read), []
        message = PiecesRead(key=reservation.key, pieces=pieces)
        return SendPeer(peer=reservation.sender, message=message)

    def _landed(
        self, done: SlabScattered | PieceFetched, now_s: float
    ) -> tuple[list[Command], list[Failure]]:
        reservation = self.reservations[done.key]
        reservation.moving -= 1
        if reservation.cancelled:
            self.reservations.free_if_quiet(reservation)
            return [], []
        if done.error is not None:
            cancelled = self.cancel(done.key, done.error, now_s)
            return cancelled, [Failure(done.key, "transfer_failed", done.error)]
        reservation.landed += 1
        self.transfers += 1
        self.transfer_bytes += done.bytes
        self.transfer_s += done.seconds
        return [], []

    def cancel(self, key: RequestKey, reason: str, now_s: float) -> list[Command]:
        """The request won't come: free its blocks once quiet, have its writer fenced off."""
        reservation = self.reservations.live(key)
        if reservation is None:
            return []
        self.end(reservation)
        self.lending.begin_fence(key, now_s)
        return [] if reservation.source is None else [cancel_at(reservation.source, key, reason)]

    def end(self, reservation: Reservation) -> None:
        self.lending.forget_asked(reservation.key)
        self.reservations.end(reservation)


@dataclass(slots=True, kw_only=True)
class Reservations:
    """`regions` names each slab's registered region, as peers are told."""

    tables: BlockTables
    slabs: SlabPool
    regions: dict[SlabId, str]
    leases: LeaseTable[RequestKey]
    mode: HandoffMode = HandoffMode.PUSH
    offer: InitVar[CodecOffer] = NO_CODEC
    ranks: InitVar[int] = 1
    canaries_passed: int = 0
    canaries_mismatched: int = 0
    pools: PeerPools = field(init=False)
    pieces: Pieces = field(init=False)
    _lending: Lending = field(init=False)
    _room: Room = field(init=False)
    _reservations: ReservationTable = field(init=False)
    _freed: list[RequestKey] = field(default_factory=list)

    def __post_init__(self, offer: CodecOffer, ranks: int) -> None:
        self.pools = PeerPools(
            layout=self.tables.layout,
            slab_bytes=self.slabs.slab_bytes,
            offer=offer,
            ranks=ranks,
        )
        self._room = Room(tables=self.tables, mode=self.mode)
        self._lending = Lending(slabs=self.slabs, regions=self.regions, ttl_s=self.leases.ttl_s)
        self._reservations = ReservationTable(
            tables=self.tables,
            leases=self.leases,
            room=self._room,
            freed=lambda key: self._freed.append(key),
        )
        self.pieces = Pieces(
            reservations=self._reservations, lending=self._lending, pools=self.pools
        )

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._reservations

    @property
    def reserved_specs(self) -> tuple[RequestSpec, ...]:
        """Of those that are on their way."""
        return tuple(r.message.spec for r in self._reservations if not r.cancelled)

    @property
    def reserved_choices(self) -> int:
        return self._reservations.choices

    def try_reserve(self, message: Reserve, now_s: float) -> Reservation | None:
        """None and nothing changed when there are no blocks for the prompt."""
        return self._reservations.try_add(message, now_s)

    def take_freed(self) -> list[RequestKey]:
        """Reservations that ended without a commit, and hold nothing any more: for the router."""
        if not self._freed:
            return []
        freed, self._freed = self._freed, []
        return freed

    @property
    def awaits_blocks(self) -> bool:
        """A prompt whose KV is announced waits for room."""
        return bool(self._room.awaiting_blocks)

    def take_blocks(self, now_s: float) -> tuple[list[Command], list[RequestKey]]:
        """For those that wait, in order, as far as the blocks go; who got them."""
        commands: list[Command] = []
        keys = []
        for reservation in self._room.take(now_s):
            keys.append(reservation.key)
            commands += self.pieces.begin(reservation, now_s)
        return commands, keys

    # --- pieces ---------------------------------------------------------------------------------

    def ahead(self, peer: Incarnation, ahead: PiecesAhead, now_s: float) -> list[Command]:
        return self.pieces.ahead(peer, ahead, now_s)

    def filled(self, filled: SlabFilled, now_s: float) -> list[Command]:
        return self.pieces.filled(filled, now_s)

    def scattered(self, done: SlabScattered, now_s: float) -> tuple[list[Command], list[Failure]]:
        return self.pieces.scattered(done, now_s)

    def computed(self, peer: Incarnation, computed: PieceComputed, now_s: float) -> list[Command]:
        return self.pieces.computed(peer, computed, now_s)

    def fetched(self, done: PieceFetched, now_s: float) -> tuple[list[Command], list[Failure]]:
        return self.pieces.fetched(done, now_s)

    def replaced(self, event: SlabReplaced, now_s: float) -> list[Command]:
        self._lending.replaced(event)
        return [*self._lending.lend(now_s)]

    # --- endings --------------------------------------------------------------------------------

    def commit(self, peer: Incarnation, commit: Commit, now_s: float) -> list[Command]:
        reservation = self._reservations.get(commit.key)
        if reservation is None:  # it may be the first that is heard of it
            return [cancel_at(peer, commit.key, "no such reservation")]
        if self.leases.renew(commit.key, now_s) and reservation.is_from(peer):
            reservation.commit = commit
            if self.mode is not HandoffMode.POOL:
                self._room.want(reservation)
        return []

    def check(self, key: RequestKey) -> DigestBlocks | None:
        """What came with a digest is compared before it joins. Until then it counts as moving."""
        reservation = self._reservations.get(key)
        commit = reservation.complete if reservation else None
        if reservation is None or commit is None or commit.digest is None:
            return None
        reservation.moving += 1
        tables = self.tables.tables(reservation.holder)
        span = prompt_from(commit.digest.start, reservation.prompt_tokens)
        return DigestBlocks(holder=reservation.holder, span=span, tables=tables)

    def digested(self, event: BlocksDigested) -> tuple[list[Command], list[Failure]]:
        """Wrong KV is given up; its prefill worker has done its part."""
        reservation = self._reservations[event.holder.key]
        reservation.moving -= 1
        if reservation.cancelled:
            self._reservations.free_if_quiet(reservation)
            return [], []
        commit = reservation.commit
        assert commit is not None and commit.digest is not None, reservation.key
        allowed = self.pools.canary_distance(reservation.sender)
        problem = mismatch(commit.digest, event.digests, allowed)
        if problem is None:
            self.canaries_passed += 1
            reservation.commit = replace(commit, digest=None)
            return [], []
        self.canaries_mismatched += 1
        self.pieces.end(reservation)
        answer = SendPeer(peer=reservation.sender, message=Committed(key=reservation.key))
        return [answer], [Failure(reservation.key, "kv_mismatch", problem)]

    def stop(self, key: RequestKey, choice: int) -> None:
        """A stop string ended this choice with its first token."""
        if key in self._reservations:
            self._reservations[key].stopped.add(choice)

    def take_complete(self, key: RequestKey) -> Arrived | None:
        """Once all pieces have landed and are committed: the blocks, if it has any, are the running
        request's."""
        return self._reservations.take_complete(key)

    def cancel(self, key: RequestKey, reason: str, now_s: float) -> list[Command]:
        """The request won't come: free its blocks once quiet, have its writer fenced off."""
        return self.pieces.cancel(key, reason, now_s)

    def fenced(self, key: RequestKey, now_s: float) -> list[Command]:
        """The writer says that it stopped, asked or by itself: its slabs and blocks are free."""
        self._lending.fenced(key)
        reservation = self._reservations.live(key)
        if reservation is not None:
            self.pieces.end(reservation)
        return [*self._lending.lend(now_s)]

    def renew(self, keys: tuple[RequestKey, ...], now_s: float) -> None:
        for key in keys:
            if self.leases.renew(key, now_s):
                self._lending.renew(key, now_s)

    def expire(self, now_s: float) -> tuple[list[Command], list[Failure]]:
        """Ends what nobody renewed: reservations fail, silent writers' slabs are retired."""
        replaced, keys = self._lending.expire(now_s)
        silent = dict.fromkeys((*self._reservations.expire(now_s), *keys))
        commands: list[Command] = [*replaced]
        failures = []
        for key in silent:
            message = f"no progress from the prefill worker in {self.leases.ttl_s:g} s"
            cancels = self.cancel(key, message, now_s)
            if cancels:
                failures.append(Failure(key, "handoff_timeout", message))
            commands += cancels
        return commands, failures

    def peer_lost(self, peer: Incarnation, reason: str) -> tuple[list[Command], list[Failure]]:
        self.pools.lost(peer)
        failures = []
        for reservation in self._reservations:
            if reservation.source == peer and not reservation.cancelled:
                failures.append(Failure(reservation.key, "peer_lost", reason))
                self.pieces.end(reservation)
        return [*self._lending.peer_lost(peer)], failures

    def validate(self) -> None:
        self._lending.validate()
        self._reservations.validate()
