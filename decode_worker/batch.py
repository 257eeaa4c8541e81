"""Continuous batching: how sequences join, what of them runs in each step, how they part. Pure.

try_enqueue -> awaiting_prefill -> running -> drop
join    --------------------------/

One step being put together: which sequences run, and how many tokens of each. Pure.

The next token of each decoding sequence, and chunks of those to be computed yet. When blocks run
out the last in standing, among equals the newest, is preempted and later recomputed, so the first
always advances. Those on places that their owners ask back wait, and those on lent places step
back for the pace of those on their own.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

from decode_worker.incoming import Arrived
from decode_worker.run_ahead import RunAhead, followers
from decode_worker.running_set import RunningSet
from decode_worker.sequence import Sequence
from decode_worker.shares import Pace, TierShares
from engine.core.step import MOST_SCORED_TOKENS, RunStep, SequenceSlice, StepBatch
from engine.core.step_times import StepTimes
from kvpool.core.blocks.holding import CopyPairs
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.fetch.openings import Openings
from kvrelay.types import PrefixOrigin, RequestSpec


@dataclass(slots=True, kw_only=True)
class Packing:
    """`budget` is what prefill chunks may still take, in tokens, and `scored` those of prompts that
    are scored; `times` None: nothing is known of steps."""

    running_set: RunningSet
    now_s: float
    budget: int
    scored: int = MOST_SCORED_TOKENS
    times: StepTimes | None = None
    rope_border_tokens: int | None = None
    chosen: list[tuple[Sequence, int]] = field(default_factory=list)
    copies: list[CopyPairs] = field(default_factory=list)
    _running: list[Sequence] = field(default_factory=list)  # who yields last first
    _taken: set[Sequence] = field(default_factory=set)
    _lent: set[Sequence] = field(default_factory=set)
    _stepped_back: set[Sequence] = field(default_factory=set)
    _pace: Pace | None = None

    def pack(self) -> None:
        self._park_outgrown()
        self._keep_seated()
        self._keep_pace()
        preempted_before = self.running_set.preemptions
        for sequence in self._running:
            if sequence.holder not in self.running_set.tables:
                break  # preempted just now, as are all behind it
            self._choose(sequence)
        if self.running_set.preemptions == preempted_before or not self.chosen:
            self._start_waiting(self._seated_waiting())
        self._note_who_stands_back()

    def _note_who_stands_back(self) -> None:
        """Who decodes, or did before it was parked, and isn't in the step."""
        running_set = self.running_set
        if len(self.chosen) == len(running_set.running) and not running_set.awaiting_prefill:
            return
        parked = (s for s in running_set.awaiting_prefill if s.parked)
        for sequence in (*running_set.running, *parked):
            if sequence not in self._taken:
                sequence.stands_back(self.now_s)

    def _park_outgrown(self) -> None:
        """With the short factors of LongRoPE their KV is of no use any more, but to others."""
        for sequence in [s for s in self.running_set.running if self._is_outgrown(s)]:
            self.running_set.park(sequence)

    def _is_outgrown(self, sequence: Sequence) -> bool:
        """Its names are those of short sequences."""
        border = self.rope_border_tokens
        return border is not None and border < sequence.length and sequence.names.limit is not None

    def _keep_seated(self) -> None:
        """Those whose places are asked back wait again."""
        seated = self.running_set.seated()
        if self._all_run(seated):
            self._running = seated
            return
        running, kept = {*self.running_set.running}, {*seated}
        self._running = [s for s in seated if s in running]
        for sequence in [s for s in reversed(self.running_set.running) if s not in kept]:
            self.running_set.park(sequence)

    def _keep_pace(self) -> None:
        """Those on lent places that can't take their next token in time step back."""
        running_set = self.running_set
        if not running_set.shares.any_own:
            return
        self._lent = running_set.shares.lent((*running_set.running, *running_set.awaiting_prefill))
        own = [s for s in self._running if s not in self._lent]
        self._pace = Pace.of(own, self.times)
        if self._pace is None:
            return
        for sequence in self._lent:
            sequence.advanced_s = self.now_s if sequence.advanced_s is None else sequence.advanced_s
        decoding = [s for s in self._running if s.needed == 1]
        self._pace.take(s for s in decoding if s not in self._lent)
        self._stepped_back = {*self._who_steps_back([s for s in decoding if s in self._lent])}

    def _who_steps_back(self, lent: list[Sequence]) -> list[Sequence]:
        """The last of those on lent places, as many as the pace can't bear; but none for so long
        that it stands still."""
        pace = self._pace
        assert pace is not None
        overdue: set[Sequence] = set()
        if pace.bears(lent) < len(lent):
            overdue = {s for s in lent if pace.overdue(s, self.now_s)}
            pace.take(overdue)
        others = [s for s in lent if s not in overdue]
        count = pace.bears(others)
        pace.take(others[:count])
        return others[count:]

    def _all_run(self, seated: Ordered[Sequence]) -> bool:
        return not self.running_set.awaiting_prefill and len(seated) == len(
            self.running_set.running
        )

    def _seated_waiting(self) -> list[Sequence]:
        if not self.running_set.awaiting_prefill:
            return []
        running = {*self.running_set.running}
        return [s for s in self.running_set.seated() if s not in running]

    # --- those that run -------------------------------------------------------------------------

    def _choose(self, sequence: Sequence) -> None:
        if sequence in self._stepped_back:
            return
        prefills = sequence.needed > 1
        take = self._chunk(sequence) if prefills else 1
        if take and self._make_room(sequence, take):
            if prefills:
                self._take_chunk(sequence, take)
            self._take(sequence, take)

    def _take(self, sequence: Sequence, tokens: int) -> None:
        self.chosen.append((sequence, tokens))
        self._taken.add(sequence)
        sequence.advanced_s = self.now_s
        if sequence.back_since_s is not None and tokens == sequence.needed:
            sequence.goes_on(self.now_s)

    def _chunk(self, sequence: Sequence) -> int:
        """Tokens of it that the step may take."""
        take = min(sequence.needed, self.budget)
        if sequence.is_scored:
            take = min(take, self.scored)
        if self._pace is None or sequence not in self._lent:
            return take
        return self._pace.bears_chunk(sequence, take, self.now_s)

    def _take_chunk(self, sequence: Sequence, take: int) -> None:
        self.budget -= take
        if sequence.is_scored:
            self.scored -= take
        if self._pace is not None:
            self._pace.chunk(take, sequence.computed)

    def _make_room(self, sequence: Sequence, take: int) -> bool:
        """Blocks for `take` more tokens, at the cost of those behind it; False if it had to go."""
        while not self._try_room(sequence, take):
            last = next(filter(self._may_go, reversed(self._by_standing())))
            self.running_set.preempt(last)
            if last is sequence:
                return False
        return True

    def _by_standing(self) -> list[Sequence]:
        """Also those that wait with blocks of their own, held back for the pace of others."""
        running_set = self.running_set
        return running_set.shares.order((*running_set.running, *running_set.awaiting_prefill))

    def _may_go(self, sequence: Sequence) -> bool:
        if sequence.holder not in self.running_set.tables or sequence in self._taken:
            return False
        return not self.running_set.openings.waits(sequence.holder)

    def _try_room(self, sequence: Sequence, take: int) -> bool:
        tables, end = self.running_set.tables, sequence.computed + take
        if not tables.try_grow(sequence.holder, end, now_s=self.now_s):
            return False
        if sequence.spec.sampling.n == 1:
            return True
        pairs = tables.try_own(sequence.holder, sequence.computed)
        if pairs is None:
            return False
        if any(pairs):
            self.copies.append(pairs)
        return True

    # --- those that wait ------------------------------------------------------------------------

    def _start_waiting(self, waiting: Ordered[Sequence]) -> None:
        """In order; where the head lacks blocks, those behind it that hold theirs still go on."""
        starved = False
        for sequence in waiting:
            if self.budget == 0:
                return
            if starved and sequence.holder not in self.running_set.tables:
                continue
            found = self._try_resume(sequence)
            starved |= not found
            self.running_set.starved = starved
            if found and not self.running_set.openings.waits(sequence.holder):
                self._start(sequence)

    def _start(self, sequence: Sequence) -> None:
        take = self._chunk(sequence)
        if take:
            self.running_set.run(sequence)
            self._take_chunk(sequence, take)
            self._take(sequence, take)

    def _try_resume(self, sequence: Sequence) -> bool:
        """Blocks for all of it; one that was preempted finds again what is still cached."""
        tables = self.running_set.tables
        if sequence.holder not in tables:
            if self._is_outgrown(sequence):
                sequence.names = tables.chain(sequence.spec.tenant, sequence.length)
            return self.running_set.try_open(sequence, sequence.length, self.budget, self.now_s)
        end = min(sequence.length, sequence.computed + self.budget)
        return tables.try_grow(
            sequence.holder, sequence.length, window_tokens=end, now_s=self.now_s
        )


