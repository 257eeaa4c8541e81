"""Decides what a decode worker runs in each step. Pure; one per worker.

Continuous batching: at every step requests join and leave. Sequences arrive by handoff with their
prompt's KV, or are prefilled here in chunks mixed into the batch (role both, and after a
preemption). When blocks run out the newest sequence is preempted and later recomputed, so the
oldest always advances.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import count

from decode_worker.receiver import Failure, Receiver
from decode_worker.sequence import Sequence
from engine.step import (
    Command,
    Emit,
    RunStep,
    Sampled,
    SampleRequest,
    SequenceSlice,
    StepBatch,
    StepDone,
    StepWanted,
    Tick,
)
from kvpool.handoff import (
    Commit,
    FromPeer,
    PeerLost,
    RenewLeases,
    SlabFilled,
    SlabReplaced,
    SlabScattered,
    SlabWanted,
    TransferCancelled,
)
from kvpool.tables import BlockTables, CopyPairs, Holder
from kvrelay.messages import (
    Abort,
    Generate,
    Lifetime,
    Released,
    RequestFailed,
    Reserve,
    Reserved,
    ReserveRefused,
    Stop,
    WorkerEvent,
)
from kvrelay.types import RequestKey, RequestSpec

Event = (
    Reserve
    | Generate
    | Abort
    | Stop
    | StepWanted
    | StepDone
    | FromPeer
    | PeerLost
    | SlabScattered
    | SlabReplaced
    | Tick
)


@dataclass(slots=True, kw_only=True)
class DecodeScheduler:
    """`chunk_tokens` bounds the prefill tokens mixed into a step, `max_running` the sequences.

    A sequence that grows to `rope_border_tokens` is shown to the engine whole (LongRoPE).
    """

    tables: BlockTables
    receiver: Receiver
    chunk_tokens: int
    max_running: int
    rope_border_tokens: int | None = None
    running: list[Sequence] = field(default_factory=list)  # by arrival
    awaiting_prefill: deque[Sequence] = field(default_factory=deque)  # preempted ones first
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    _alive: dict[RequestKey, list[Sequence]] = field(default_factory=dict)
    _on_device: tuple[tuple[Sequence, int], ...] = ()
    _arrivals: count[int] = field(default_factory=count)

    def handle(self, event: Event, now_s: float) -> list[Command]:
        commands = self._handle(event, now_s)
        freed, self.receiver.freed = self.receiver.freed, []
        released = tuple(Released(key=key, at_s=now_s) for key in freed)
        return [*commands, Emit(events=released)] if released else commands

    def _handle(self, event: Event, now_s: float) -> list[Command]:
        match event:
            case StepWanted():
                return self._next_step(now_s)
            case StepDone():
                return self._step_done(event, now_s)
            case Reserve():
                return self._reserve(event, now_s)
            case Generate(spec=spec):
                return self._generate(spec, now_s)
            case Abort(key=key):
                return self._abort(key, now_s)
            case Stop():
                return self._stop(event, now_s)
            case FromPeer():
                return self._from_peer(event, now_s)
            case SlabScattered(key=key):
                commands, failures = self.receiver.scattered(event, now_s)
                failed = self._failed(failures, now_s)
                return [*commands, *failed, *self._join_if_complete(key, now_s)]
            case SlabReplaced():
                return self.receiver.replaced(event, now_s)
            case PeerLost(peer=peer, reason=reason):
                commands, failures = self.receiver.peer_lost(peer, reason)
                return [*commands, *self._failed(failures, now_s)]
            case Tick():
                commands, failures = self.receiver.expire(now_s)
                return [*commands, *self._failed(failures, now_s)]

    # --- arrivals -------------------------------------------------------------------------------

    @property
    def sequences(self) -> int:
        """Running, waiting and on their way."""
        waiting = sum(len(s.choices) for s in self.awaiting_prefill)
        running = sum(len(s.choices) for s in self.running)
        return running + waiting + self.receiver.reserved_choices

    @property
    def waiting_tokens(self) -> int:
        return sum(sequence.needed for sequence in self.awaiting_prefill)

    def _refusal(self, spec: RequestSpec) -> str | None:
        if self.sequences + spec.sampling.n > self.max_running:
            return "slots_exhausted"
        if any(s.holder not in self.tables for s in self.awaiting_prefill):
            return "kv_exhausted"
        return None

    def _reserve(self, message: Reserve, now_s: float) -> list[Command]:
        refusal = self._refusal(message.spec)
        if refusal is None and not self.receiver.try_reserve(message, now_s):
            refusal = "kv_exhausted"
        return [self._answer(message.spec.key, refusal, now_s)]

    def _generate(self, spec: RequestSpec, now_s: float) -> list[Command]:
        refusal = self._refusal(spec)
        holder = Holder("decode", spec.key)
        assert holder not in self.tables, f"{spec.key} is here already"
        fits = refusal is None and self.tables.try_grow(
            holder, len(spec.prompt_ids) + 1, now_s=now_s
        )
        if not fits:
            return [self._answer(spec.key, refusal or "kv_exhausted", now_s)]
        choices = tuple(range(spec.sampling.n))
        sequence = Sequence(spec=spec, choices=choices, holder=holder, arrival=next(self._arrivals))
        self._alive[spec.key] = [sequence]
        self.awaiting_prefill.append(sequence)
        return [self._answer(spec.key, None, now_s)]

    @staticmethod
    def _answer(key: RequestKey, refusal: str | None, now_s: float) -> Emit:
        if refusal is None:
            return Emit(events=(Reserved(key=key, at_s=now_s),))
        return Emit(events=(ReserveRefused(key=key, at_s=now_s, reason=refusal),))

    def _from_peer(self, event: FromPeer, now_s: float) -> list[Command]:
        match event.message:
            case SlabWanted() as wanted:
                return self.receiver.wanted(event.peer, wanted, now_s)
            case SlabFilled() as filled:
                return self.receiver.filled(filled, now_s)
            case Commit() as commit:
                self.receiver.commit(commit, now_s)
                return self._join_if_complete(commit.key, now_s)
            case TransferCancelled(key=key):
                return self.receiver.fenced(key, now_s)
            case RenewLeases(keys=keys):
                self.receiver.renew(keys, now_s)
                return []
            case _:
                return []

    def _join_if_complete(self, key: RequestKey, now_s: float) -> list[Command]:
        arrived = self.receiver.take_complete(key)
        if arrived is None:
            return []
        spec = arrived.message.spec
        whole = Sequence(
            spec=spec,
            choices=tuple(range(spec.sampling.n)),
            holder=Holder("decode", key),
            arrival=next(self._arrivals),
            computed=len(spec.prompt_ids),
        )
        self._alive[key] = []
        self._split(whole, arrived.first_token_ids, arrived.finished, now_s)
        committed = Lifetime(key=key, at_s=now_s, name="handoff_committed")
        return [arrived.answer, Emit(events=(committed, *self._released_if_done(key, now_s)))]

    def _split(
        self, whole: Sequence, tokens: tuple[int, ...], finished: frozenset[int], now_s: float
    ) -> None:
        """Each choice that goes on becomes a running sequence that shares the prompt's blocks."""
        for choice, token in zip(whole.choices, tokens, strict=True):
            if choice in finished:
                continue
            sequence = Sequence(
                spec=whole.spec,
                choices=(choice,),
                holder=Holder("decode", whole.key, choice),
                arrival=whole.arrival,
                emitted=[*whole.emitted, token],
                computed=whole.computed,
                joined=whole.joined,
            )
            if sequence.holder != whole.holder:
                self.tables.fork(whole.holder, sequence.holder, now_s=now_s)
            self._alive[whole.key].append(sequence)
            self._insert(sequence)
        if whole.choices[0] in finished:
            self.tables.release(whole.holder)

    # --- steps ----------------------------------------------------------------------------------

    def _next_step(self, now_s: float) -> list[Command]:
        assert not self._on_device, "a step is on the device"
        decoding = sum(sequence.needed == 1 for sequence in self.running)
        budget = max(self.chunk_tokens - decoding, self.tables.layout.block_size)
        chosen: list[tuple[Sequence, int]] = []
        copies: list[CopyPairs] = []
        preempted_before = self.preemptions
        for sequence in list(self.running):
            take = min(sequence.needed, 1 if sequence.needed == 1 else budget)
            if take and self._make_room(sequence, take, copies, now_s):
                budget -= take if take > 1 else 0
                chosen.append((sequence, take))
        if self.preemptions == preempted_before:
            self._start_waiting(chosen, budget, now_s)
        if not chosen:
            return []
        self._on_device = tuple(chosen)
        batch = StepBatch(slices=tuple(self._slice(s, take) for s, take in chosen))
        return [*self._joined(now_s), RunStep(batch=batch, copies=tuple(copies))]

    def _make_room(
        self, sequence: Sequence, take: int, copies: list[CopyPairs], now_s: float
    ) -> bool:
        """Blocks for `take` more tokens, at the cost of newer sequences; False if it had to go."""
        while not sequence.dropped and sequence in self.running:
            if self._try_room(sequence, take, copies, now_s):
                return True
            self._preempt(self.running[-1])
        return False

    def _try_room(
        self, sequence: Sequence, take: int, copies: list[CopyPairs], now_s: float
    ) -> bool:
        end = sequence.computed + take
        if not self.tables.try_grow(sequence.holder, end, now_s=now_s):
            return False
        if sequence.spec.sampling.n == 1:
            return True
        pairs = self.tables.try_own(sequence.holder, sequence.computed)
        if pairs is None:
            return False
        if any(pairs):
            copies.append(pairs)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Give its blocks back; it comes again, in its order, and is recomputed."""
        self.preemptions += 1
        self.running.remove(sequence)
        self.tables.release(sequence.holder)
        sequence.computed = 0
        self.awaiting_prefill.appendleft(sequence)

    def _start_waiting(self, chosen: list[tuple[Sequence, int]], budget: int, now_s: float) -> None:
        """In order; where the head lacks blocks, those behind it that hold theirs still go on."""
        may_allocate = True
        for sequence in list(self.awaiting_prefill):
            if budget == 0:
                return
            if sequence.holder not in self.tables and not may_allocate:
                continue
            if not self.tables.try_grow(sequence.holder, sequence.length, now_s=now_s):
                may_allocate = False
                continue
            self.awaiting_prefill.remove(sequence)
            self._insert(sequence)
            take = min(sequence.needed, budget)
            budget -= take
            chosen.append((sequence, take))

    def _insert(self, sequence: Sequence) -> None:
        self.running.append(sequence)
        self.running.sort(key=lambda s: s.arrival)

    def _slice(self, sequence: Sequence, take: int) -> SequenceSlice:
        return SequenceSlice(
            key=sequence.key,
            choice=sequence.choices[0],
            token_ids=sequence.next_tokens(take),
            start=sequence.computed,
            tables=self.tables.tables(sequence.holder),
            samples=self._samples(sequence) if take == sequence.needed else (),
            prompt_tokens=sequence.whole_tokens,
        )

    def _samples(self, sequence: Sequence) -> tuple[SampleRequest, ...]:
        return sequence.samples(whole=sequence.computed == self.rope_border_tokens)

    def _joined(self, now_s: float) -> list[Command]:
        fresh = [sequence for sequence, _ in self._on_device if not sequence.joined]
        names = {}
        for sequence in fresh:
            sequence.joined = True
            names[sequence.key] = "decode_joined" if sequence.emitted else "prefill_started"
        events = tuple(Lifetime(key=key, at_s=now_s, name=name) for key, name in names.items())
        return [Emit(events=events)] if events else []

    # --- outcomes -------------------------------------------------------------------------------

    def _step_done(self, done: StepDone, now_s: float) -> list[Command]:
        ran, self._on_device = self._on_device, ()
        events: list[WorkerEvent] = []
        for (sequence, take), sampled in zip(ran, done.outcome.sampled, strict=True):
            if sequence.dropped:
                self.tables.release(sequence.holder)
                events += self._released_if_done(sequence.key, now_s)
                continue
            if take > 1:
                self.prompt_tokens += take
            sequence.computed += take
            if sampled:
                events += self._advance(sequence, sampled, now_s)
        return [Emit(events=tuple(events))] if events else []

    def _advance(
        self, sequence: Sequence, sampled: tuple[Sampled, ...], now_s: float
    ) -> list[WorkerEvent]:
        self.generated_tokens += len(sampled)
        tokens = [
            sequence.tokens_event(choice, one, now_s)
            for choice, one in zip(sequence.choices, sampled, strict=True)
        ]
        finished = frozenset(event.choice for event in tokens if event.finish_reason is not None)
        if len(sequence.choices) > 1:
            self.running.remove(sequence)
            self._alive[sequence.key].remove(sequence)
            ids = tuple(one.token_id for one in sampled)
            self._split(sequence, ids, finished | sequence.stopped, now_s)
        elif finished:
            self._drop(sequence)
        else:
            sequence.emitted.append(sampled[0].token_id)
        return [*tokens, *self._released_if_done(sequence.key, now_s)]

    def _drop(self, sequence: Sequence) -> None:
        """Its blocks come back now, or after the step that it is in."""
        sequence.dropped = True
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.awaiting_prefill.remove(sequence)
        self._alive[sequence.key].remove(sequence)
        if not self._is_on_device(sequence):
            self.tables.release(sequence.holder)

    def _is_on_device(self, sequence: Sequence) -> bool:
        return any(sequence is other for other, _ in self._on_device)

    def _released_if_done(self, key: RequestKey, now_s: float) -> list[WorkerEvent]:
        if key not in self._alive or self._alive[key]:
            return []
        if any(sequence.key == key for sequence, _ in self._on_device):
            return []
        del self._alive[key]
        return [Released(key=key, at_s=now_s)]

    def _stop(self, message: Stop, now_s: float) -> list[Command]:
        self.receiver.stop(message.key, message.choice)
        for sequence in list(self._alive.get(message.key, ())):
            if sequence.choices == (message.choice,):
                self._drop(sequence)
            else:
                sequence.stopped |= {message.choice} & {*sequence.choices}
        events = self._released_if_done(message.key, now_s)
        return [Emit(events=tuple(events))] if events else []

    def _abort(self, key: RequestKey, now_s: float) -> list[Command]:
        if key in self.receiver:
            return self.receiver.cancel(key, "aborted", now_s)
        for sequence in list(self._alive.get(key, ())):
            self._drop(sequence)
        events = self._released_if_done(key, now_s)
        return [Emit(events=tuple(events))] if events else []

    @staticmethod
    def _failed(failures: list[Failure], now_s: float) -> list[Command]:
        events = tuple(
            RequestFailed(key=f.key, at_s=now_s, reason=f.reason, message=f.message)
            for f in failures
        )
        return [Emit(events=events)] if events else []

    def validate(self) -> None:
        """Blocks are held by live sequences, reservations and steps on the device alone."""
        self.tables.validate()
        self.receiver.validate()
        assert all(s in self._alive[s.key] for s in self.running), "a sequence ran away"
        assert all(s in self._alive[s.key] for s in self.awaiting_prefill)
        assert [s.arrival for s in self.running] == sorted(s.arrival for s in self.running)
