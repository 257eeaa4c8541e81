"""Runs the steps of a simulated cluster's worker, layer by layer, over a memory of histories."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING

from engine.core.step import RunStep, Sampled, SequenceSlice, StepDone, StepOutcome
from engine.core.step_times import LinearTimes
from kvpool.core.transfer.commands import LayersWritten
from tests.sim.model import Running

if TYPE_CHECKING:
    from tests.sim.worker import Worker

TIMES = LinearTimes(prefill_token_s=0.005, decode_knots=((1, 0.01), (8, 0.08)))


class Device:
    """Runs steps in order; on average they take TIMES. One that launches ahead takes a second step
    while the first one runs. A pipeline of `stages` begins that when its first stage is free. Where
    chunks are launched ahead, another thread tells that a step has ended, a little later."""

    def __init__(self, worker: Worker, stages: int) -> None:
        self._worker = worker
        self._steps: deque[RunStep] = deque()
        self._sampled: tuple[tuple[Sampled, ...], ...] = ()
        groups = worker.shape.layout.groups
        layers = sorted(chain.from_iterable(group.layers for group in groups))
        borders = [len(layers) * stage // stages for stage in range(stages + 1)]
        self._stages = [layers[low:high] for low, high in pairwise(borders)]
        self._begun = 0  # of `_steps`
        self._is_first_busy = False
        self._untold = 0
        self.overlapped_steps = 0
        self.prompts_ahead = 0
        self.early_writes = 0
        self.early_marks = 0

    def submit(self, step: RunStep) -> None:
        shape = self._worker.shape
        assert len(self._steps) + self._untold <= shape.may_be_ahead, "too many steps at once"
        self._worker.memory.copy(step.copies)
        self.overlapped_steps += bool(self._steps)
        self.prompts_ahead += bool(self._steps) and self._is_of_prompts(step)
        self._steps.append(step)
        self._begin_next()

    @staticmethod
    def _is_of_prompts(step: RunStep) -> bool:
        return any(one.start < one.prompt_tokens for one in step.batch.slices)

    def _begin_next(self) -> None:
        """If there is one that has not begun, and the first stage is free."""
        if self._is_first_busy or self._begun == len(self._steps):
            return
        step, worker = self._steps[self._begun], self._worker
        self._is_first_busy, self._begun = True, self._begun + 1
        slices = tuple(map(self._known, step.batch.slices))
        running = worker.memory.begin(slices, self._stages[0][-1])
        self._run_stage(0, step, running, worker.net.now_s)

    def _run_stage(self, stage: int, step: RunStep, running: Running, begun_s: float) -> None:
        layers = self._stages[stage]
        scale_s = TIMES.step_s(step.batch.work) / (1 + len(step.layer_marks)) / len(self._stages)
        for layer in sorted(step.layer_marks.intersection(layers)):
            self._later(stage, partial(self._wrote, step, running, layer), scale_s)
        self._later(stage, partial(self._left, stage, step, running, begun_s), scale_s)

    def _known(self, one: SequenceSlice) -> SequenceSlice:
        """With the token that the step before has drawn."""
        if one.follows is None:
            return one
        (drawn,) = self._sampled[one.follows]
        return replace(one, token_ids=(drawn.token_id,), follows=None)

    def _later(self, stage: int, action: partial[None], scale_s: float) -> None:
        name = self._worker.incarnation
        channel = f"device {name} {stage}" if stage else f"device {name}"
        self._worker.net.by(name, channel, action, scale_s)

    def _wrote(self, step: RunStep, running: Running, layer: int) -> None:
        running.write_up_to(layer)
        before = self._worker.mover.writes
        self.early_marks += bool(self._untold) or step is not self._steps[0]
        self._worker.post(LayersWritten(layer, step.number))
        self.early_writes += self._worker.mover.writes - before

    def _left(self, stage: int, step: RunStep, running: Running, begun_s: float) -> None:
        """The step goes on in the next stage, and the next one may begin in the first."""
        running.write_up_to(self._stages[stage][-1])
        if stage == 0:
            self._is_first_busy = False
        if stage + 1 < len(self._stages):
            self._run_stage(stage + 1, step, running, begun_s)
            self._begin_next()
        else:
            self._done(running, begun_s)

    def _done(self, running: Running, begun_s: float) -> None:
        self._sampled = running.finish()
        self._steps.popleft()
        self._begun -= 1
        self._begin_next()
        seconds = self._worker.net.now_s - begun_s
        done = StepDone(outcome=StepOutcome(sampled=self._sampled), seconds=seconds)
        if self._worker.shape.prompt_steps == 1:
            self._worker.post(done)
            return
        self._untold += 1
        name = self._worker.incarnation
        self._worker.net.by(name, f"tokens {name}", partial(self._tell, done), 0.01)

    def _tell(self, done: StepDone) -> None:
        self._untold -= 1
        self._worker.post(done)
