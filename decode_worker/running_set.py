"""The sequences of a decode worker: what each does, and which of them go before which. Pure.

    awaiting_prefill -> running -> gone
                   preempted <-'

Each tier has reserved slots. Other tiers may borrow those that it doesn't use. The oldest sequences
of a tier are within its reservation, the others borrow. Borrowers are preempted first; then those
of a lower priority; then the newest.

The blocks of a dropped sequence come back once neither a step nor a fetch of its prefix uses them.
With overlap scheduling two steps are on the device: the second is launched before the tokens of the
first are known.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, count

from decode_worker.sequence import Sequence
from kvpool.core.blocks.holding import Holder
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.fetch.fetches import Restored
from kvpool.core.fetch.prefix_lookup import PrefixLookup
from kvpool.core.layout.block_names import HashChain
from kvrelay.messages import Released, WorkerEvent
from kvrelay.qos import ONE_TIER, QosTiers
from kvrelay.types import RequestKey, RequestSpec


@dataclass(slots=True, kw_only=True)
class TierShares:
    """How the tiers share the `slots` of a worker. Without tiers all sequences are equal."""

    slots: int
    qos: QosTiers = ONE_TIER
    any_reserved: bool = field(init=False)
    _reserved: dict[str, int] = field(init=False)  # tier |-> its reserved slots
    _priority: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        tiers = self.qos.tiers
        self._reserved = {tier.name: tier.own_places(self.slots) for tier in tiers}
        self._priority = {tier.name: tier.priority for tier in tiers}
        self.any_reserved = any(self._reserved.values())

    def tier_of(self, spec: RequestSpec) -> str:
        return spec.qos_tier if spec.qos_tier in self._reserved else self.qos.default

    def priority(self, spec: RequestSpec) -> int:
        """A lower one goes first."""
        return self._priority[self.tier_of(spec)]

    def reserved_slots(self, tier: str) -> int:
        return self._reserved[tier]

    def others_below_share(self, tier: str, held: Mapping[str, int]) -> bool:
        """Whether another tier holds fewer slots than are reserved for it."""
        reserved = self._reserved.items()
        return any(held.get(name, 0) < slots for name, slots in reserved if name != tier)

    def most_protected_first(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Equal ones keep their order."""
        listed = list(sequences)
        if len(self._reserved) == 1:
            return listed
        borrowers, priority = self.borrowers(listed), self._priority
        return sorted(listed, key=lambda s: (s in borrowers, priority[self.tier_of(s.spec)]))

    def borrowers(self, sequences: Iterable[Sequence]) -> set[Sequence]:
        """Those beyond the reservations of their tiers."""
        seen: Counter[str] = Counter()
        borrowers = set()
        for sequence in sorted(sequences, key=_arrival):
            tier = self.tier_of(sequence.spec)
            seen[tier] += len(sequence.choices)
            if seen[tier] > self._reserved[tier]:
                borrowers.add(sequence)
        return borrowers

    def least_protected_first(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """The borrowers: the newest of the lowest priority comes first."""
        newest_first = sorted(self.borrowers(sequences), key=lambda s: -s.arrival)
        return sorted(newest_first, key=lambda s: -self._priority[self.tier_of(s.spec)])


@dataclass(slots=True, kw_only=True)
class RunningSet:
    """`starved`: a waiting sequence found no blocks in the last step."""

    lookup: PrefixLookup
    shares: TierShares
    tables: BlockTables = field(init=False)
    running: list[Sequence] = field(default_factory=list)  # by arrival
    awaiting_prefill: deque[Sequence] = field(default_factory=deque)  # preempted ones first
    on_device: tuple[tuple[Sequence, int], ...] = ()  # sequence, its tokens in the step
    overlapped: tuple[tuple[Sequence, int], ...] = ()  # the same, of the step launched after it
    preemptions: int = 0
    starved: bool = False
    suspects: set[RequestKey] = field(default_factory=set)  # whose first tokens are made alone
    _fetching: set[Holder] = field(default_factory=set)  # dropped while their prefix comes
    _alive: dict[RequestKey, list[Sequence]] = field(default_factory=dict)
    _arrivals: count[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self.tables = self.lookup.tables

    @property
    def choices(self) -> int:
        """The slots that the running and waiting sequences need."""
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
        """The next step is to run what the step on the device runs."""
        here = len(self.running) == len(self.on_device) and not self.awaiting_prefill
        return here and not any(sequence.dropped for sequence, _ in self.on_device)

    @property
    def lacks_blocks(self) -> bool:
        """A waiting sequence found none in the last step."""
        return self.starved and any(s.holder not in self.tables for s in self.awaiting_prefill)

    @property
    def alone(self) -> list[Sequence]:
        """Those that share no step with other requests, by arrival."""
        return [one for one in (*self.running, *self.awaiting_prefill) if one.is_alone]

    def of(self, key: RequestKey) -> tuple[Sequence, ...]:
        return tuple(self._alive.get(key, ()))

    # --- coming ---------------------------------------------------------------------------------

    def sequence(self, spec: RequestSpec, names: HashChain) -> Sequence:
        """The newest; it does not wait or run yet."""
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
        """Room for `tokens` tokens; what is cached of them counts as computed. The rest is sought
        where its hint says, once: what it knows would be old if the sequence comes again."""
        found = self.lookup.try_open(
            sequence.holder,
            tokens,
            hashes=sequence.reusable,
            ahead_tokens=ahead_tokens,
            now_s=now_s,
            hint=sequence.hint,
        )
        if found is None:
            return False
        sequence.computed, sequence.hint = found, None
        return True

    def expect(self, spec: RequestSpec) -> None:
        """Its sequences will wait or run now."""
        self._alive[spec.key] = []
        if spec.alone_tokens:
            self.suspects.add(spec.key)

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

    def preempt_for_blocks(self, sequence: Sequence) -> None:
        self.starved = True
        self.preempt(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """It gives its slot and its blocks back. It comes again, in its order; what it doesn't find
        cached then is recomputed."""
        self.preemptions += 1
        self.tables.release(sequence.holder)
        sequence.computed = 0
        sequence.preempted = True
        if sequence in self.running:
            self.running.remove(sequence)
            self.awaiting_prefill.appendleft(sequence)

    def seated(self) -> list[Sequence]:
        """Those that have a slot, the most protected first."""
        ranked = self.shares.most_protected_first((*self.running, *self.awaiting_prefill))
        slots = self.shares.slots
        if self.choices <= slots:
            return ranked
        taken = accumulate(len(sequence.choices) for sequence in ranked)
        return [sequence for sequence, up_to in zip(ranked, taken, strict=True) if up_to <= slots]

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
        """The step is over. Sequences that were dropped meanwhile give their blocks back, unless
        they are in the next step too."""
        ran, self.on_device, self.overlapped = self.on_device, self.overlapped, ()
        for sequence, _ in ran:
            if sequence.dropped and not self.is_on_device(sequence):
                self.tables.release(sequence.holder)
        return ran

    def is_on_device(self, sequence: Sequence) -> bool:
        return any(sequence is other for other, _ in (*self.on_device, *self.overlapped))

    def replaced(self, whole: Sequence) -> None:
        """Its choices go on as sequences of their own, which take over its blocks."""
        self.running.remove(whole)
        self._alive[whole.key].remove(whole)

    def drop(self, sequence: Sequence) -> None:
        """Its blocks come back now, after the step that it is in, or when its prefix has come."""
        sequence.dropped = True
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.awaiting_prefill.remove(sequence)
        self._alive[sequence.key].remove(sequence)
        if self.lookup.leave(sequence.holder):
            self._fetching.add(sequence.holder)
        elif not self.is_on_device(sequence):
            self.tables.release(sequence.holder)

    def try_forget(self, key: RequestKey) -> bool:
        """True once: when nothing is held for the request any more."""
        if self._alive.get(key) != []:
            return False
        launched = [one.key for one, _ in (*self.on_device, *self.overlapped)]
        if key in launched or key in [holder.key for holder in self._fetching]:
            return False
        del self._alive[key]
        self.suspects.discard(key)
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
        assert all(s.length == s.prompt_tokens + len(s.emitted) for s in here)
        assert all(sequence.holder in self.tables for sequence in self.running)
        assert {s.key for s in here if s.spec.alone_tokens} <= self.suspects <= self._alive.keys()
        assert [s.arrival for s in self.running] == sorted(s.arrival for s in self.running)


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
