"""Handoffs as a prefill worker sees them: what decode workers and its own transfers say. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.step import Command, Tick
from kvpool.canary import BlocksDigested, DigestBlocks, is_chosen
from kvpool.handoff import (
    CancelTransfer,
    Committed,
    HandoffMode,
    PeerHello,
    PiecesAwaited,
    PiecesRead,
    SlabLent,
    TransferCancelled,
)
from kvpool.handoff_events import FromPeer, LayersWritten, PeerLost, SendPeer, SlabWritten
from kvpool.pool.client_events import OfferSettled
from kvpool.pool.map import KvFacts
from kvrelay.types import Incarnation, RequestKey
from prefill_worker.job import Job
from prefill_worker.jobs import Jobs

Event = FromPeer | PeerLost | SlabWritten | LayersWritten | OfferSettled | BlocksDigested | Tick


@dataclass(slots=True, kw_only=True)
class Handoffs:
    """`peers` are connected and have said hello. The KV of one request in `canary_every` is checked
    by the decode worker (0: of none)."""

    jobs: Jobs
    mode: HandoffMode
    canary_every: int = 0
    transfers: int = 0
    transfer_bytes: int = 0
    transfer_s: float = 0.0
    peers: dict[Incarnation, KvFacts] = field(default_factory=dict)

    def handle(self, event: Event, now_s: float) -> list[Command]:
        match event:
            case FromPeer():
                return self._from_peer(event, now_s)
            case SlabWritten():
                return self._written(event, now_s)
            case LayersWritten(layer=layer):
                return self._layers_written(layer)
            case BlocksDigested():
                return self._digested(event)
            case OfferSettled():
                return [command for job in self.jobs.live() for command in self._commit(job)]
            case PeerLost(peer=peer, reason=reason):
                self.peers.pop(peer, None)
                return self.jobs.peer_lost(peer, reason, now_s)
            case Tick():
                return [told for job in self.jobs.live() for told in job.sender.renew()]

    def _from_peer(self, event: FromPeer, now_s: float) -> list[Command]:
        """What comes for a job that is over, or from another than its target, changes nothing."""
        match event.message:
            case SlabLent(key=key) as lent if job := self.jobs.find(key, event.peer):
                return [*job.sender.lent(lent, self.jobs.tables(job))]
            case PiecesAwaited(key=key, pieces=pieces) if job := self.jobs.find(key, event.peer):
                return [*job.sender.awaited(pieces, self.jobs.tables(job))]
            case PiecesRead(key=key, pieces=pieces) if job := self.jobs.find(key, event.peer):
                job.sender.read(pieces)
                return self._commit(job)
            case PeerHello(kv=kv):
                return self._met(event.peer, kv)
            case Committed(key=key) if job := self.jobs.find(key, event.peer):
                return self.jobs.gone(key, now_s) if job.committing else []
            case CancelTransfer(key=key, reason=reason):
                return self._cancelled_by(event.peer, key, reason, now_s)
            case _:
                return []

    def _met(self, peer: Incarnation, kv: KvFacts) -> list[Command]:
        self.peers[peer] = kv
        jobs = self.jobs.live_for(peer)
        return [ahead for job in jobs for ahead in job.sender.met(kv, self.jobs.tables(job))]

    def _cancelled_by(
        self, peer: Incarnation, key: RequestKey, reason: str, now_s: float
    ) -> list[Command]:
        """The decode worker won't have it. Its router is told: no one else may tell it why."""
        if key not in self.jobs:
            return [SendPeer(peer=peer, message=TransferCancelled(key=key, reason=reason))]
        job = self.jobs.find(key, peer)
        return [] if job is None else self.jobs.fail(job, "transfer_cancelled", reason, now_s)

    # --- moving ---------------------------------------------------------------------------------

    def _layers_written(self, layer: int) -> list[Command]:
        running = ((job, take) for job, take in self.jobs.queue.on_device if job.cancelled is None)
        return [
            move
            for job, take in running
            for move in job.sender.layers_written(job.end(take), layer, self.jobs.tables(job))
        ]

    def _written(self, event: SlabWritten, now_s: float) -> list[Command]:
        job = self.jobs[event.key]
        job.sender.written(event.piece)
        if job.cancelled is not None:
            return self.jobs.cancel(event.key, job.cancelled, now_s)
        if event.error is not None:
            return self.jobs.fail(job, "transfer_failed", event.error, now_s)
        self.transfers += 1
        self.transfer_bytes += event.bytes
        self.transfer_s += event.seconds
        return self._commit(job)

    def after_chunk(self, job: Job, now_s: float) -> list[Command]:
        """What it has computed is sent, and it ends when nothing is left to do."""
        if job.cancelled is not None:
            return self.jobs.cancel(job.key, job.cancelled, now_s)
        if job.all_finished:
            return self.jobs.cancel(job.key, "finished with its first token", now_s)
        writes = job.sender.computed(job.computed, self.jobs.tables(job))
        return [*writes, *self._commit(job)]

    def _commit(self, job: Job) -> list[Command]:
        """If it is ready."""
        if job.cancelled is not None or not job.may_commit or not self._is_stored(job):
            return []
        job.committing = True
        span = job.sender.handed_over
        if span is None or not is_chosen(job.key.request_id, self.canary_every):
            return [job.sender.commit(job.first, job.finished)]
        return [DigestBlocks(holder=job.holder, span=span, tables=self.jobs.tables(job))]

    def _digested(self, event: BlocksDigested) -> list[Command]:
        """The blocks of a job that is over may be others' by now."""
        key = event.holder.key
        if key not in self.jobs or self.jobs[key].cancelled is not None:
            return []
        job = self.jobs[key]
        return [job.sender.commit(job.first, job.finished, event.digests[0])]

    def _is_stored(self, job: Job) -> bool:
        """With `pool`, what the decode worker is to fetch there."""
        return self.mode is not HandoffMode.POOL or self.jobs.openings.is_stored(job.filled)
