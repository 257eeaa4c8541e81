"""What one step of a decode worker runs. Pure; a `Packing` lives for one step.

A step runs the next token of each decoding sequence, and chunks of prompts. When blocks run out,
the least protected sequence is preempted and recomputed later, so the most protected one always
advances. Sequences beyond the worker's slots wait.

Borrowers of slots pause where a step with them would be too slow for sequences within their tiers'
reservations (`Pace`). A paused sequence keeps its blocks and runs in a later step. It has at least
`LEAST_SHARE` of the pace that it would have alone: a step that it needs for that runs it, however
long the step gets.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from itertools import accumulate

from decode_worker.running_set import RunningSet
from decode_worker.sequence import Sequence
from engine.core.step import MOST_SCORED_TOKENS
from engine.core.step_times import NotCovered, StepTimes, StepWork, decode_work, prefill_work
from kvpool.core.blocks.holding import CopyPairs

USED = 0.9
"""A step may take this share of the strictest time per token: a worker does more than steps."""
LEAST_SHARE = 0.05
_FEWEST = 16
"""A chunk of fewer tokens is not worth a step."""


@dataclass(slots=True, kw_only=True)
class Pace:
    """A step should take at most `most_s`; it has `work` to do already."""

    times: StepTimes
    most_s: float
    work: StepWork = field(default_factory=StepWork)

    @staticmethod
    def of(protected: Iterable[Sequence], times: StepTimes | None) -> Pace | None:
        """None where no sequence asks for a pace that can be kept, or step times are unknown."""
        if times is None:
            return None
        strictest_s = strictest_kept_s(((s.spec.tpot_s, s.length) for s in protected), times)
        return None if strictest_s is None else Pace(times=times, most_s=USED * strictest_s)

    def take(self, decoding: Iterable[Sequence]) -> None:
        lengths = [sequence.length for sequence in decoding]
        self.work += decode_work(len(lengths), sum(lengths))

    def take_chunk(self, tokens: int, computed: int) -> None:
        self.work += prefill_work(tokens, computed)

    def is_overdue(self, sequence: Sequence, now_s: float) -> bool:
        """Whether this step must run it, to keep its least share of the pace that it had alone."""
        if sequence.advanced_s is None:
            return False
        alone = decode_work(1, sequence.length)
        if sequence.needed > 1:
            alone = prefill_work(min(sequence.needed, _FEWEST), sequence.computed)
        next_step_s = now_s + self.most_s
        return next_step_s - sequence.advanced_s > self._step_s(alone) / LEAST_SHARE

    def bears(self, borrowers: Ordered[Sequence]) -> int:
        """How many of them may also take their next token, the first ones first."""
        tokens = accumulate(sequence.length for sequence in borrowers)
        for count, kv_tokens in enumerate(tokens, start=1):
            if self._step_s(self.work + decode_work(count, kv_tokens)) > self.most_s:
                return count - 1
        return len(borrowers)

    def bears_chunk(self, sequence: Sequence, tokens: int, now_s: float) -> int:
        """How many of these tokens of it the step may run. 0: too few, and it is not overdue."""
        fewest, computed = min(tokens, _FEWEST), sequence.computed
        while tokens and self._step_s(self.work + prefill_work(tokens, computed)) > self.most_s:
            tokens = max(tokens // 2, _FEWEST) if tokens > _FEWEST else 0
        return fewest if not tokens and self.is_overdue(sequence, now_s) else tokens

    def _step_s(self, work: StepWork) -> float:
        try:
            return self.times.step_s(work)
        except NotCovered:
            return 0.0


def strictest_kept_s(asked: Iterable[tuple[float | None, int]], times: StepTimes) -> float | None:
    """`asked` are times per token, each with the context of its sequence. The shortest of them that
    its sequence could have at least alone: for one that can't be kept, nobody pauses or is refused.
    """
    given = sorted((tpot_s, tokens) for tpot_s, tokens in asked if tpot_s is not None)
    return next((tpot_s for tpot_s, tokens in given if _can_be_kept(tpot_s, tokens, times)), None)


def _can_be_kept(tpot_s: float, tokens: int, times: StepTimes) -> bool:
    try:
        return times.step_s(decode_work(1, tokens)) <= tpot_s
    except NotCovered:
        return True


@dataclass(slots=True, kw_only=True)
class Packing:
    """`budget` is what prefill chunks may still take, in tokens, and `scored` is the same for
    prompts that are scored. `times` None: step times are unknown."""

    running_set: RunningSet
    now_s: float
    budget: int
    scored: int = MOST_SCORED_TOKENS
    apart: frozenset[Sequence] = frozenset()  # they stay out of this step
    times: StepTimes | None = None
    rope_border_tokens: int | None = None
    chosen: list[tuple[Sequence, int]] = field(default_factory=list)
    copies: list[CopyPairs] = field(default_factory=list)
    _running: list[Sequence] = field(default_factory=list)  # the most protected first
    _taken: set[Sequence] = field(default_factory=set)
    _borrowers: set[Sequence] = field(default_factory=set)
    _paused: set[Sequence] = field(default_factory=set)
    _pace: Pace | None = None

    def pack(self) -> None:
        running_set = self.running_set
        if self.rope_border_tokens is not None:
            self._preempt_outgrown()
        self._keep_seated()
        if running_set.shares.any_reserved:
            self._keep_pace()
        preempted_before = running_set.preemptions
        for sequence in self._running:
            if sequence.holder not in running_set.tables:
                break  # preempted just now, as are all behind it
            if sequence not in self._paused and sequence not in self.apart:
                self._choose(sequence)
        has_preempted = running_set.preemptions > preempted_before
        if running_set.awaiting_prefill and not (has_preempted and self.chosen):
            self._start_waiting()
        if running_set.awaiting_prefill or len(self.chosen) < len(running_set.running):
            self._note_pauses()

    def _note_pauses(self) -> None:
        """Of all that decode, or did before they were preempted, and aren't in the step."""
        preempted = (s for s in self.running_set.awaiting_prefill if s.preempted)
        for sequence in (*self.running_set.running, *preempted):
            if sequence not in self._taken:
                sequence.pause(self.now_s)

    def _preempt_outgrown(self) -> None:
        """With the short factors of LongRoPE their KV is of use to others only."""
        for sequence in [s for s in self.running_set.running if self._is_outgrown(s)]:
            self.running_set.preempt(sequence)

    def _is_outgrown(self, sequence: Sequence) -> bool:
        """Its blocks have the names of short sequences."""
        border = self.rope_border_tokens
        return border is not None and border < sequence.length and sequence.names.limit is not None

    def _keep_seated(self) -> None:
        """Sequences beyond the slots are preempted."""
        seated, running = self.running_set.seated(), self.running_set.running
        if not self.running_set.awaiting_prefill and len(seated) == len(running):
            self._running = seated
            return
        here, kept = {*running}, {*seated}
        self._running = [s for s in seated if s in here]
        for sequence in [s for s in reversed(running) if s not in kept]:
            self.running_set.preempt(sequence)

    def _keep_pace(self) -> None:
        """Borrowers that can't take their next token in time pause."""
        running_set = self.running_set
        here = (*running_set.running, *running_set.awaiting_prefill)
        borrowers = self._borrowers = running_set.shares.borrowers(here)
        protected = [s for s in self._running if s not in borrowers]
        self._pace = Pace.of(protected, self.times)
        if self._pace is None:
            return
        for sequence in borrowers:
            sequence.advanced_s = self.now_s if sequence.advanced_s is None else sequence.advanced_s
        decoding = [s for s in self._running if s.needed == 1]
        self._pace.take(s for s in decoding if s not in borrowers)
        self._paused = {*self._who_pauses([s for s in decoding if s in borrowers], self._pace)}

    def _who_pauses(self, borrowers: list[Sequence], pace: Pace) -> list[Sequence]:
        """The last of them, as many as the pace can't bear; but none for so long that it stands
        still."""
        overdue: set[Sequence] = set()
        if pace.bears(borrowers) < len(borrowers):
            overdue = {s for s in borrowers if pace.is_overdue(s, self.now_s)}
            pace.take(overdue)
        others = [s for s in borrowers if s not in overdue]
        count = pace.bears(others)
        pace.take(others[:count])
        return others[count:]

    # --- those that run -------------------------------------------------------------------------

    def _choose(self, sequence: Sequence) -> None:
        prefills = sequence.needed > 1
        take = self._chunk(sequence) if prefills else 1
        if take and (self._try_room(sequence, take) or self._make_room(sequence, take)):
            if prefills:
                self._take_chunk(sequence, take)
            self._take(sequence, take)

    def _take(self, sequence: Sequence, tokens: int) -> None:
        self.chosen.append((sequence, tokens))
        self._taken.add(sequence)
        sequence.advanced_s = self.now_s
        if sequence.paused_since_s is not None and tokens == sequence.needed:
            sequence.resume(self.now_s)

    def _chunk(self, sequence: Sequence) -> int:
        """Tokens of it that the step may run."""
        take = min(sequence.needed, self.budget)
        if sequence.is_scored:
            take = min(take, self.scored)
        if self._pace is None or sequence not in self._borrowers:
            return take
        return self._pace.bears_chunk(sequence, take, self.now_s)

    def _take_chunk(self, sequence: Sequence, take: int) -> None:
        self.budget -= take
        if sequence.is_scored:
            self.scored -= take
        if self._pace is not None:
            self._pace.take_chunk(take, sequence.computed)

    def _make_room(self, sequence: Sequence, take: int) -> bool:
        """Blocks for `take` more tokens, from the least protected sequences. False if that is
        itself."""
        while True:
            least = next(filter(self._is_preemptible, reversed(self._most_protected_first())))
            self.running_set.preempt_for_blocks(least)
            if least is sequence:
                return False
            if self._try_room(sequence, take):
                return True

    def _most_protected_first(self) -> list[Sequence]:
        """Also those that wait with blocks of their own."""
        here = (*self.running_set.running, *self.running_set.awaiting_prefill)
        return self.running_set.shares.most_protected_first(here)

    def _is_preemptible(self, sequence: Sequence) -> bool:
        if sequence.holder not in self.running_set.tables or sequence in self._taken:
            return False
        return not self.running_set.lookup.is_fetching(sequence.holder)

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

    def _start_waiting(self) -> None:
        """In order. Where one lacks blocks, those behind it that hold theirs still go on."""
        running, starved = {*self.running_set.running}, False
        waiting = [s for s in self.running_set.seated() if s not in running and s not in self.apart]
        for sequence in waiting:
            if self.budget == 0:
                return
            if starved and sequence.holder not in self.running_set.tables:
                continue
            found = self._try_resume(sequence)
            starved |= not found
            self.running_set.starved = starved
            if found and not self.running_set.lookup.is_fetching(sequence.holder):
                self._start(sequence)

    def _start(self, sequence: Sequence) -> None:
        take = self._chunk(sequence)
        if take:
            self.running_set.run(sequence)
            self._take_chunk(sequence, take)
            self._take(sequence, take)

    def _try_resume(self, sequence: Sequence) -> bool:
        """Blocks for all of it. A preempted sequence finds again what is still cached."""
        tables = self.running_set.tables
        if sequence.holder not in tables:
            if self._is_outgrown(sequence):
                sequence.names = tables.chain(sequence.spec.tenant, sequence.length)
            return self.running_set.try_open(sequence, sequence.length, self.budget, self.now_s)
        end = min(sequence.length, sequence.computed + self.budget)
        return tables.try_grow(
            sequence.holder, sequence.length, window_tokens=end, now_s=self.now_s
        )
