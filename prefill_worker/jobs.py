"""The prompts of a prefill worker, from arrival to release, and how they end early. Pure.

awaiting_prefill -> prefilling -> handing_over -> gone
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.step import Command, Emit
from kvpool.handoff_events import SendPeer
from kvpool.layout import Tables
from kvpool.openings import Openings
from kvpool.tables import BlockTables
from kvrelay.messages import Released, RequestFailed
from kvrelay.types import Incarnation, RequestKey
from prefill_worker.job import Job
from prefill_worker.prompt_queue import PromptQueue


@dataclass(slots=True, kw_only=True)
class Jobs:
    openings: Openings
    queue: PromptQueue = field(default_factory=PromptQueue)
    _jobs: dict[RequestKey, Job] = field(default_factory=dict)

    @property
    def block_tables(self) -> BlockTables:
        return self.openings.tables

    @property
    def handing_over(self) -> int:
        return len(self._jobs) - len(self.queue)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._jobs

    def __getitem__(self, key: RequestKey) -> Job:
        return self._jobs[key]

    def add(self, job: Job, now_s: float) -> None:
        assert job.key not in self._jobs, f"{job.key} is here already"
        self._jobs[job.key] = job
        self.queue.add(job, now_s)

    def live(self) -> Iterator[Job]:
        """Those not cancelled, though they may be while this is read."""
        return (job for job in [*self._jobs.values()] if job.cancelled is None)

    def live_for(self, peer: str) -> Iterator[Job]:
        return (job for job in self.live() if job.message.target == peer)

    def find(self, key: RequestKey, peer: str) -> Job | None:
        """The live job of that key, if it is for this peer."""
        job = self._jobs.get(key)
        if job is None or job.cancelled is not None or job.message.target != peer:
            return None
        return job

    def tables(self, job: Job) -> Tables:
        """None yet for one that waits: nothing of it is planned either."""
        held = job.holder in self.block_tables
        return self.block_tables.tables(job.holder) if held else ()

    # --- endings --------------------------------------------------------------------------------

    def cancel(self, key: RequestKey, reason: str, now_s: float) -> list[Command]:
        """Stop at once; the blocks and the fence wait for a step or writes in flight."""
        job = self._jobs.get(key)
        if job is None:
            return []
        job.sender.cancelled = reason
        self.queue.remove(job)
        fetching = self.openings.drop(job.holder)
        if fetching or self.queue.runs(job) or not job.sender.settled:
            return []
        return [*job.sender.fence(reason), *self.gone(key, now_s)]

    def fail(self, job: Job, reason: str, message: str, now_s: float) -> list[Command]:
        failed = RequestFailed(key=job.key, at_s=now_s, reason=reason, message=message)
        return [Emit(events=(failed,)), *self.cancel(job.key, reason, now_s)]

    def peer_lost(self, peer: Incarnation, reason: str, now_s: float) -> list[Command]:
        return [
            command
            for job in self.live_for(peer)
            for command in self.fail(job, "peer_lost", reason, now_s)
            if not isinstance(command, SendPeer)
        ]

    def gone(self, key: RequestKey, now_s: float) -> list[Command]:
        job = self._jobs.pop(key, None)
        if job is None:
            return []
        self.block_tables.release(job.holder)
        return [Emit(events=(Released(key=key, at_s=now_s),))]

    def validate(self) -> None:
        """Each held prompt is one job's, and each job waits, runs or hands over."""
        held = {h.holder for h in self.block_tables.held() if h.holder.side == "prefill"}
        assert held <= {job.holder for job in self._jobs.values()}, held
        assert self.queue.awaiting_prefill.keys() <= self._jobs.keys()
        self.queue.validate()
