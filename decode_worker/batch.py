"""Continuous batching: how sequences join, which step runs next, and how sequences part. Pure.

    try_enqueue -> awaiting_prefill -> running -> dropped
    join    --------------------------/

Multi-step: a step may be run several times in a row, up to the first end of a sequence. The result
is that of as many single steps, wherever the run is cut; room for steps that did not come is given
back.

Overlap scheduling: the next step is launched before the tokens of the step on the device are known.
All decoding sequences take one more token each. A sequence that may end with the step on the device
is in the next one too, unless its length says that it will end; if it does end, its entry there is
void. When prompts wait, or sequences may be preempted, the device must be free first.

A request that may have killed a worker shares no step with others: its steps and theirs take turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

from decode_worker.incoming import Arrived
from decode_worker.packing import Packing
from decode_worker.running_set import RunningSet, TierShares
from decode_worker.sequence import Sequence
from engine.core.step import RunStep, SequenceSlice, StepBatch
from engine.core.step_times import StepTimes
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.fetch.prefix_lookup import PrefixLookup
from kvrelay.messages import Generate
from kvrelay.types import PrefixOrigin

NOBODY_APART: Ordered[frozenset[Sequence]] = (frozenset(),)

Taken = Ordered[tuple[Sequence, int]]
"""sequence, its tokens in the step"""


@dataclass(slots=True, kw_only=True)
class MultiStep:
    """No run goes over `rope_border_tokens`, where a sequence is computed anew."""

    running_set: RunningSet
    rope_border_tokens: int | None = None
    has_spare_room: bool = False

    def steps(self, chosen: Taken, most_steps: int, now_s: float) -> int:
        """How often a step that takes `chosen` may run: up to the first end of a sequence."""
        self.has_spare_room = most_steps > 1 and self._is_steady(chosen)
        if not self.has_spare_room:
            return 1
        steps = min(most_steps, *[self._left(sequence) for sequence, _ in chosen])
        while steps > 1 and not self._try_room(chosen, steps, now_s):
            steps //= 2
        return steps

    def _is_steady(self, chosen: Taken) -> bool:
        """No sequence waits or pauses, and all take the next token of one choice."""
        here = len(self.running_set.running) + len(self.running_set.awaiting_prefill)
        return len(chosen) == here and all(sequence.decodes_one for sequence, _ in chosen)

    def _left(self, sequence: Sequence) -> int:
        border = self.rope_border_tokens
        if border is None or border < sequence.computed:
            return sequence.tokens_left
        return min(sequence.tokens_left, max(1, border - sequence.computed))

    def _try_room(self, chosen: Taken, steps: int, now_s: float) -> bool:
        """Where one gets none, the others keep theirs until the step is over."""
        tables = self.running_set.tables
        return all(
            tables.try_grow(sequence.holder, sequence.computed + steps, now_s=now_s)
            for sequence, _ in chosen
        )

    def give_back(self, ran: Iterable[tuple[Sequence, int]]) -> None:
        """The step is over, after however many times."""
        for sequence, _ in ran:
            if not sequence.dropped:
                self.running_set.tables.shrink(sequence.holder, sequence.computed)


def overlapped(running_set: RunningSet, now_s: float) -> dict[Sequence, SequenceSlice]:
    """The step behind the one on the device; empty where the device must be free first."""
    if not _may_overlap(running_set):
        return {}
    places = {sequence: i for i, (sequence, _) in enumerate(running_set.on_device)}
    found: dict[Sequence, SequenceSlice] = {}
    grown = running_set.tables.grown
    for sequence in running_set.running:
        place = places.get(sequence)
        if place is not None and sequence.length + 1 >= sequence.most_tokens:
            continue
        end = sequence.computed + (1 if place is None else 2)
        tables = grown(sequence.holder, end, now_s=now_s)
        if tables is None:
            return {}
        if place is None:
            found[sequence] = sequence.slice(1, tables)
        else:
            found[sequence] = sequence.slice_behind(place, tables)
    return found


def _may_overlap(running_set: RunningSet) -> bool:
    """No sequence waits, or pauses for others, and all take the next token of one choice."""
    if not running_set.on_device or running_set.overlapped or running_set.awaiting_prefill:
        return False
    shares = running_set.shares
    if shares.any_reserved or running_set.choices > shares.slots:
        return False
    if running_set.suspects and running_set.alone:
        return False
    ended = [sequence for sequence, _ in running_set.on_device if sequence.dropped]
    here = running_set.running + ended if ended else running_set.running
    return not [one for one in here if not one.may_overlap or one.length - one.computed > 1]


@dataclass(slots=True, kw_only=True)
class Batch:
    """`chunk_tokens` bounds the prefill tokens in a step. `times` are the worker's own step times,
    as corrected at the moment; None: they are unknown.

    A sequence that outgrows `rope_border_tokens` is computed anew (LongRoPE).
    """

    lookup: PrefixLookup
    chunk_tokens: int
    shares: TierShares
    times: StepTimes | None = None
    rope_border_tokens: int | None = None
    tables: BlockTables = field(init=False)
    running_set: RunningSet = field(init=False)
    _multi_step: MultiStep = field(init=False)
    _was_alone: bool = False  # the last step was that of a request that shares none

    def __post_init__(self) -> None:
        self.tables = self.lookup.tables
        self.running_set = RunningSet(lookup=self.lookup, shares=self.shares)
        self._multi_step = MultiStep(
            running_set=self.running_set, rope_border_tokens=self.rope_border_tokens
        )

    # --- coming ---------------------------------------------------------------------------------

    def try_enqueue(self, asked: Generate, now_s: float) -> bool:
        """To be prefilled here; False and nothing changed when its blocks have run out."""
        spec = asked.spec
        sequence = self.running_set.sequence(spec, self.tables.names_of(spec))
        sequence.hint = asked.prefix_source
        if not self.running_set.try_open(sequence, sequence.length + 1, self.chunk_tokens, now_s):
            return False
        sequence.cached = sequence.computed
        sequence.origin = PrefixOrigin.DEVICE if sequence.cached else PrefixOrigin.COMPUTED
        self.running_set.expect(spec)
        self.running_set.wait(sequence)
        return True

    def join(self, arrived: Arrived, now_s: float) -> None:
        """Its prompt's KV is in the holder's blocks. If it has none, it waits for its KV like a
        preempted sequence."""
        spec = arrived.spec
        whole = self.running_set.sequence(spec, arrived.names)
        self.running_set.expect(spec)
        if whole.holder in self.tables:
            self.advance(whole, spec.context_tokens)
            self._part(whole, arrived.begun, arrived.finished, now_s)
            return
        whole.hint = arrived.hint
        for choice, begun in zip(whole.choices, arrived.begun, strict=True):
            if choice not in arrived.finished:
                self.running_set.wait(whole.part(choice, begun))

    def split(
        self, whole: Sequence, tokens: tuple[int, ...], finished: frozenset[int], now_s: float
    ) -> None:
        """The choices of a prompt that was prefilled here part at their first `tokens`, or go on
        after those of earlier attempts."""
        self.running_set.replaced(whole)
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
            self.running_set.join(sequence)
        if whole.choices[0] in finished:
            self.tables.release(whole.holder)

    # --- steps ----------------------------------------------------------------------------------

    def next_step(self, now_s: float, most_steps: int = 1) -> RunStep | None:
        """With `most_steps` above 1 the step may be one that can run that often."""
        running_set = self.running_set
        assert not running_set.on_device, "a step is on the device"
        if running_set.is_empty:
            return None
        for apart in self._turns() if running_set.suspects else NOBODY_APART:
            step = Packing(
                running_set=running_set,
                now_s=now_s,
                budget=self.chunk_tokens,
                apart=apart,
                times=self.times,
                rope_border_tokens=self.rope_border_tokens,
            )
            step.pack()
            if step.chosen:
                break
        if not step.chosen:
            return None
        running_set.on_device = tuple(step.chosen)
        steps = self._multi_step.steps(step.chosen, most_steps, now_s) if most_steps > 1 else 1
        tables = self.tables
        slices = [
            sequence.slice(take, tables.tables(sequence.holder)) for sequence, take in step.chosen
        ]
        batch = StepBatch(slices=tuple(slices))
        return RunStep(batch=batch, copies=tuple(step.copies), steps=steps)

    def _turns(self) -> Iterator[frozenset[Sequence]]:
        """Who stays out of the next step; and if that one would be empty, of the other."""
        running_set = self.running_set
        alone = running_set.alone
        if not alone:
            yield from NOBODY_APART
            return
        here = (*running_set.running, *running_set.awaiting_prefill)
        for _ in range(2):
            self._was_alone = not self._was_alone
            first = frozenset(one for one in here if one.key != alone[0].key)
            yield first if self._was_alone else frozenset(alone)

    def overlapped_step(self, now_s: float) -> RunStep | None:
        """The step after the one on the device, where it needs none of that one's tokens."""
        if self.rope_border_tokens is not None:
            return None
        found = overlapped(self.running_set, now_s)
        if not found:
            return None
        self.running_set.overlapped = tuple([(sequence, 1) for sequence in found])
        return RunStep(batch=StepBatch(slices=tuple(found.values())))

    def advance(self, sequence: Sequence, tokens: int) -> None:
        """The KV of `tokens` more tokens is in its blocks."""
        layout, before = self.tables.layout, sequence.computed
        sequence.computed = before + tokens
        if before % layout.block_size + tokens >= layout.block_size:
            self.tables.fill(sequence.holder, sequence.filled)
        if layout.has_windows:
            self.tables.trim(sequence.holder, sequence.computed)

    def step_over(self, ran: Taken) -> None:
        """Blocks that it took for steps that did not come are given back."""
        if self._multi_step.has_spare_room:
            self._multi_step.has_spare_room = False
            self._multi_step.give_back(ran)

    def end(self, sequence: Sequence) -> None:
        """It has drawn its last token. All its full blocks get names, also those that came from a
        pool."""
        self.tables.fill(sequence.holder, sequence.filled)
        self.running_set.drop(sequence)
