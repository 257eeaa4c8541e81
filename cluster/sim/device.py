"""What runs a worker's steps in the simulator: they take as long as its hardware profile says.

A device of several stages holds a step for each: the first stage may run the next step while the
later ones still run those before.

How long decode steps in a row take, and how many fit. Pure.

Each step adds a token to each context. Step times that are quadratic in the context, as fitted
ones are, are summed from three of them, exact but for half a token of context.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

from cluster.core.worker.events import CoreEvent
from cluster.sim.machines.clock import Clock
from cluster.sim.machines.noise import StepKind, StepNoise
from cluster.sim.trace import Answers
from engine.core.step import RunStep, SequenceSlice, StepBatch, StepDone, StepOutcome
from engine.core.step_times import StepTimes, StepWork, decode_work, mixed_work
from kvpool.core.transfer.commands import LayersWritten


def run_s(times: StepTimes, sequences: int, kv_tokens: int, steps: int) -> float:
    """Of `steps` steps, the first over `kv_tokens` of context in all."""
    first = times.step_s(decode_work(sequences, kv_tokens))
    if steps == 1:
        return first
    last = times.step_s(decode_work(sequences, kv_tokens + sequences * (steps - 1)))
    if steps == 2:
        return first + last
    middle = times.step_s(decode_work(sequences, kv_tokens + sequences * (steps - 1) // 2))
    bend = first - 2 * middle + last
    return steps * (middle + bend * (steps + 1) / (6 * (steps - 1)))


def steps_begun(
    times: StepTimes, sequences: int, kv_tokens: int, most: int, elapsed_s: float
) -> int:
    """How many of `most` steps have begun by then: the last of these is the one that runs."""
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        if run_s(times, sequences, kv_tokens, middle) >= elapsed_s:
            high = middle
        else:
            low = middle + 1
    return low


def noisy_ends(
    times: StepTimes, noise: StepNoise, work: StepWork, steps: int, began_s: float
) -> tuple[float, ...]:
    """When each of `steps` in a row ends, in seconds since they began."""
    noise.begin()
    kind: StepKind = "prefill" if work.prefill_tokens else "decode"
    ends: list[float] = []
    end_s, sequences = 0.0, work.decode_sequences
    for number in range(steps):
        one = decode_work(sequences, work.kv_tokens + sequences * number) if number else work
        end_s += times.step_s(one) * noise.factor(kind, began_s + end_s)
        ends.append(end_s)
    return tuple(ends)


def stage_times(
    seconds: float, stages: int, now_s: float, before: Sequence[float]
) -> tuple[list[float], list[float]]:
    """When a step of `seconds`, launched now, begins and ends in each stage. A stage takes an equal
    share of it, and one step at a time, in order: the step `before` has left them then (empty:
    there is none)."""
    begins, ends, at_s = list[float](), list[float](), now_s
    for stage in range(stages):
        begins.append(max(at_s, before[stage]) if before else at_s)
        at_s = begins[-1] + seconds / stages
        ends.append(at_s)
    return begins, ends


def written_s(begins: Sequence[float], seconds: float, share: float) -> float:
    """When this share of the layers is written in a step whose stages begin then."""
    stage = ceil(share * len(begins)) - 1
    return begins[stage] + seconds * (share - stage / len(begins))


@dataclass(slots=True)
class _Running:
    """`work` is that of the first of `steps` in a row. It could begin at `began_s`, when it was
    launched and the step before it had ended, and takes `seconds` since then. `ends_s`: of each of
    its steps, with noise. `leaves_s`: when it leaves each stage."""

    step: RunStep
    work: StepWork
    steps: int
    began_s: float
    seconds: float
    ends_s: tuple[float, ...] = ()
    leaves_s: Sequence[float] = ()


class SimDevice:
    """Implements cluster.worker.loop.StepDevice; `post` gets the outcomes. A pipeline has several
    `stages`. More steps of prompts may be launched while one runs, one for each stage at least."""

    def __init__(
        self,
        clock: Clock,
        times: StepTimes,
        answers: Answers,
        layers: int,
        post: Callable[[Sequence[CoreEvent]], None],
        noise: StepNoise | None = None,
        stages: int = 1,
    ) -> None:
        self._clock = clock
        self._times = times
        self._noise = noise
        self._answers = answers
        self._layers = layers
        self._post = post
        self._stages = stages
        self._launched: deque[_Running] = deque()  # the first one runs
        self.steps_running = 0  # in a row
        self.prefill_busy_s = 0.0
        self.decode_busy_s = 0.0

    def submit(self, step: RunStep) -> None:
        assert len(self._launched) < max(2, self._stages), "so many steps at a time"
        work = _work_of(step.batch)
        steps = min(step.steps, *map(self._answers.steps_left, step.batch.slices))
        before = self._launched[-1].leaves_s if self._launched else ()
        now_s = self._clock.now_s
        began_s = max(now_s, before[-1]) if before else now_s
        ends_s: tuple[float, ...] = ()
        if self._noise is not None:
            ends_s = noisy_ends(self._times, self._noise, work, steps, began_s)
        alone_s = ends_s[-1] if ends_s else self._seconds(work, steps)
        begins, leaves = stage_times(alone_s, self._stages, now_s, before)
        seconds = leaves[-1] - began_s if self._stages > 1 else alone_s  # to the last bit
        running = _Running(step, work, steps, began_s, seconds, ends_s, leaves)
        self._launched.append(running)
        self.steps_running = self._launched[0].steps
        for layer in sorted(step.layer_marks):
            at_s = written_s(begins, alone_s, (layer + 1) / self._layers)
            self._clock.at(at_s, self._post, (LayersWritten(layer, step.number),))
        self._clock.at(leaves[-1], self._end, running)

    def _seconds(self, work: StepWork, steps: int) -> float:
        if steps == 1:
            return self._times.step_s(work)
        return run_s(self._times, work.decode_sequences, work.kv_tokens, steps)

    def cut(self) -> None:
        """The step that runs just now is the last one of its run."""
        (running,) = self._launched
        steps = self._begun(running, self._clock.now_s - running.began_s)
        if steps == running.steps:
            return
        ends_s = running.ends_s[:steps]
        seconds = ends_s[-1] if ends_s else self._seconds(running.work, steps)
        if self._noise is not None:
            self._noise.cut(steps)
        shorter = _Running(running.step, running.work, steps, running.began_s, seconds, ends_s)
        self._launched[0] = shorter
        self.steps_running = steps
        self._clock.at(max(self._clock.now_s, running.began_s + seconds), self._end, shorter)

    def _begun(self, running: _Running, elapsed_s: float) -> int:
        if running.ends_s:
            return min(running.steps, bisect_left(running.ends_s, elapsed_s) + 1)
        sequences, kv = running.work.decode_sequences, running.work.kv_tokens
        return steps_begun(self._times, sequences, kv, running.steps, elapsed_s)

    def _end(self, running: _Running) -> None:
        if not self._launched or running is not self._launched[0]:
            return  # it was cut
        self._launched.popleft()
        self.steps_running = self._launched[0].steps if self._launched else 0
        if running.work.prefill_tokens:
            self.prefill_busy_s += running.seconds
        else:
            self.decode_busy_s += running.seconds
        drawn = (self._answers.drawn(one, running.steps) for one in running.step.batch.slices)
        outcome = StepOutcome(sampled=tuple(drawn))
        done = StepDone(outcome=outcome, seconds=running.seconds, steps=running.steps)
        self._post((done,))


def _work_of(batch: StepBatch) -> StepWork:
    decodes = [one.start + 1 for one in batch.slices if _decodes(one)]
    chunks = [(len(one.token_ids), one.start) for one in batch.slices if not _decodes(one)]
    return mixed_work(chunks, decoding=len(decodes), kv_tokens=sum(decodes))


def _decodes(one: SequenceSlice) -> bool:
    return len(one.token_ids) == 1 and one.start >= one.prompt_tokens