@dataclass(slots=True, kw_only=True)
class Batch:
    """`chunk_tokens` bounds the prefill tokens mixed into a step; `times` are the
    worker's own, as corrected at the moment; None: nothing is known.

    A sequence that outgrows `rope_border_tokens` is computed anew (LongRoPE).
    """

    openings: Openings
    chunk_tokens: int
    shares: TierShares
    times: StepTimes | None = None
    rope_border_tokens: int | None = None
    running_set: RunningSet = field(init=False)
    ahead: RunAhead = field(init=False)

    def __post_init__(self) -> None:
        self.running_set = RunningSet(openings=self.openings, shares=self.shares)
        self.ahead = RunAhead(
            running_set=self.running_set, rope_border_tokens=self.rope_border_tokens
        )

    @property
    def tables(self) -> BlockTables:
        return self.openings.tables

    # --- coming ---------------------------------------------------------------------------------

    def try_enqueue(self, spec: RequestSpec, now_s: float) -> bool:
        """To be prefilled here; False and nothing changed when its blocks have run out."""
        sequence = self.running_set.sequence(spec, self.tables.names_of(spec))
        if not self.running_set.try_open(sequence, sequence.length + 1, self.chunk_tokens, now_s):
            return False
        sequence.cached = sequence.computed
        sequence.origin = PrefixOrigin.DEVICE if sequence.cached else PrefixOrigin.COMPUTED
        self.running_set.expect(spec.key)
        self.running_set.wait(sequence)
        return True

    def join(self, arrived: Arrived, now_s: float) -> None:
        """Its prompt's KV is in the holder's blocks; if it has none, it is got as after a
        preemption."""
        spec = arrived.spec
        whole = self.running_set.sequence(spec, arrived.names)
        ids = [
            spec.resumed_by(choice) or arrived.resumed_ids or (token,)
            for choice, token in enumerate(arrived.first_token_ids)
        ]
        self.running_set.expect(spec.key)
        if whole.holder in self.tables:
            self.advance(whole, spec.context_tokens)
            self._part(whole, ids, arrived.finished, now_s)
            return
        for choice, begun in zip(whole.choices, ids, strict=True):
            if choice not in arrived.finished:
                self.running_set.wait(whole.part(choice, begun))

    def split(
        self, whole: Sequence, tokens: tuple[int, ...], finished: frozenset[int], now_s: float
    ) -> None:
        """The choices of a prompt that was prefilled here part at their first `tokens`, or go on
        behind those of earlier attempts."""
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
        """With `most_steps` above 1 the step may be one that can be run so often."""
        assert not self.running_set.on_device, "a step is on the device"
        if self.running_set.is_empty:
            return None
        step = Packing(
            running_set=self.running_set,
            now_s=now_s,
            budget=self.chunk_tokens,
            times=self.times,
            rope_border_tokens=self.rope_border_tokens,
        )
        step.pack()
        if not step.chosen:
            return None
        self.running_set.on_device = tuple(step.chosen)
        steps = self.ahead.steps(step.chosen, most_steps, now_s)
        slices = tuple(self._slice(sequence, take) for sequence, take in step.chosen)
        return RunStep(batch=StepBatch(slices=slices), copies=tuple(step.copies), steps=steps)

    def step_behind(self, now_s: float) -> RunStep | None:
        """The step after the one on the device, where it needs none of that one's tokens."""
        if self.rope_border_tokens is not None:
            return None
        found = followers(self.running_set, now_s)
        if not found:
            return None
        self.running_set.behind = tuple((one.sequence, 1) for one in found)
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
        self.running_set.drop(sequence)
