"""The sequences of a decode worker, by what they do. Pure.

    awaiting_prefill -> running -> gone
                   preempted <-'

A dropped sequence's blocks come back once neither a step nor a fetch of its prefix uses them. Two
steps are on the device where the second is launched before the first one's tokens are known.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate, count

from decode_worker.sequence import Sequence
from decode_worker.shares import TierShares
from kvpool.core.blocks.holding import Holder
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.fetch.openings import Openings
from kvpool.core.fetch.pool_fetch import Restored
from kvpool.core.layout.block_names import HashChain
from kvrelay.messages import Released, WorkerEvent
from kvrelay.types import RequestKey, RequestSpec


@dataclass(slots=True, kw_only=True)
class RunningSet:
    """`starved`: one that waits found no blocks in the last step."""

    openings: Openings
    shares: TierShares
    running: list[Sequence] = field(default_factory=list)  # by arrival
    awaiting_prefill: deque[Sequence] = field(default_factory=deque)  # preempted ones first
    on_device: tuple[tuple[Sequence, int], ...] = ()  # sequence, its tokens in the step
    behind: tuple[tuple[Sequence, int], ...] = ()  # the same of the step behind that one
    preemptions: int = 0
    starved: bool = False
    _fetching: set[Holder] = field(default_factory=set)  # dropped while their prefix comes
    _alive: dict[RequestKey, list[Sequence]] = field(default_factory=dict)
    _arrivals: count[int] = field(default_factory=count)

    @property
    def tables(self) -> BlockTables:
        return self.openings.tables

    @property
    def choices(self) -> int:
        """Places taken by those running and waiting."""
        running = sum([len(sequence.choices) for sequence in self.running])
        return running + sum([len(sequence.choices) for sequence in self.awaiting_prefill])

    @property
    def waiting_tokens(self) -> int:
        return sum([sequence.needed for sequence in self.awaiting_prefill])

    @property
    def is_empty(self) -> bool:
        return not self.running and not self.awaiting_prefill

    @property
    def is_settled(self) -> bool:
        """What is on the device is still all that there is to run."""
        here = len(self.running) == len(self.on_device) and not self.awaiting_prefill
        return here and not any(sequence.dropped for sequence, _ in self.on_device)

    @property
    def lacks_blocks(self) -> bool:
        """A sequence that waits found none in the last step."""
        return self.starved and any(s.holder not in self.tables for s in self.awaiting_prefill)

    def of(self, key: RequestKey) -> tuple[Sequence, ...]:
        return tuple(self._alive.get(key, ()))

    # --- coming ---------------------------------------------------------------------------------

    def sequence(self, spec: RequestSpec, names: HashChain) -> Sequence:
        """The newest, not here yet."""
        return Sequence(
            spec=spec,
            choices=tuple(range(spec.sampling.n)),
            holder=Holder("decode", spec.key),
            names=names,
            arrival=next(self._arrivals),
            emitted=[*spec.emitted_ids],
            stopped={*spec.finished_choices},
        )

    def try_open(self, sequence: Sequence, tokens: int, ahead_tokens: int, now_s: float) -> bool:
        """Room for `tokens` tokens; what is cached of them counts as computed."""
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

    def expect(self, key: RequestKey) -> None:
        """Its sequences come now."""
        self._alive[key] = []

    def wait(self, sequence: Sequence) -> None:
        self._alive[sequence.key].append(sequence)
        self.awaiting_prefill.append(sequence)

    def join(self, sequence: Sequence) -> None:
        self._alive[sequence.key].append(sequence)
        insort(self.running, sequence, key=_arrival)

    def run(self, sequence: Sequence) -> None:
        """It has waited."""
        self.awaiting_prefill.remove(sequence)
        insort(self.running, sequence, key=_arrival)

    def preempt(self, sequence: Sequence) -> None:
        """Gives its blocks back for others; it comes again, in its order, and what is not found
        then is recomputed."""
        self.starved = True
        self.park(sequence)

    def park(self, sequence: Sequence) -> None:
        """Gives its place and its blocks back, and comes again."""
        self.preemptions += 1
        self.tables.release(sequence.holder)
        sequence.computed = 0
        sequence.parked = True
        if sequence in self.running:
            self.running.remove(sequence)
            self.awaiting_prefill.appendleft(sequence)

    def seated(self) -> list[Sequence]:
        """Those that have a place, who yields last first."""
        ranked = self.shares.order((*self.running, *self.awaiting_prefill))
        places = self.shares.slots
        if self.choices <= places:
            return ranked
        taken = accumulate(len(sequence.choices) for sequence in ranked)
        return [sequence for sequence, up_to in zip(ranked, taken, strict=True) if up_to <= places]

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

    # --- going ----------------------------------------------------------------------------------

    def take_ran(self) -> tuple[tuple[Sequence, int], ...]:
        """The step is over; those dropped meanwhile hold nothing any more, unless they are in the
        step behind, too."""
        ran, self.on_device, self.behind = self.on_device, self.behind, ()
        for sequence, _ in ran:
            if sequence.dropped and not self.is_on_device(sequence):
                self.tables.release(sequence.holder)
        return ran

    def is_on_device(self, sequence: Sequence) -> bool:
        return any(sequence is other for other, _ in (*self.on_device, *self.behind))

    def replaced(self, whole: Sequence) -> None:
        """Its choices go on; what they don't need of its blocks is theirs to release."""
        self.running.remove(whole)
        self._alive[whole.key].remove(whole)

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
        elif not self.is_on_device(sequence):
            self.tables.release(sequence.holder)

    def try_forget(self, key: RequestKey) -> bool:
        """True once, when nothing is held for the request any more."""
        on_device = any(one.key == key for one, _ in (*self.on_device, *self.behind))
        fetching = any(holder.key == key for holder in self._fetching)
        if on_device or fetching or self._alive.get(key) != []:
            return False
        del self._alive[key]
        return True

    def released_if_done(self, key: RequestKey, now_s: float) -> list[WorkerEvent]:
        return [Released(key=key, at_s=now_s)] if self.try_forget(key) else []

    def validate(self) -> None:
        """Every sequence runs, in order of arrival and with blocks, or waits."""
        here = [*self.running, *self.awaiting_prefill]
        alive = [sequence for sequences in self._alive.values() for sequence in sequences]
        assert {*map(id, here)} == {*map(id, alive)}, "a sequence ran away"
        assert len(here) == len(alive), "a sequence is here twice"
        assert not any(sequence.dropped for sequence in here)
        assert all(sequence.holder in self.tables for sequence in self.running)
        assert [s.arrival for s in self.running] == sorted(s.arrival for s in self.running)


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
