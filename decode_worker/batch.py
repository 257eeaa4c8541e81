"""The sequences of a decode worker, and what of them runs in each step. Pure.

    enqueue -> awaiting_prefill -> running -> drop
    join    --------------------->/
                   preempted <---'

Every step takes the next token of each decoding sequence, and chunks of those to be computed yet.
When blocks run out the newest sequence is preempted and later recomputed, so the oldest always
advances.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from itertools import count

from decode_worker.reservation import Arrived
from decode_worker.sequence import Sequence
from engine.step import RunStep, SampleRequest, SequenceSlice, StepBatch
from kvpool.block_names import HashChain
from kvpool.copies import CopyPairs
from kvpool.openings import Openings
from kvpool.restores import Restored
from kvpool.tables import BlockTables, Holder
from kvrelay.types import PrefixOrigin, RequestKey, RequestSpec


@dataclass(slots=True, kw_only=True)
class _Pass:
    """One step being put together. `budget` is what prefill chunks may still take, in tokens."""

    now_s: float
    budget: int
    chosen: list[tuple[Sequence, int]] = field(default_factory=list)
    copies: list[CopyPairs] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Batch:
    """`chunk_tokens` bounds the prefill tokens mixed into a step.

    A sequence that grows to `rope_border_tokens` is shown to the engine whole (LongRoPE).
    """

    openings: Openings
    chunk_tokens: int
    rope_border_tokens: int | None = None
    running: list[Sequence] = field(default_factory=list)  # by arrival
    awaiting_prefill: deque[Sequence] = field(default_factory=deque)  # preempted ones first
    on_device: tuple[tuple[Sequence, int], ...] = ()  # sequence, its tokens in the step
    preemptions: int = 0
    _fetching: set[Holder] = field(default_factory=set)  # dropped while their prefix comes
    _starved: bool = False
    _alive: dict[RequestKey, list[Sequence]] = field(default_factory=dict)
    _arrivals: count[int] = field(default_factory=count)

    @property
    def tables(self) -> BlockTables:
        return self.openings.tables

    @property
    def choices(self) -> int:
        """Places taken by those running and waiting."""
        return sum(len(s.choices) for s in (*self.running, *self.awaiting_prefill))

    @property
    def waiting_tokens(self) -> int:
        return sum(sequence.needed for sequence in self.awaiting_prefill)

    @property
    def lacks_blocks(self) -> bool:
        """A sequence that waits found none in the last step."""
        return self._starved and any(s.holder not in self.tables for s in self.awaiting_prefill)

    # --- coming ---------------------------------------------------------------------------------

    def try_enqueue(self, spec: RequestSpec, now_s: float) -> bool:
        """To be prefilled here; False and nothing changed when its blocks have run out."""
        sequence = self._sequence(spec, self.tables.chain(spec.tenant, len(spec.prompt_ids)))
        if not self._try_open(sequence, len(spec.prompt_ids) + 1, self.chunk_tokens, now_s):
            return False
        sequence.cached = sequence.computed
        sequence.origin = PrefixOrigin.DEVICE if sequence.cached else PrefixOrigin.COMPUTED
        self._alive[spec.key] = [sequence]
        self.awaiting_prefill.append(sequence)
        return True

    def join(self, arrived: Arrived, now_s: float) -> None:
        """Its prompt's KV is in the holder's blocks; if it has none, it is got as after a
        preemption."""
        spec = arrived.message.spec
        whole = self._sequence(spec, arrived.names)
        self._alive[spec.key] = []
        if whole.holder in self.tables:
            self.advance(whole, len(spec.prompt_ids))
            self._part(whole, arrived.first_token_ids, arrived.finished, now_s)
            return
        for choice, token in zip(whole.choices, arrived.first_token_ids, strict=True):
            if choice not in arrived.finished:
                sequence = whole.part(choice, token)
                self._alive[spec.key].append(sequence)
                self.awaiting_prefill.append(sequence)

    def split(
        self, whole: Sequence, tokens: tuple[int, ...], finished: frozenset[int], now_s: float
    ) -> None:
        """The choices of a prompt that was prefilled here part at their first `tokens`."""
        self.running.remove(whole)
        self._alive[whole.key].remove(whole)
        self._part(whole, tokens, finished, now_s)

    def _sequence(self, spec: RequestSpec, names: HashChain) -> Sequence:
        return Sequence(
            spec=spec,
            choices=tuple(range(spec.sampling.n)),
            holder=Holder("decode", spec.key),
            names=names,
            arrival=next(self._arrivals),
        )

    def _part(
        self, whole: Sequence, tokens: tuple[int, ...], finished: frozenset[int], now_s: float
    ) -> None:
        """Each choice that goes on becomes a running sequence that shares the prompt's blocks."""
        for choice, token in zip(whole.choices, tokens, strict=True):
            if choice in finished:
                continue
            sequence = whole.part(choice, token)
            if sequence.holder != whole.holder:
                self.tables.fork(whole.holder, sequence.holder, now_s=now_s)
            self._alive[whole.key].append(sequence)
            self._run(sequence)
        if whole.choices[0] in finished:
            self.tables.release(whole.holder)

    def _run(self, sequence: Sequence) -> None:
        insort(self.running, sequence, key=lambda s: s.arrival)

    # --- steps ----------------------------------------------------------------------------------

    def next_step(self, now_s: float) -> RunStep | None:
        assert not self.on_device, "a step is on the device"
        step = _Pass(now_s=now_s, budget=self._chunk_budget())
        preempted_before = self.preemptions
        for sequence in list(self.running):
            if sequence.holder not in self.tables:
                break  # preempted just now, as are all newer ones
            self._choose(sequence, step)
        if self.preemptions == preempted_before or not step.chosen:
            self._start_waiting(step)
        if not step.chosen:
            return None
        self.on_device = tuple(step.chosen)
        slices = tuple(self._slice(sequence, take) for sequence, take in step.chosen)
        return RunStep(batch=StepBatch(slices=slices), copies=tuple(step.copies))

    def _chunk_budget(self) -> int:
        decoding = sum(sequence.needed == 1 for sequence in self.running)
        return max(self.chunk_tokens - decoding, self.tables.layout.block_size)

    def _choose(self, sequence: Sequence, step: _Pass) -> None:
        prefills = sequence.needed > 1
        take = min(sequence.needed, step.budget) if prefills else 1
        if take and self._make_room(sequence, take, step):
            step.budget -= take if prefills else 0
            step.chosen.append((sequence, take))

    def _make_room(self, sequence: Sequence, take: int, step: _Pass) -> bool:
        """Blocks for `take` more tokens, at the cost of newer sequences; False if it had to go."""
        while not self._try_room(sequence, take, step):
            if self._preempt_newest() is sequence:
                return False
        return True

    def _try_room(self, sequence: Sequence, take: int, step: _Pass) -> bool:
        end = sequence.computed + take
        if not self.tables.try_grow(sequence.holder, end, now_s=step.now_s):
            return False
        if sequence.spec.sampling.n == 1:
            return True
        pairs = self.tables.try_own(sequence.holder, sequence.computed)
        if pairs is None:
            return False
        if any(pairs):
            step.copies.append(pairs)
        return True

    def _preempt_newest(self) -> Sequence:
        """Gives its blocks back; it comes again, in its order, and is recomputed."""
        sequence = self.running.pop()
        self.preemptions += 1
        self._starved = True
        self.tables.release(sequence.holder)
        sequence.computed = 0
        self.awaiting_prefill.appendleft(sequence)
        return sequence

    def _start_waiting(self, step: _Pass) -> None:
        """In order; where the head lacks blocks, those behind it that hold theirs still go on."""
        may_allocate = True
        for sequence in list(self.awaiting_prefill):
            if step.budget == 0:
                return
            if sequence.holder not in self.tables and not may_allocate:
                continue
            self._starved = not self._try_resume(sequence, step)
            if self._starved:
                may_allocate = False
                continue
            if self.openings.waits(sequence.holder):
                continue
            self.awaiting_prefill.remove(sequence)
            self._run(sequence)
            take = min(sequence.needed, step.budget)
            step.budget -= take
            step.chosen.append((sequence, take))

    def _try_resume(self, sequence: Sequence, step: _Pass) -> bool:
        """Blocks for all of it; one that was preempted finds again what is still cached."""
        if sequence.holder not in self.tables:
            return self._try_open(sequence, sequence.length, step.budget, step.now_s)
        end = min(sequence.length, sequence.computed + step.budget)
        return self.tables.try_grow(
            sequence.holder, sequence.length, window_tokens=end, now_s=step.now_s
        )

    def _try_open(self, sequence: Sequence, tokens: int, ahead_tokens: int, now_s: float) -> bool:
        found = self.openings.try_open(
            sequence.holder,
            tokens,
            hashes=sequence.reusable,
            ahead_tokens=ahead_tokens,
            now_s=now_s,
        )
        if found is None:
            return False
        sequence.computed = found
        return True

    def _slice(self, sequence: Sequence, take: int) -> SequenceSlice:
        return SequenceSlice(
            key=sequence.key,
            choice=sequence.choices[0],
            token_ids=sequence[sequence.computed : sequence.computed + take],
            start=sequence.computed,
            tables=self.tables.tables(sequence.holder),
            samples=self._samples(sequence) if take == sequence.needed else (),
            prompt_tokens=sequence.whole_tokens,
        )

    def _samples(self, sequence: Sequence) -> tuple[SampleRequest, ...]:
        return sequence.samples(whole=sequence.computed == self.rope_border_tokens)

    # --- going ----------------------------------------------------------------------------------

    def take_ran(self) -> tuple[tuple[Sequence, int], ...]:
        """The step is over; those dropped meanwhile hold nothing any more."""
        ran, self.on_device = self.on_device, ()
        for sequence, _ in ran:
            if sequence.dropped:
                self.tables.release(sequence.holder)
        return ran

    def advance(self, sequence: Sequence, tokens: int) -> None:
        """The KV of `tokens` more tokens is in its blocks."""
        size = self.tables.layout.block_size
        full_before = sequence.computed // size
        sequence.computed += tokens
        if sequence.computed // size > full_before:
            self.tables.fill(sequence.holder, sequence.filled, names=sequence.names)
        self.tables.trim(sequence.holder, sequence.computed)

    def restored(self, event: Restored) -> None:
        """A prefix has come from the pool, or what there was of it."""
        if event.holder in self._fetching:
            self._fetching.remove(event.holder)
            self.tables.release(event.holder)
            return
        (sequence,) = [s for s in self.awaiting_prefill if s.holder == event.holder]
        sequence.computed = event.tokens
        if not sequence.joined:
            sequence.cached, sequence.origin = event.tokens, event.origin
        self.tables.trim(sequence.holder, sequence.computed)

    def drop(self, sequence: Sequence) -> None:
        """Its blocks come back now, or after the step that it is in, or with its prefix."""
        sequence.dropped = True
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.awaiting_prefill.remove(sequence)
        self._alive[sequence.key].remove(sequence)
        if self.openings.drop(sequence.holder):
            self._fetching.add(sequence.holder)
        elif not any(sequence is other for other, _ in self.on_device):
            self.tables.release(sequence.holder)

    def of(self, key: RequestKey) -> tuple[Sequence, ...]:
        return tuple(self._alive.get(key, ()))

    def try_forget(self, key: RequestKey) -> bool:
        """True once, when nothing is held for the request any more."""
        on_device = any(sequence.key == key for sequence, _ in self.on_device)
        fetching = any(holder.key == key for holder in self._fetching)
        if on_device or fetching or self._alive.get(key) != []:
            return False
        del self._alive[key]
        return True

    def validate(self) -> None:
        """Every sequence runs, in order of arrival and with blocks, or waits."""
        here = [*self.running, *self.awaiting_prefill]
        alive = [sequence for sequences in self._alive.values() for sequence in sequences]
        assert {*map(id, here)} == {*map(id, alive)}, "a sequence ran away"
        assert len(here) == len(alive), "a sequence is here twice"
        assert not any(sequence.dropped for sequence in here)
        assert all(sequence.holder in self.tables for sequence in self.running)
        assert [s.arrival for s in self.running] == sorted(s.arrival for s in self.running)
