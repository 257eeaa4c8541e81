"""Which of a worker's schedulers has the device: they take turns at it. Part of the loop.

What a worker's loop does for reads between caches: its own of others', and others' of its own.

Runs on the loop's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from decode_worker.scheduler import DecodeScheduler
from engine.core.correction import StepPace
from engine.core.step import Command, RunStep, StepBehindWanted, StepDone, StepWanted
from engine.core.step_times import StepWork
from kvpool.core.fetch.openings import Openings
from kvpool.core.fetch.peer_pull import PullGrants
from kvpool.core.fetch.pool_fetch import Restored
from kvpool.core.transfer.commands import FromPeer, PeerLost, SendPeer
from kvpool.core.transfer.pull import BlocksPulled, PullBlocks, PullRead, PullWanted
from prefill_worker.scheduler import PrefillScheduler

Scheduler = DecodeScheduler | PrefillScheduler


class StepDevice(Protocol):
    """Runs a step; its end comes back as Stepped. Another one is submitted while it runs only where
    the loop was told that the device launches ahead."""

    def submit(self, step: RunStep) -> None: ...


class StepTurns:
    """`most_steps`: so many the device may run in a row, while no prompt waits. `launches_ahead`:
    it takes one step while another runs, each of them a single one. `execute` gets what isn't the
    device's."""

    def __init__(
        self,
        device: StepDevice,
        decode: DecodeScheduler,
        prefill: PrefillScheduler,
        pace: StepPace,
        now: Callable[[], float],
        execute: Callable[[Iterable[Command]], None],
        *,
        most_steps: int,
        launches_ahead: bool,
    ) -> None:
        assert most_steps == 1 or not launches_ahead, "the step behind goes on one token later"
        self._device = device
        self._decode, self._prefill = decode, prefill
        self._pace = pace
        self._now = now
        self._execute = execute
        self._most_steps = most_steps
        self._launches_ahead = launches_ahead
        self._turns: deque[Scheduler] = deque([decode, prefill])
        self.stepping: Scheduler | None = None
        self._behind: StepWork | None = None  # of the step behind the one that runs

    def start(self) -> None:
        """If the device is free."""
        if self.stepping is not None or not (self._decode.has_work or self._prefill.has_work):
            return
        for scheduler in list(self._turns):
            if self.stepping is None:
                self._turns.rotate(-1)
                if scheduler.has_work:
                    self._offer(scheduler)

    def start_behind(self) -> None:
        """What the device does next is launched before it is free, unless a prompt waits."""
        if not self._launches_ahead or self._behind is not None:
            return
        if self.stepping is not self._decode or self._prefill.has_work:
            return
        for command in self._decode.handle(StepBehindWanted(), self._now()):
            if isinstance(command, RunStep):
                self._behind = command.batch.work
            self._pass_on(command)

    def ended(self, done: StepDone) -> list[Command]:
        """What the scheduler of the step says to that."""
        scheduler = self.stepping
        assert scheduler is not None, "a step ended that was not begun"
        self._pace.ended(self._now(), done.steps)
        if self._behind is None:
            self.stepping = None
        else:
            self._pace.begun(self._behind, self._now())
            self._behind = None
        return scheduler.handle(done, self._now())

    def _offer(self, scheduler: Scheduler) -> None:
        most_steps = 1 if self._prefill.has_work else self._most_steps
        for command in scheduler.handle(StepWanted(most_steps=most_steps), self._now()):
            if isinstance(command, RunStep):
                self.stepping = scheduler
                self._pace.begun(command.batch.work, self._now())
            self._pass_on(command)

    def _pass_on(self, command: Command) -> None:
        if isinstance(command, RunStep):
            self._device.submit(command)
        else:
            self._execute([command])


class PullTurns:
    def __init__(self, openings: Openings, clock: Callable[[], float]) -> None:
        self._now = clock
        self._openings = openings
        self._answers: list[SendPeer] = []

    def handle(self, event: FromPeer | PeerLost | BlocksPulled) -> list[Restored]:
        """What came of it for those that wait for a prefix."""
        grants = self._openings.grants
        if grants is not None:
            self._answers += self._answer(grants, event)
        return self._openings.pulled(event, self._now())

    def _answer(
        self, grants: PullGrants, event: FromPeer | PeerLost | BlocksPulled
    ) -> list[SendPeer]:
        match event:
            case FromPeer(peer=peer, message=PullWanted() as wanted):
                granted = grants.wanted(peer, wanted, self._now())
                return [SendPeer(peer=peer, message=granted)]
            case FromPeer(peer=peer, message=PullRead() as read):
                return [SendPeer(peer=peer, message=grants.read(peer, read))]
            case PeerLost(peer=peer):
                grants.lost(peer)
        return []

    def tick(self) -> list[Restored]:
        if self._openings.grants is not None:
            self._openings.grants.expire(self._now())
        return self._openings.expire(self._now())

    def take_commands(self) -> list[SendPeer | PullBlocks]:
        """To be executed, in order."""
        pulls = self._openings.take_pulls()
        if not self._answers:
            return pulls
        answers, self._answers = self._answers, []
        return [*answers, *pulls]
