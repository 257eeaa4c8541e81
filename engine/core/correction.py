"""Learns, from steps as they run, how much longer they take than predicted. Pure; one per
worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, log
from typing import NamedTuple

from engine.core.step_times import NotCovered, StepTimes, StepWork

MEMORY_S = 0.25
"""How long a step that has run counts. What changes faster is over before a request that is
predicted now gets there, and following it would only add to the error."""
USUAL_S, FORGETS_S = 10.0, 1.0
"""Without steps of its kind a correction goes back to the mean over so many seconds of steps: what
the latest ones met has passed, and a worker that seems slow would get none to show it."""
_MOST_SHARE = 0.05
"""Weight of the newest step, at most. The first ones weigh more."""
_PROFILE_STEPS = 3
"""Before any step the profile counts as this many steps."""
_MOST_SURPRISE = log(4)
"""A single delayed step counts at most this much."""
_MOST = log(32)


class CorrectedTimes(NamedTuple):
    """Implements `engine.core.step_times.StepTimes`: `times`, multiplied by the learnt
    correction."""

    times: StepTimes
    prefill: float
    decode: float

    def step_s(self, work: StepWork) -> float:
        if not work.decode_sequences:
            return self.times.step_s(work) * self.prefill
        if not work.prefill_tokens:
            return self.times.step_s(work) * self.decode
        prefill_s = self.times.step_s(_prompts_of(work))
        return prefill_s * self.prefill + (self.times.step_s(work) - prefill_s) * self.decode


def _prompts_of(work: StepWork) -> StepWork:
    return StepWork(
        prefill_tokens=work.prefill_tokens,
        prefill_sequences=work.prefill_sequences,
        attended_tokens=work.attended_tokens,
    )


@dataclass(slots=True)
class Correction:
    """The exponentially weighted mean of actual by predicted seconds. The geometric mean (`level`)
    settles soon, and single steps change it little. `by_sum`: `level` times the ratio of the
    arithmetic to the geometric mean of the steps' ratios. A pace, the sum of many steps of similar
    length, follows the arithmetic mean."""

    by_sum: bool = False
    factor: float = 1.0
    level: float = 1.0
    _log_level: float = 0.0
    _log_usual: float = 0.0
    _as_of_s: float = 0.0
    _mean: float = 1.0
    _mean_log: float = 0.0
    _steps: int = _PROFILE_STEPS

    def observe(self, surprise: float, predicted_s: float, now_s: float, steps: int = 1) -> None:
        """`surprise`: the logarithm of actual seconds by those that `level` predicts, of so many
        steps in a row, of `predicted_s` together. They weigh by these, not by the actual ones: else
        slow steps would count for more."""
        bounded = max(-_MOST_SURPRISE, min(_MOST_SURPRISE, surprise))
        self._steps += steps
        self._as_of_s = now_s
        of_usual = min(1 - exp(-predicted_s / USUAL_S), _MOST_SHARE * steps)
        usual = max(of_usual, steps / self._steps)
        self._log_usual += usual * (self._log_level + bounded - self._log_usual)
        share = min(1 - exp(-predicted_s / MEMORY_S), _MOST_SHARE * steps)
        self._mean += share * (exp(bounded) - self._mean)
        self._mean_log += share * (bounded - self._mean_log)
        learnt = self._log_level + max(share, steps / self._steps) * bounded
        self._set(max(-_MOST, min(_MOST, learnt)))

    def rest(self, now_s: float) -> None:
        """No step of its kind has ended since the last one or `rest`."""
        stays = exp((self._as_of_s - now_s) / FORGETS_S)
        self._as_of_s = now_s
        self._set(self._log_usual + stays * (self._log_level - self._log_usual))

    def _set(self, log_level: float) -> None:
        self._log_level = log_level
        self.level = exp(self._log_level)
        uneven = self._mean / exp(self._mean_log) if self.by_sum else 1.0
        self.factor = min(exp(_MOST), self.level * uneven)


@dataclass(slots=True)
class StepPace:
    """Compares each step with `times`, and implements StepTimes with the correction so far. A step
    begins when the device is free for it, so work between two steps belongs to the second. Of two
    on the device the second begins when the first has ended. So a pipeline that is full learns the
    gap between two ends, which is what a prompt in the queue waits for; it learns the whole time of
    a step that ran alone."""

    times: StepTimes
    prefill: Correction = field(default_factory=Correction)
    decode: Correction = field(default_factory=lambda: Correction(by_sum=True))
    work: StepWork | None = None  # of the step that runs
    _begun_s: float = 0.0
    _free_s: float | None = None

    @property
    def corrected(self) -> CorrectedTimes:
        return CorrectedTimes(self.times, self.prefill.factor, self.decode.factor)

    @property
    def predicted_s(self) -> float:
        """Of the step that runs, without a correction; 0: nothing is known of such a step."""
        try:
            return 0.0 if self.work is None else self.times.step_s(self.work)
        except NotCovered:
            return 0.0

    def step_s(self, work: StepWork) -> float:
        """With the current correction."""
        return self.corrected.step_s(work)

    def begun(self, work: StepWork, now_s: float) -> None:
        self.work = work
        self._begun_s = now_s if self._free_s is None else self._free_s

    def ended(self, now_s: float, steps: int = 1) -> None:
        """This many similar steps have run in a row."""
        assert self.work is not None, "a step ended that was not begun"
        self._learn(self.work, now_s - self._begun_s, steps, now_s)
        self.work, self._free_s = None, now_s

    def idle(self) -> None:
        """There is no step to run now."""
        self._free_s = None

    def rest(self, now_s: float) -> None:
        """Time has passed."""
        self.prefill.rest(now_s)
        self.decode.rest(now_s)

    def _learn(self, work: StepWork, seconds: float, steps: int, now_s: float) -> None:
        level = CorrectedTimes(self.times, self.prefill.level, self.decode.level)
        try:
            predicted_s = level.step_s(work)
        except NotCovered:
            return
        if seconds <= 0 or predicted_s <= 0:
            return
        surprise = log(seconds / steps / predicted_s)
        if work.prefill_tokens:
            self.prefill.observe(surprise, predicted_s * steps, now_s, steps)
        if work.decode_sequences:
            self.decode.observe(surprise, predicted_s * steps, now_s, steps)
