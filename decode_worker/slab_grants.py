"""Which handoff holds which staging slab of this decode worker. Pure.

Each piece that travels through a slab asks for one; slabs are granted in the order of asking. A
granted slab belongs to its writer until the writer fills it, is fenced, or falls silent. In the
last case the slab is retired until its region is replaced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.core.step import Command
from kvpool.core.transfer.commands import ReplaceSlab, SendPeer
from kvpool.core.transfer.messages import SlabFilled, SlabLent
from kvpool.core.transfer.slabs import Expired, LeaseId, SlabId, SlabPool, SlabState
from kvpool.core.transfer.write import SlabWrite
from kvrelay.types import Incarnation, RequestKey


class _Asked(NamedTuple):
    peer: Incarnation
    key: RequestKey
    piece: int
    write: SlabWrite


class _Grant(NamedTuple):
    key: RequestKey
    lease_id: LeaseId
    piece: int


@dataclass(slots=True, kw_only=True)
class SlabGrants:
    """`regions` are the names of the slabs' registered regions, as peers know them."""

    slabs: SlabPool
    regions: dict[SlabId, str]
    ttl_s: float
    _asked: deque[_Asked] = field(default_factory=deque)
    _granted: dict[SlabId, _Grant] = field(default_factory=dict)

    def ask(self, peer: Incarnation, key: RequestKey, piece: int, write: SlabWrite) -> None:
        self._asked.append(_Asked(peer, key, piece, write))

    def withdraw(self, key: RequestKey) -> None:
        """The handoff needs no more slabs; those that it has stay granted."""
        if self._asked:
            self._asked = deque(asked for asked in self._asked if asked.key != key)

    def asking(self) -> set[RequestKey]:
        """The handoffs that wait for a slab."""
        return {asked.key for asked in self._asked}

    def grant(self, now_s: float) -> list[Command]:
        """Grants free slabs, and tells their writers."""
        sends: list[Command] = []
        while self._asked:
            peer, key, piece, write = self._asked[0]
            lent = self.slabs.try_lend(peer, write.nbytes, now_s, self.ttl_s)
            if lent is None:
                break
            self._asked.popleft()
            self._granted[lent.slab_id] = _Grant(key, lent.lease_id, piece)
            answer = SlabLent(
                key=key,
                piece=piece,
                slab_id=lent.slab_id,
                region=self.regions[lent.slab_id],
                lease_id=lent.lease_id,
                codec=write.wire.codec,
            )
            sends.append(SendPeer(peer=peer, message=answer))
        return sends

    def try_fill(self, filled: SlabFilled) -> int | None:
        """The piece in the slab. None, and nothing changed, when the writer's lease is over."""
        grant = self._granted.get(filled.slab_id)
        if grant is None or grant.key != filled.key:
            return None
        if not self.slabs.mark_filled(filled.slab_id, filled.lease_id):
            return None
        del self._granted[filled.slab_id]
        return grant.piece

    def release(self, slab_id: SlabId, lease_id: LeaseId, now_s: float) -> list[Command]:
        """A filled slab was scattered, or nobody wants what is in it; the next may have it."""
        self.slabs.release(slab_id, lease_id)
        return self.grant(now_s)

    def renew(self, key: RequestKey, now_s: float) -> None:
        for slab_id in self._of(key):
            self.slabs.renew(self._granted[slab_id].lease_id, now_s, self.ttl_s)

    def begin_fence(self, key: RequestKey) -> None:
        """The handoff was given up, but its writer may still write."""
        for slab_id in self._of(key):
            self.slabs.begin_fence(slab_id, self._granted[slab_id].lease_id)

    def fenced(self, key: RequestKey, now_s: float) -> list[Command]:
        """The writer says that it has stopped: its slabs are free."""
        for slab_id in self._of(key):
            self.slabs.fence_acknowledged(slab_id, self._granted.pop(slab_id).lease_id)
        return self.grant(now_s)

    def replaced(self, slab_id: SlabId, region: str, now_s: float) -> list[Command]:
        """A retired slab has a new region."""
        self.regions[slab_id] = region
        self.slabs.replaced(slab_id)
        return self.grant(now_s)

    def expire(self, now_s: float) -> tuple[list[Command], list[RequestKey]]:
        """Retires the slabs of silent writers. The second list has the handoffs that lost one:
        their pieces will never come."""
        return self._retire(self.slabs.expire(now_s))

    def peer_lost(self, peer: Incarnation) -> list[Command]:
        """Retires its slabs: a peer that is declared dead may still write."""
        return self._retire(self.slabs.holder_lost(peer))[0]

    def _retire(self, expired: tuple[Expired, ...]) -> tuple[list[Command], list[RequestKey]]:
        lost = [self._granted.pop(one.slab_id).key for one in expired]
        return [ReplaceSlab(slab_id=one.slab_id) for one in expired], lost

    def _of(self, key: RequestKey) -> list[SlabId]:
        return [slab_id for slab_id, grant in self._granted.items() if grant.key == key]

    def validate(self, receiving: Container[RequestKey]) -> None:
        """Each writable slab is granted to one handoff, which is `receiving`, or being fenced."""
        self.slabs.validate()
        states = {one.slab_id: one.state for one in self.slabs.held(0.0)}
        writable = {s for s, at in states.items() if at in (SlabState.LENT, SlabState.FENCING)}
        assert writable == self._granted.keys(), "a slab is lent to no handoff"
        lent = [key for s, (key, *_) in self._granted.items() if states[s] is SlabState.LENT]
        assert all(key in receiving for key in lent), "a slab is lent to a handoff that is over"
        assert all(asked.key in receiving for asked in self._asked), "a slab for what is over"
