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
    """The device may run up to `most_steps` in a row while no prompt waits.

    It takes a second step while the first one runs: with `launches_ahead` a decode step behind a
    decode step, and each of them is a single one; with `prefill_ahead` a step of prompts behind
    one of prompts. Only while the other scheduler has no work, so their turns stay as they are.
    """

    def __init__(
        self,
        decode: DecodeScheduler,
        prefill: PrefillScheduler,
        pace: StepPace,
        *,
        most_steps: int,
        launches_ahead: bool,
        prefill_ahead: bool,
    ) -> None:
        assert most_steps == 1 or not launches_ahead, "an overlapped step is a single one"
        self._decode, self._prefill = decode, prefill
        self._pace = pace
        self._most_steps = most_steps
        self._turns: deque[Scheduler] = deque([decode, prefill])
        self._launched: deque[tuple[Scheduler, StepWork]] = deque()  # the first one runs
        self._launches_ahead, self._prefill_ahead = launches_ahead, prefill_ahead
        self.looks_ahead = launches_ahead or prefill_ahead
        self.stepping: Scheduler | None = None  # whose step the device runs

    def start(self, now_s: float) -> list[Command]:
        """The device is free."""
        if not (self._decode.has_work or self._prefill.has_work):
            return []
        commands: list[Command] = []
        for scheduler in list(self._turns):
            if self.stepping is None:
                self._turns.rotate(-1)
                if scheduler.has_work:
                    most_steps = 1 if self._prefill.has_work else self._most_steps
                    commands += self._offer(scheduler, StepWanted(most_steps=most_steps), now_s)
        return commands

    def start_ahead(self, now_s: float) -> list[Command]:
        """The device's next step is launched before it is free, unless the other scheduler has
        work."""
        if len(self._launched) != 1:
            return []
        assert self.stepping is not None
        scheduler, decode, prefill = self.stepping, self._decode, self._prefill
        may_decode = self._launches_ahead and not prefill.has_work
        may_prefill = self._prefill_ahead and not decode.has_work
        if not (may_decode if scheduler is decode else may_prefill):
            return []
        return self._offer(scheduler, OverlapStepWanted(), now_s)

    def ended(self, done: StepDone, now_s: float) -> list[Command]:
        """What the step's scheduler says to that. The next one begins."""
        assert self._launched, "a step ended that was not begun"
        scheduler, _ = self._launched.popleft()
        self._pace.ended(now_s, done.steps)
        self.stepping = None
        if self._launched:
            self.stepping, work = self._launched[0]
            self._pace.begun(work, now_s)
        return scheduler.handle(done, now_s)

    def _offer(
        self, scheduler: Scheduler, wanted: StepWanted | OverlapStepWanted, now_s: float
    ) -> list[Command]:
        commands = scheduler.handle(wanted, now_s)
        for command in commands:
            if isinstance(command, RunStep):
                work = command.batch.work
                self._launched.append((scheduler, work))
                if self.stepping is None:
                    self.stepping = scheduler
                    self._pace.begun(work, now_s)
        return commands
