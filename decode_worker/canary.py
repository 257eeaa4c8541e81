"""Checks the KV of some requests that were handed over before they join the batch. Pure.

    arrived -> awaiting a step -> on the device -> joins, or failed

The prompt's last token is run once more, over the KV that arrived; its logits must be those that
the prefill worker drew its token from. It writes the last position's KV, so it does that in a copy
of the block. What can't be run so joins unchecked: where nothing was handed over, or no block is
left for the copy.

What comes from the pool only when it runs is checked then, in the batch: its last tokens are
computed here anyway, so those of the prompt are run by themselves first (Sequence.sketch).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from decode_worker.reservation import Arrived
from engine.step import RunStep, SampleRequest, SequenceSlice, StepBatch, StepOutcome
from kvpool.canary import LogitSketch
from kvpool.copies import CopyPairs
from kvpool.holder import Holder
from kvpool.tables import BlockTables
from kvrelay.types import RequestKey, RequestSpec, Sampling


@dataclass(slots=True, kw_only=True)
class _Check:
    """`copy` holds the request's blocks, the last one's copy among them."""

    arrived: Arrived
    sketch: LogitSketch
    copy: Holder
    copies: CopyPairs
    dropped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """`problem` None: the KV is right. `dropped`: nobody wants it any more."""

    arrived: Arrived
    problem: str | None
    dropped: bool


@dataclass(slots=True, kw_only=True)
class Canary:
    """`bound` is the largest distance that right KV may have (engine.canary), None: check none. A
    worker of another dtype has another; its own comes with what it saw."""

    tables: BlockTables
    bound: float | None
    passed: int = 0
    mismatched: int = 0
    skipped: int = 0
    _awaiting_step: list[_Check] = field(default_factory=list)
    _on_device: list[_Check] = field(default_factory=list)

    @property
    def _checks(self) -> list[_Check]:
        return [*self._awaiting_step, *self._on_device]

    @property
    def specs(self) -> tuple[RequestSpec, ...]:
        """Of those that are being checked."""
        checks = self._checks
        return tuple([c.arrived.message.spec for c in checks if not c.dropped]) if checks else ()

    @property
    def waits(self) -> bool:
        """For a step of its own."""
        return bool(self._awaiting_step)

    @property
    def runs(self) -> bool:
        """The step on the device is its own."""
        return bool(self._on_device)

    def try_begin(self, arrived: Arrived, now_s: float) -> bool:
        """Whether it is kept here until it is checked; its blocks are active already."""
        if arrived.sketch is None or arrived.holder not in self.tables:
            return False
        check = self._try_copy(arrived, arrived.sketch, now_s)
        if check is None:
            self.skipped += 1
            return False
        self._awaiting_step.append(check)
        return True

    def _try_copy(self, arrived: Arrived, sketch: LogitSketch, now_s: float) -> _Check | None:
        if self.bound is None or not self._is_new(arrived):
            return None
        copy = Holder("canary", arrived.key)
        self.tables.fork(arrived.holder, copy, now_s=now_s)
        copies = self.tables.try_own(copy, arrived.prompt_tokens - 1)
        if copies is None:
            self.tables.release(copy)
            return None
        return _Check(arrived=arrived, sketch=sketch, copy=copy, copies=copies)

    def _is_new(self, arrived: Arrived) -> bool:
        """Something was handed over."""
        return arrived.held_tokens < arrived.prompt_tokens

    def later(self, arrived: Arrived) -> LogitSketch | None:
        """What is to be compared once its KV is here."""
        return arrived.sketch if self.bound is not None else None

    def next_step(self) -> RunStep | None:
        """All that wait, in one step."""
        assert not self._on_device, "a step is on the device"
        self._on_device, self._awaiting_step = self._awaiting_step, []
        if not self._on_device:
            return None
        slices = tuple(self._slice(check) for check in self._on_device)
        copies = tuple(check.copies for check in self._on_device)
        return RunStep(batch=StepBatch(slices=slices), copies=copies)

    def _slice(self, check: _Check) -> SequenceSlice:
        arrived = check.arrived
        greedy = Sampling(max_tokens=1, seed=0)
        return SequenceSlice(
            key=arrived.key,
            choice=0,
            token_ids=arrived.message.spec.context_ids[-1:],
            start=arrived.prompt_tokens - 1,
            tables=self.tables.tables(check.copy),
            samples=(
                SampleRequest(sampling=greedy, choice=0, index=0, prompt_ids=(), emitted_ids=()),
            ),
            prompt_tokens=arrived.prompt_tokens,
            sketch_ids=check.sketch.token_ids,
        )

    def ran(self, outcome: StepOutcome) -> list[Checked]:
        """What is known now. Those with a problem, and those dropped, hold nothing any more."""
        ran, self._on_device = self._on_device, []
        return [self._judge(check, outcome.sketches[i]) for i, check in enumerate(ran)]

    def _judge(self, check: _Check, found: LogitSketch) -> Checked:
        self.tables.release(check.copy)
        problem = self.problem(check.sketch, found)
        if problem is not None or check.dropped:
            self.tables.release(check.arrived.holder, distrusted=problem is not None)
        return Checked(arrived=check.arrived, problem=problem, dropped=check.dropped)

    def problem(self, sketch: LogitSketch, found: LogitSketch) -> str | None:
        """None: the KV is right. Counted."""
        assert self.bound is not None
        distance, allowed = sketch.distance(found), max(self.bound, sketch.bound)
        if distance <= allowed:
            self.passed += 1
            return None
        self.mismatched += 1
        return f"logits differ by {distance:.2g} of their spread (allowed {allowed:.2g})"

    def stop(self, key: RequestKey, choice: int) -> None:
        """A stop string ended this choice with its first token."""
        for check in self._checks:
            if check.arrived.key == key:
                check.arrived = check.arrived.without(choice)

    def drop(self, key: RequestKey) -> bool:
        """Its blocks come back now (True), or after the step that it is in."""
        for check in self._awaiting_step:
            if check.arrived.key == key:
                self._awaiting_step.remove(check)
                self.tables.release(check.copy)
                self.tables.release(check.arrived.holder)
                return True
        for check in self._on_device:
            check.dropped |= check.arrived.key == key
        return False
