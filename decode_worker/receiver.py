"""The decode worker's side of handoffs: reservations, pieces on their way in, commits. Pure.

A reservation leases blocks to the prefill worker until the commit.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from decode_worker.lending import Lending
from decode_worker.peer_pools import PeerPools
from decode_worker.pieces import Pieces, cancel_at
from decode_worker.reservation import Arrived, Failure, Reservation
from decode_worker.reservations import Reservations
from decode_worker.room import Room
from engine.step import Command
from kvpool.canary import BlocksDigested, DigestBlocks, mismatch, prompt_from
from kvpool.handoff import Commit, Committed, HandoffMode, PieceComputed, PiecesAhead, SlabFilled
from kvpool.handoff_events import PieceFetched, SendPeer, SlabReplaced, SlabScattered
from kvpool.leases import LeaseTable
from kvpool.slabs import SlabId, SlabPool
from kvpool.tables import BlockTables
from kvrelay.messages import Reserve
from kvrelay.types import Incarnation, RequestKey, RequestSpec


@dataclass(slots=True, kw_only=True)
class Receiver:
    """`regions` names each slab's registered region, as peers are told."""

    tables: BlockTables
    slabs: SlabPool
    regions: dict[SlabId, str]
    leases: LeaseTable[RequestKey]
    mode: HandoffMode = HandoffMode.PUSH
    canaries_passed: int = 0
    canaries_mismatched: int = 0
    pools: PeerPools = field(init=False)
    pieces: Pieces = field(init=False)
    _lending: Lending = field(init=False)
    _room: Room = field(init=False)
    _reservations: Reservations = field(init=False)
    _freed: list[RequestKey] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pools = PeerPools(layout=self.tables.layout, slab_bytes=self.slabs.slab_bytes)
        self._room = Room(tables=self.tables, mode=self.mode)
        self._lending = Lending(slabs=self.slabs, regions=self.regions, ttl_s=self.leases.ttl_s)
        self._reservations = Reservations(
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
