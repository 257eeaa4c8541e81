"""The decode worker's side of handoffs: reservations, slabs lent to writers, commits. Pure.

It owns two kinds of holds. A reservation leases blocks to the prefill worker until the commit. A
lent slab is the writer's until it is filled, or fenced, or its lease ends and it is retired.
Blocks are freed only when no scatter into them is in flight.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from decode_worker.reservation import Arrived, Failure, Reservation
from engine.step import Command
from kvpool.handoff import (
    CancelTransfer,
    Commit,
    ReplaceSlab,
    ScatterSlab,
    SendPeer,
    SlabFilled,
    SlabLent,
    SlabReplaced,
    SlabScattered,
    SlabWanted,
)
from kvpool.leases import LeaseTable
from kvpool.slabs import LeaseId, SlabId, SlabPool
from kvpool.tables import BlockTables, Holder
from kvrelay.messages import Reserve
from kvrelay.types import Incarnation, RequestKey


@dataclass(slots=True, kw_only=True)
class Receiver:
    """`regions` names each slab's registered region, as peers are told."""

    tables: BlockTables
    slabs: SlabPool
    regions: dict[SlabId, str]
    leases: LeaseTable[RequestKey]
    transfers: int = 0
    transfer_bytes: int = 0
    transfer_s: float = 0.0
    freed: list[RequestKey] = field(default_factory=list)
    """Reservations that ended without a commit, and hold nothing any more: for the router."""
    _reservations: dict[RequestKey, Reservation] = field(default_factory=dict)
    _awaiting_slab: deque[SlabWanted] = field(default_factory=deque)
    _lent: dict[RequestKey, dict[SlabId, LeaseId]] = field(default_factory=dict)
    """# key |-> slab |-> lease"""

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._reservations

    @property
    def reserved_choices(self) -> int:
        live = (r for r in self._reservations.values() if not r.cancelled)
        return sum(r.message.spec.sampling.n for r in live)

    def try_reserve(self, message: Reserve, now_s: float) -> Reservation | None:
        """Lease blocks for the prompt; None and nothing changed when they have run out."""
        spec, holder = message.spec, Holder("decode", message.spec.key)
        prompt_tokens = len(spec.prompt_ids)
        names = self.tables.chain(spec.tenant, prompt_tokens)
        names.extend(spec.prompt_ids, prompt_tokens)
        held_tokens = self.tables.try_open(
            holder,
            prompt_tokens + 1,
            hashes=names.full(prompt_tokens),
            seen_from=prompt_tokens,
            now_s=now_s,
            leased=True,
        )
        if held_tokens is None:
            return None
        reservation = Reservation(
            message=message, holder=holder, names=names, held_tokens=held_tokens
        )
        self._reservations[spec.key] = reservation
        self.leases.grant(spec.key, now_s)
        return reservation

    # --- slabs ----------------------------------------------------------------------------------

    def wanted(self, peer: Incarnation, wanted: SlabWanted, now_s: float) -> list[Command]:
        reservation = self._reservations.get(wanted.key)
        if reservation is None or reservation.cancelled:
            return [self._cancel_at(peer, wanted.key, "no such reservation")]
        if wanted.bytes > self.slabs.slab_bytes:
            reason = f"a slab holds {self.slabs.slab_bytes} bytes, {wanted.bytes} were wanted"
            return [self._cancel_at(peer, wanted.key, reason)]
        self.leases.renew(wanted.key, now_s)
        self._awaiting_slab.append(wanted)
        return self._lend(now_s)

    def _lend(self, now_s: float) -> list[Command]:
        sends: list[Command] = []
        while self._awaiting_slab:
            wanted = self._awaiting_slab[0]
            reservation = self._reservations.get(wanted.key)
            if reservation is None or reservation.cancelled:
                self._awaiting_slab.popleft()
                continue
            source = reservation.message.source
            lent = self.slabs.try_lend(source, wanted.bytes, now_s, self.leases.ttl_s)
            if lent is None:
                break
            self._awaiting_slab.popleft()
            self._lent.setdefault(wanted.key, {})[lent.slab_id] = lent.lease_id
            answer = SlabLent(
                key=wanted.key,
                piece=wanted.piece,
                slab_id=lent.slab_id,
                region=self.regions[lent.slab_id],
                lease_id=lent.lease_id,
            )
            sends.append(SendPeer(peer=source, message=answer))
        return sends

    def filled(self, filled: SlabFilled, now_s: float) -> list[Command]:
        """A late writer's slab is ignored: its lease is not current."""
        is_lent = self._lent.get(filled.key, {}).get(filled.slab_id) == filled.lease_id
        if not is_lent or not self.slabs.mark_filled(filled.slab_id, filled.lease_id):
            return []
        self._forget_slab(filled.key, filled.slab_id)
        reservation = self._reservations.get(filled.key)
        if reservation is None or reservation.cancelled:
            self.slabs.release(filled.slab_id, filled.lease_id)
            return self._lend(now_s)
        self.leases.renew(filled.key, now_s)
        reservation.scattering += 1
        return [ScatterSlab(filled=filled, tables=self.tables.tables(reservation.holder))]

    def scattered(self, done: SlabScattered, now_s: float) -> tuple[list[Command], list[Failure]]:
        """The slab is free again."""
        self.slabs.release(done.slab_id, done.lease_id)
        commands = self._lend(now_s)
        reservation = self._reservations[done.key]
        reservation.scattering -= 1
        if reservation.cancelled:
            self._free_if_quiet(reservation)
            return commands, []
        if done.error is not None:
            commands += self.cancel(done.key, done.error, now_s)
            return commands, [Failure(done.key, "transfer_failed", done.error)]
        reservation.scattered += 1
        self.transfers += 1
        self.transfer_bytes += done.bytes
        self.transfer_s += done.seconds
        return commands, []

    def _forget_slab(self, key: RequestKey, slab_id: SlabId) -> None:
        lent = self._lent.get(key)
        if lent is not None:
            lent.pop(slab_id, None)
            if not lent:
                del self._lent[key]

    def replaced(self, event: SlabReplaced, now_s: float) -> list[Command]:
        self.regions[event.slab_id] = event.region
        self.slabs.replaced(event.slab_id)
        return self._lend(now_s)

    # --- endings --------------------------------------------------------------------------------

    def commit(self, commit: Commit, now_s: float) -> None:
        reservation = self._reservations.get(commit.key)
        if reservation is not None:
            self.leases.renew(commit.key, now_s)
            reservation.commit = commit

    def stop(self, key: RequestKey, choice: int) -> None:
        """A stop string ended this choice with its first token."""
        if key in self._reservations:
            self._reservations[key].stopped.add(choice)

    def take_complete(self, key: RequestKey) -> Arrived | None:
        """Once all pieces are scattered and committed: the blocks are the running request's."""
        reservation = self._reservations.get(key)
        if reservation is None or (arrived := reservation.arrived()) is None:
            return None
        del self._reservations[key]
        self.leases.end(key)
        self.tables.activate(reservation.holder)
        return arrived

    def cancel(self, key: RequestKey, reason: str, now_s: float) -> list[Command]:
        """The request won't come: free its blocks once quiet, have its writer fenced off."""
        reservation = self._reservations.get(key)
        if reservation is None or reservation.cancelled:
            return []
        self._end(reservation)
        for slab_id, lease_id in self._lent.get(key, {}).items():
            self.slabs.begin_fence(slab_id, lease_id, now_s, self.leases.ttl_s)
        return [self._cancel_at(reservation.message.source, key, reason)]

    @staticmethod
    def _cancel_at(peer: Incarnation, key: RequestKey, reason: str) -> SendPeer:
        return SendPeer(peer=peer, message=CancelTransfer(key=key, reason=reason))

    def fenced(self, key: RequestKey, now_s: float) -> list[Command]:
        """The writer says that it stopped, asked or by itself: its slabs and blocks are free."""
        for slab_id, lease_id in self._lent.pop(key, {}).items():
            self.slabs.fence_acknowledged(slab_id, lease_id)
        reservation = self._reservations.get(key)
        if reservation is not None and not reservation.cancelled:
            self._end(reservation)
        return self._lend(now_s)

    def _end(self, reservation: Reservation) -> None:
        reservation.cancelled = True
        self.leases.end(reservation.key)
        self._free_if_quiet(reservation)

    def _free_if_quiet(self, reservation: Reservation) -> None:
        if reservation.scattering == 0:
            key = reservation.key
            del self._reservations[key]
            self.tables.release(reservation.holder)
            self.freed.append(key)

    def renew(self, keys: tuple[RequestKey, ...], now_s: float) -> None:
        for key in keys:
            if self.leases.renew(key, now_s):
                for lease_id in self._lent.get(key, {}).values():
                    self.slabs.renew(lease_id, now_s, self.leases.ttl_s)

    def expire(self, now_s: float) -> tuple[list[Command], list[Failure]]:
        """Ends what nobody renewed: reservations fail, silent writers' slabs are retired."""
        commands: list[Command] = []
        silent = dict.fromkeys(self.leases.expire(now_s))
        for expired in self.slabs.expire(now_s):
            silent |= dict.fromkeys(self._forget_lease(expired.slab_id))
            commands.append(ReplaceSlab(slab_id=expired.slab_id))
        failures = []
        for key in silent:
            message = f"no progress from the prefill worker in {self.leases.ttl_s:g} s"
            cancels = self.cancel(key, message, now_s)
            if cancels:
                failures.append(Failure(key, "handoff_timeout", message))
            commands += cancels
        return commands, failures

    def peer_lost(self, peer: Incarnation, reason: str) -> tuple[list[Command], list[Failure]]:
        """Declared dead is not gone: what it may still write to is retired, not reused."""
        failures = []
        for reservation in list(self._reservations.values()):
            if reservation.message.source == peer and not reservation.cancelled:
                failures.append(Failure(reservation.key, "peer_lost", reason))
                self._end(reservation)
        commands: list[Command] = []
        for lost in self.slabs.holder_lost(peer):
            self._forget_lease(lost.slab_id)
            commands.append(ReplaceSlab(slab_id=lost.slab_id))
        return commands, failures

    def _forget_lease(self, slab_id: SlabId) -> list[RequestKey]:
        """Whose slab it was: a piece lost with it never comes."""
        keys = [key for key, lent in self._lent.items() if slab_id in lent]
        for key in keys:
            self._forget_slab(key, slab_id)
        return keys

    def validate(self) -> None:
        self.slabs.validate()
        live = {key for key, r in self._reservations.items() if not r.cancelled}
        assert all(key in self.leases for key in live), "a reservation without a lease"
        assert len(self.leases) == len(live), "a lease without a reservation"
