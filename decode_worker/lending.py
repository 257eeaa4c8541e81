"""Staging slabs that this decode worker lends to writers, in order of asking. Pure.

A lent slab is the writer's until it is filled, or fenced, or its lease ends and it is retired.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from kvpool.handoff import SlabFilled, SlabLent
from kvpool.handoff_events import ReplaceSlab, SendPeer, SlabReplaced
from kvpool.slabs import Expired, LeaseId, SlabId, SlabPool
from kvpool.write import Write
from kvrelay.types import Incarnation, RequestKey


class _Asked(NamedTuple):
    """For a piece, by its number."""

    peer: Incarnation
    key: RequestKey
    number: int
    write: Write


@dataclass(slots=True, kw_only=True)
class Lending:
    """`regions` names each slab's registered region, as peers are told."""

    slabs: SlabPool
    regions: dict[SlabId, str]
    ttl_s: float
    _awaiting_slab: deque[_Asked] = field(default_factory=deque)
    _lent: dict[RequestKey, dict[SlabId, tuple[LeaseId, int]]] = field(default_factory=dict)
    """# key |-> slab |-> lease, number of the piece"""

    def ask(self, peer: Incarnation, key: RequestKey, number: int, write: Write) -> None:
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
