"""Continuous batching: how sequences join, what of them runs in each step, how they part. Pure.

try_enqueue -> awaiting_prefill -> running -> drop
join    --------------------------/
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

from decode_worker.packing import Packing
from decode_worker.reservation import Arrived
from decode_worker.roster import Roster
from decode_worker.run_ahead import RunAhead
from decode_worker.sequence import Sequence
from decode_worker.standing import Standing
from decode_worker.step_behind import followers
from engine.latency import StepTimes
from engine.step import RunStep, SequenceSlice, StepBatch
from kvpool.openings import Openings
from kvpool.tables import BlockTables
from kvrelay.types import PrefixOrigin, RequestSpec


@dataclass(slots=True, kw_only=True)
class Batch:
    """`chunk_tokens` bounds the prefill tokens mixed into a step; `times` are the
    worker's own, as corrected at the moment; None: nothing is known.

    A sequence that outgrows `rope_border_tokens` is computed anew (LongRoPE).
    """

    openings: Openings
    chunk_tokens: int
    standing: Standing
    times: StepTimes | None = None
    rope_border_tokens: int | None = None
    roster: Roster = field(init=False)
    ahead: RunAhead = field(init=False)

    def __post_init__(self) -> None:
        self.roster = Roster(openings=self.openings, standing=self.standing)
        self.ahead = RunAhead(roster=self.roster, rope_border_tokens=self.rope_border_tokens)

    @property
    def tables(self) -> BlockTables:
        return self.openings.tables

    # --- coming ---------------------------------------------------------------------------------

    def try_enqueue(self, spec: RequestSpec, now_s: float) -> bool:
        """To be prefilled here; False and nothing changed when its blocks have run out."""
        sequence = self.roster.sequence(spec, self.tables.names_of(spec))
        if not self.roster.try_open(sequence, sequence.length + 1, self.chunk_tokens, now_s):
            return False
        sequence.cached = sequence.computed
        sequence.origin = PrefixOrigin.DEVICE if sequence.cached else PrefixOrigin.COMPUTED
        self.roster.expect(spec.key)
        self.roster.wait(sequence)
        return True

    def join(self, arrived: Arrived, now_s: float) -> None:
        """Its prompt's KV is in the holder's blocks; if it has none, it is got as after a
        preemption."""
        spec = arrived.message.spec
        whole = self.roster.sequence(spec, arrived.names)
        ids = [
            spec.resumed_by(choice) or arrived.resumed_ids or (token,)
            for choice, token in enumerate(arrived.first_token_ids)
        ]
        self.roster.expect(spec.key)
        if whole.holder in self.tables:
            self.advance(whole, spec.context_tokens)
            self._part(whole, ids, arrived.finished, now_s)
            return
        for choice, begun in zip(whole.choices, ids, strict=True):
            if choice not in arrived.finished:
                self.roster.wait(whole.part(choice, begun))

    def split(
        self, whole: Sequence, tokens: tuple[int, ...], finished: frozenset[int], now_s: float
    ) -> None:
        """The choices of a prompt that was prefilled here part at their first `tokens`, or go on
        behind those of earlier attempts."""
        self.roster.replaced(whole)
        drawn = zip(whole.choices, tokens, strict=True)
        begun = [whole.spec.resumed_by(choice) or (token,) for choice, token in drawn]
        self._part(whole, begun, finished, now_s)

    def _part(
        self,
        whole: Sequence,
        begun: Ordered[tuple[int, ...]],
        finished: frozenset[int],
        now_s: float,
    ) -> None:
        """Each choice that goes on becomes a running sequence that shares the prompt's blocks."""
        for choice, token_ids in zip(whole.choices, begun, strict=True):
            if choice in finished:
                continue
            sequence = whole.part(choice, token_ids)
            if sequence.holder != whole.holder:
                self.tables.fork(whole.holder, sequence.holder, now_s=now_s)
            self.roster.join(sequence)
        if whole.choices[0] in finished:
            self.tables.release(whole.holder)

    # --- steps ----------------------------------------------------------------------------------

    def next_step(self, now_s: float, most_steps: int = 1) -> RunStep | None:
        """With `most_steps` above 1 the step may be one that can be run so often."""
        assert not self.roster.on_device, "a step is on the device"
        if self.roster.is_empty:
            return None
        step = Packing(
            roster=self.roster,
            now_s=now_s,
            budget=self.chunk_tokens,
            times=self.times,
            rope_border_tokens=self.rope_border_tokens,
        )
        step.pack()
        if not step.chosen:
            return None
        self.roster.on_device = tuple(step.chosen)
        steps = self.ahead.steps(step.chosen, most_steps, now_s)
        slices = tuple(self._slice(sequence, take) for sequence, take in step.chosen)
        return RunStep(batch=StepBatch(slices=slices), copies=tuple(step.copies), steps=steps)

    def step_behind(self, now_s: float) -> RunStep | None:
        """The step after the one on the device, where it needs none of that one's tokens."""
        if self.rope_border_tokens is not None:
            return None
        found = followers(self.roster, now_s)
        if not found:
            return None
        self.roster.behind = tuple((one.sequence, 1) for one in found)
        slices = tuple(one.slice(self.tables.tables(one.sequence.holder)) for one in found)
        return RunStep(batch=StepBatch(slices=slices))

    def _slice(self, sequence: Sequence, take: int) -> SequenceSlice:
        return SequenceSlice(
            key=sequence.key,
            choice=sequence.choices[0],
            token_ids=sequence[sequence.computed : sequence.computed + take],
            start=sequence.computed,
            tables=self.tables.tables(sequence.holder),
            samples=sequence.samples() if take == sequence.needed else (),
            prompt_tokens=sequence.whole_tokens,
            scoring=sequence.scoring(take),
        )

    def advance(self, sequence: Sequence, tokens: int) -> None:
        """The KV of `tokens` more tokens is in its blocks."""
        size = self.tables.layout.block_size
        full_before = sequence.computed // size
        sequence.computed += tokens
        if sequence.computed // size > full_before:
            self.tables.fill(sequence.holder, sequence.filled)
        self.tables.trim(sequence.holder, sequence.computed)

    def end(self, sequence: Sequence) -> None:
        """It has drawn its last token. All its full blocks get names, also those that came from a
        pool."""
        self.tables.fill(sequence.holder, sequence.filled)
        self.roster.drop(sequence)
