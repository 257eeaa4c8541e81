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

    It takes more steps while one runs: with `launches_ahead` a decode step behind a decode step,
    and each of them is a single one; with `prompt_steps` above 1 as many steps of prompts, such as
    one for each stage of a pipeline. Only while the other scheduler has no work, so their turns
    stay as they are.
    """

    def __init__(
        self,
        decode: DecodeScheduler,
        prefill: PrefillScheduler,
        pace: StepPace,
        *,
        most_steps: int,
        launches_ahead: bool,
        prompt_steps: int,
    ) -> None:
        assert most_steps == 1 or not launches_ahead, "an overlapped step is a single one"
        self._decode, self._prefill = decode, prefill
        self._pace = pace
        self._most_steps = most_steps
        self._turns: deque[Scheduler] = deque([decode, prefill])
        self._launched: deque[tuple[Scheduler, StepWork]] = deque()  # the first one runs
        self._most_decode, self._most_prefill = 1 + launches_ahead, prompt_steps  # on the device
        self.looks_ahead = launches_ahead or prompt_steps > 1
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
        """The device's next steps are launched before it is free, unless the other scheduler has
        work."""
        scheduler, commands = self.stepping, list[Command]()
        decodes = scheduler is self._decode
        other, most = (
            (self._prefill, self._most_decode) if decodes else (self._decode, self._most_prefill)
        )
        if scheduler is None or other.has_work:
            return commands
        launched = 0
        while launched < len(self._launched) < most:
            launched = len(self._launched)
            commands += self._offer(scheduler, OverlapStepWanted(), now_s)
        return commands

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
