"""The requests whose KV is expected at this decode worker, and the leases of their blocks. Pure.

A reservation ends by arriving, or cancelled; then its blocks are freed once no scatter or read into
them is in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from decode_worker.reservation import Arrived, Reservation
from decode_worker.room import Room
from kvpool.holder import Holder
from kvpool.leases import LeaseTable
from kvpool.tables import BlockTables
from kvrelay.messages import Reserve
from kvrelay.types import Incarnation, RequestKey


@dataclass(slots=True, kw_only=True)
class Reservations:
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
