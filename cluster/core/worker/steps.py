"""Which of a worker's two schedulers has the device: they take turns."""

from __future__ import annotations

from collections import deque

from decode_worker.scheduler import DecodeScheduler
from engine.core.correction import StepPace
from engine.core.step import Command, OverlapStepWanted, RunStep, StepDone, StepWanted
from engine.core.step_times import StepWork
from prefill_worker.scheduler import PrefillScheduler

Scheduler = DecodeScheduler | PrefillScheduler


class StepTurns:
    """The device may run up to `most_steps` in a row while no prompt waits. With `launches_ahead`
    it takes one step while another runs, and each of them is a single one."""

    def __init__(
        self,
        decode: DecodeScheduler,
        prefill: PrefillScheduler,
        pace: StepPace,
        *,
        most_steps: int,
        launches_ahead: bool,
    ) -> None:
        assert most_steps == 1 or not launches_ahead, "an overlapped step is a single one"
        self._decode, self._prefill = decode, prefill
        self._pace = pace
        self._most_steps = most_steps
        self._turns: deque[Scheduler] = deque([decode, prefill])
        self._overlapped: StepWork | None = None  # the step launched after the running one
        self.launches_ahead = launches_ahead
        self.stepping: Scheduler | None = None

    def start(self, now_s: float) -> list[Command]:
        """The device is free."""
        if not (self._decode.has_work or self._prefill.has_work):
            return []
        commands: list[Command] = []
        for scheduler in list(self._turns):
            if self.stepping is None:
                self._turns.rotate(-1)
                if scheduler.has_work:
                    commands += self._offer(scheduler, now_s)
        return commands

    def start_overlapped(self, now_s: float) -> list[Command]:
        """The device's next step is launched before it is free, unless a prompt waits."""
        if (
            self._overlapped is not None
            or self.stepping is not self._decode
            or self._prefill.has_work
        ):
            return []
        commands = self._decode.handle(OverlapStepWanted(), now_s)
        for command in commands:
            if isinstance(command, RunStep):
                self._overlapped = command.batch.work
        return commands

    def ended(self, done: StepDone, now_s: float) -> list[Command]:
        """What the step's scheduler says to that."""
        scheduler = self.stepping
        assert scheduler is not None, "a step ended that was not begun"
        self._pace.ended(now_s, done.steps)
        if self._overlapped is None:
            self.stepping = None
        else:
            self._pace.begun(self._overlapped, now_s)
            self._overlapped = None
        return scheduler.handle(done, now_s)

    def _offer(self, scheduler: Scheduler, now_s: float) -> list[Command]:
        most_steps = 1 if self._prefill.has_work else self._most_steps
        commands = scheduler.handle(StepWanted(most_steps=most_steps), now_s)
        for command in commands:
            if isinstance(command, RunStep):
                self.stepping = scheduler
                self._pace.begun(command.batch.work, now_s)
        return commands
