"""Decides that the step on a worker's device will never end. Pure; one per worker.

Only time counts in which this process itself ran. While something is compiled for the first time,
another, longer limit holds.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum

from engine.core.own_time import OwnTime
from engine.core.step import RunStep
from engine.core.step_times import NotCovered, StepTimes, StepWork
from kvrelay.types import value

LEAST_S = 10.0
"""No step is given up before."""
TIMES_PREDICTED = 5.0
"""A step may take this many times as long as predicted."""
UNPREDICTED_S = 60.0
"""The limit of a step that no measured time covers."""
FIRST_USE_S = 600.0
"""The limit of compilation, and of the first step of a kind whose time is only guessed."""
COUNTED_S = 0.5
"""Between two looks at most this much counts; the watchdog looks twice as often."""


class StepKind(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


def kind_of(work: StepWork) -> StepKind:
    if not work.prefill_tokens:
        return StepKind.DECODE
    return StepKind.MIXED if work.decode_sequences else StepKind.PREFILL


@value
class HungStep:
    """`predicted_s` None: no measured time covers such a step. `compiles`: what was compiled for
    the first time when it was given up."""

    kind: StepKind
    sequences: int
    tokens: int
    predicted_s: float | None
    ran_s: float
    compiles: str | None

    def __str__(self) -> str:
        expected = "unknown" if self.predicted_s is None else f"{self.predicted_s:.3f} s"
        during = f" while it compiled {self.compiles}" if self.compiles is not None else ""
        return (
            f"a {self.kind} step (sequences: {self.sequences}, tokens: {self.tokens}) "
            f"has not ended after {self.ran_s:.1f} s{during}, predicted: {expected}"
        )


class StepWatch:
    """`launched` and `ended` may be called by other threads than `look`."""

    def __init__(
        self, times: StepTimes, now_s: float, *, guessed: bool = False, least_s: float = LEAST_S
    ) -> None:
        """`guessed`: `times` were not measured on this device."""
        self.least_s = least_s
        self._times = times
        self._steps: deque[RunStep] = deque()  # on the device; the first one runs
        self._known = set() if guessed else {*StepKind}
        self._own_time = OwnTime(most_s=COUNTED_S, looked_s=now_s)
        self._watched: RunStep | None = None
        self._ran_s = 0.0
        self._compiled_s = 0.0

    def launched(self, step: RunStep) -> None:
        self._steps.append(step)

    def ended(self) -> None:
        """The step that was launched first."""
        step = self._steps.popleft()
        if len(self._known) < len(StepKind):
            self._known.add(kind_of(step.batch.work))

    def look(self, now_s: float, compiles: str | None = None) -> HungStep | None:
        """The step that will not end, if there is one. `compiles` says what is compiled now."""
        passed_s = self._own_time.since_last(now_s)
        step = self._running()
        if step is None or step is not self._watched:
            self._watched, self._ran_s, self._compiled_s = step, 0.0, 0.0
            return None
        if compiles is not None:
            self._compiled_s += passed_s
            return self._hung(step, compiles) if self._compiled_s > FIRST_USE_S else None
        self._ran_s += passed_s
        if self._ran_s <= self.least_s or self._ran_s <= self._limit_s(step):
            return None
        return self._hung(step, None)

    def _running(self) -> RunStep | None:
        try:
            return self._steps[0]
        except IndexError:
            return None

    def _limit_s(self, step: RunStep) -> float:
        if kind_of(step.batch.work) not in self._known:
            return FIRST_USE_S
        predicted_s = self._predicted_s(step)
        return UNPREDICTED_S if predicted_s is None else TIMES_PREDICTED * predicted_s

    def _predicted_s(self, step: RunStep) -> float | None:
        try:
            return step.steps * self._times.step_s(step.batch.work)
        except NotCovered:
            return None

    def _hung(self, step: RunStep, compiles: str | None) -> HungStep:
        batch = step.batch
        return HungStep(
            kind=kind_of(batch.work),
            sequences=len(batch.slices),
            tokens=batch.tokens,
            predicted_s=self._predicted_s(step),
            ran_s=self._ran_s + self._compiled_s,
            compiles=compiles,
        )
