"""The decode worker's side of handoffs: reservations, pieces on their way in, commits. Pure.

A reservation leases blocks to the prefill worker until the commit. Each piece comes through a slab
or is read directly, as the link's cost says. Blocks are freed only when no scatter or read into
them is in flight.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from decode_worker.lending import Lending
from decode_worker.peer_pools import PeerPools
from decode_worker.reservation import Arrived, Failure, Reservation
from decode_worker.room import Room
from engine.step import Command
from kvpool.canary import is_chosen
from kvpool.handoff import (
    CancelTransfer,
    Commit,
    HandoffMode,
    PieceAhead,
    PieceAwaited,
    PieceComputed,
    PieceFetched,
    PieceRead,
    ScatterSlab,
    SendPeer,
    SlabFilled,
    SlabReplaced,
    SlabScattered,
)
from kvpool.leases import LeaseTable
from kvpool.slabs import SlabId, SlabPool
from kvpool.tables import BlockTables, Holder
from kvpool.transfer_plan import Write
from kvrelay.errors import PeerError
from kvrelay.messages import Reserve
from kvrelay.types import Incarnation, RequestKey


@dataclass(slots=True, kw_only=True)
class Receiver:
    """`regions` names each slab's registered region, as peers are told. The KV of one request in
    `canary_every` is to be checked (0: of none)."""

    tables: BlockTables
    slabs: SlabPool
    regions: dict[SlabId, str]
    leases: LeaseTable[RequestKey]
    mode: HandoffMode = HandoffMode.PUSH
    canary_every: int = 0
    transfers: int = 0
    transfer_bytes: int = 0
    transfer_s: float = 0.0
    freed: list[RequestKey] = field(default_factory=list)
    """Reservations that ended without a commit, and hold nothing any more: for the router."""
    pools: PeerPools = field(init=False)
    _lending: Lending = field(init=False)
    _room: Room = field(init=False)
    _reservations: dict[RequestKey, Reservation] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pools = PeerPools(layout=self.tables.layout, slab_bytes=self.slabs.slab_bytes)
        self._room = Room(tables=self.tables, mode=self.mode)
        self._lending = Lending(slabs=self.slabs, regions=self.regions, ttl_s=self.leases.ttl_s)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._reservations

    @property
    def reserved_choices(self) -> int:
        live = (r for r in self._reservations.values() if not r.cancelled)
        return sum(r.message.spec.sampling.n for r in live)

    def try_reserve(self, message: Reserve, now_s: float) -> Reservation | None:
        """None and nothing changed when there are no blocks for the prompt."""
        spec = message.spec
        names = self.tables.chain(spec.tenant, len(spec.prompt_ids))
        names.extend(spec.prompt_ids, len(spec.prompt_ids))
        holder = Holder("decode", spec.key)
        checked = is_chosen(spec.key.request_id, self.canary_every)
        reservation = Reservation(message=message, holder=holder, names=names, checked=checked)
        if not self._room.try_reserve(reservation, now_s):
            return None
        self._reservations[spec.key] = reservation
        self.leases.grant(spec.key, now_s)
        return reservation

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
            for ahead, write in reservation.awaiting_blocks:
                commands += self._choose(reservation, ahead, write, now_s)
        return commands, keys

    # --- pieces ---------------------------------------------------------------------------------

    def ahead(self, peer: Incarnation, ahead: PieceAhead, now_s: float) -> list[Command]:
        reservation = self._live(ahead.key, peer)
        if reservation is None:
            return [self._cancel_at(peer, ahead.key, "no such reservation")]
        if ahead.number in reservation.announced:
            return []
        span = range(reservation.held_tokens, reservation.prompt_tokens)
        try:
            write = self.pools.write_of(peer, ahead, span, reservation.next_position)
        except PeerError as error:
            return [self._cancel_at(peer, ahead.key, str(error))]
        self.leases.renew(ahead.key, now_s)
        reservation.announced.add(ahead.number)
        if not self._room.want(reservation):
            reservation.awaiting_blocks.append((ahead, write))
            return []
        return self._choose(reservation, ahead, write, now_s)

    def _live(self, key: RequestKey, peer: Incarnation) -> Reservation | None:
        reservation = self._reservations.get(key)
        if reservation is None or reservation.cancelled or reservation.message.source != peer:
            return None
        return reservation

    def _choose(
        self, reservation: Reservation, ahead: PieceAhead, write: Write, now_s: float
    ) -> list[Command]:
        """Through a slab, or directly."""
        peer, tables = reservation.message.source, self.tables.tables(reservation.holder)
        try:
            way = self.pools.way(peer, ahead, write, tables)
        except PeerError as error:
            return [self._cancel_at(peer, ahead.key, str(error))]
        if isinstance(way, Write):
            reservation.collated[ahead.number] = (ahead, way)
            self._lending.ask(peer, ahead, way)
            return [*self._lending.lend(now_s)]
        reservation.direct[ahead.number] = way
        awaited = PieceAwaited(key=ahead.key, piece=ahead.number)
        return [SendPeer(peer=peer, message=awaited)]

    def filled(self, filled: SlabFilled, now_s: float) -> list[Command]:
        """A late writer's slab is ignored: its lease is not current."""
        number = self._lending.try_fill(filled)
        if number is None:
            return []
        reservation = self._reservations.get(filled.key)
        if reservation is None or reservation.cancelled:
            self.slabs.release(filled.slab_id, filled.lease_id)
            return [*self._lending.lend(now_s)]
        self.leases.renew(filled.key, now_s)
        reservation.moving += 1
        ahead, write = reservation.collated.pop(number)
        tables = self.tables.tables(reservation.holder)
        peer, piece = reservation.message.source, ahead.piece
        return [ScatterSlab(peer=peer, filled=filled, piece=piece, write=write, tables=tables)]

    def scattered(self, done: SlabScattered, now_s: float) -> tuple[list[Command], list[Failure]]:
        """The slab is free again."""
        self.slabs.release(done.slab_id, done.lease_id)
        commands: list[Command] = [*self._lending.lend(now_s)]
        ended, failures = self._landed(done, now_s)
        return commands + ended, failures

    def computed(self, peer: Incarnation, computed: PieceComputed, now_s: float) -> list[Command]:
        """A piece that was awaited may be read."""
        reservation = self._live(computed.key, peer)
        fetch = reservation.direct.pop(computed.piece, None) if reservation else None
        if reservation is None or fetch is None:
            return []
        self.leases.renew(computed.key, now_s)
        reservation.moving += 1
        return [fetch]

    def fetched(self, done: PieceFetched, now_s: float) -> tuple[list[Command], list[Failure]]:
        """The prefill worker is told: only it knows that the blocks were still the request's."""
        reservation = self._reservations[done.key]
        peer = reservation.message.source
        ended, failures = self._landed(done, now_s)
        if failures:
            self.pools.forget_cost(peer)
        if reservation.cancelled:
            return ended, failures
        return [SendPeer(peer=peer, message=PieceRead(key=done.key, piece=done.piece))], []

    def _landed(
        self, done: SlabScattered | PieceFetched, now_s: float
    ) -> tuple[list[Command], list[Failure]]:
        reservation = self._reservations[done.key]
        reservation.moving -= 1
        if reservation.cancelled:
            self._free_if_quiet(reservation)
            return [], []
        if done.error is not None:
            cancelled = self.cancel(done.key, done.error, now_s)
            return cancelled, [Failure(done.key, "transfer_failed", done.error)]
        reservation.landed += 1
        self.transfers += 1
        self.transfer_bytes += done.bytes
        self.transfer_s += done.seconds
        return [], []

    def replaced(self, event: SlabReplaced, now_s: float) -> list[Command]:
        self._lending.replaced(event)
        return [*self._lending.lend(now_s)]

    # --- endings --------------------------------------------------------------------------------

    def commit(self, peer: Incarnation, commit: Commit, now_s: float) -> list[Command]:
        reservation = self._reservations.get(commit.key)
        if reservation is None:  # it may be the first that is heard of it
            return [self._cancel_at(peer, commit.key, "no such reservation")]
        if self.leases.renew(commit.key, now_s):
            reservation.commit = commit
            if self.mode is not HandoffMode.POOL:
                self._room.want(reservation)
        return []

    def stop(self, key: RequestKey, choice: int) -> None:
        """A stop string ended this choice with its first token."""
        if key in self._reservations:
            self._reservations[key].stopped.add(choice)

    def take_complete(self, key: RequestKey) -> Arrived | None:
        """Once all pieces have landed and are committed: the blocks, if it has any, are the running
        request's."""
        reservation = self._reservations.get(key)
        arrived = reservation.arrived() if reservation else None
        if reservation is None or arrived is None:
            return None
        has_blocks = reservation.holder in self.tables
        if not has_blocks and self.mode is not HandoffMode.POOL:
            return None
        del self._reservations[key]
        self.leases.end(key)
        if has_blocks:
            self.tables.activate(reservation.holder)
        return arrived

    def cancel(self, key: RequestKey, reason: str, now_s: float) -> list[Command]:
        """The request won't come: free its blocks once quiet, have its writer fenced off."""
        reservation = self._reservations.get(key)
        if reservation is None or reservation.cancelled:
            return []
        self._end(reservation)
        self._lending.begin_fence(key, now_s)
        return [self._cancel_at(reservation.message.source, key, reason)]

    @staticmethod
    def _cancel_at(peer: Incarnation, key: RequestKey, reason: str) -> SendPeer:
        return SendPeer(peer=peer, message=CancelTransfer(key=key, reason=reason))

    def fenced(self, key: RequestKey, now_s: float) -> list[Command]:
        """The writer says that it stopped, asked or by itself: its slabs and blocks are free."""
        self._lending.fenced(key)
        reservation = self._reservations.get(key)
        if reservation is not None and not reservation.cancelled:
            self._end(reservation)
        return [*self._lending.lend(now_s)]

    def _end(self, reservation: Reservation) -> None:
        reservation.cancelled = True
        self.leases.end(reservation.key)
        self._lending.forget_asked(reservation.key)
        self._room.forget(reservation)
        self._free_if_quiet(reservation)

    def _free_if_quiet(self, reservation: Reservation) -> None:
        if reservation.moving == 0:
            key = reservation.key
            del self._reservations[key]
            self.tables.release(reservation.holder)
            self.freed.append(key)

    def renew(self, keys: tuple[RequestKey, ...], now_s: float) -> None:
        for key in keys:
            if self.leases.renew(key, now_s):
                self._lending.renew(key, now_s)

    def expire(self, now_s: float) -> tuple[list[Command], list[Failure]]:
        """Ends what nobody renewed: reservations fail, silent writers' slabs are retired."""
        replaced, keys = self._lending.expire(now_s)
        silent = dict.fromkeys((*self.leases.expire(now_s), *keys))
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
        for reservation in list(self._reservations.values()):
            if reservation.message.source == peer and not reservation.cancelled:
                failures.append(Failure(reservation.key, "peer_lost", reason))
                self._end(reservation)
        return [*self._lending.peer_lost(peer)], failures

    def validate(self) -> None:
        self._lending.validate()
        live = {key for key, r in self._reservations.items() if not r.cancelled}
        assert all(key in self.leases for key in live), "a reservation without a lease"
        assert len(self.leases) == len(live), "a lease without a reservation"
        assert {r.key for r in self._room.awaiting_blocks} <= live, "blocks for what is over"
