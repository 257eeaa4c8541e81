"""Pieces of KV on their way into a decode worker's reserved blocks. Pure.

Each comes through a lent slab or is read where it lies, as the link's cost says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from decode_worker.lending import Lending
from decode_worker.peer_pools import PeerPools
from decode_worker.reservation import Failure, Reservation
from decode_worker.reservations import Reservations
from engine.step import Command
from kvpool.handoff import (
    CancelTransfer,
    PieceComputed,
    PiecesAhead,
    PiecesAwaited,
    PiecesRead,
    SlabFilled,
)
from kvpool.handoff_events import PieceFetched, ScatterSlab, SendPeer, SlabScattered
from kvpool.write import Write
from kvrelay.errors import PeerError
from kvrelay.types import Incarnation, RequestKey


def cancel_at(peer: Incarnation, key: RequestKey, reason: str) -> SendPeer:
    return SendPeer(peer=peer, message=CancelTransfer(key=key, reason=reason))


@dataclass(slots=True, kw_only=True)
class Pieces:
    """`transfers` are pieces that have landed."""

    reservations: Reservations
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
        writes: Sequence[Write],
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
            if isinstance(way, Write):
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
