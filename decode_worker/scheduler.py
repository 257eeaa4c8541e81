"""Decides what a decode worker does next. Pure; one per worker.

Continuous batching: at every step requests join and leave. They arrive by handoff with their
prompt's KV, or are prefilled here (role both).
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field

from decode_worker.batch import Batch
from decode_worker.canary import Canary, Checked
from decode_worker.receiver import Receiver
from decode_worker.reservation import Failure
from decode_worker.sequence import Sequence
from engine.step import Command, Emit, Sampled, StepDone, StepOutcome, StepWanted, Tick
from kvpool.handoff import (
    Commit,
    PeerHello,
    PieceAhead,
    PieceComputed,
    RenewLeases,
    SlabFilled,
    TransferCancelled,
)
from kvpool.handoff_events import (
    FromPeer,
    LinkMeasured,
    PeerLost,
    PieceFetched,
    SlabReplaced,
    SlabScattered,
)
from kvpool.restores import Restored
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
    | LinkMeasured
    | PieceFetched
    | SlabScattered
    | SlabReplaced
    | Restored
    | Tick
)


@dataclass(slots=True, kw_only=True)
class DecodeScheduler:
    """`max_running` bounds the sequences; `canary_bound` is that of `Canary`."""

    receiver: Receiver
    batch: Batch
    max_running: int
    canary_bound: InitVar[float | None] = None
    canary: Canary = field(init=False)
    prompt_tokens: int = 0
    generated_tokens: int = 0

    def __post_init__(self, canary_bound: float | None) -> None:
        self.canary = Canary(tables=self.receiver.tables, bound=canary_bound)

    def handle(self, event: Event, now_s: float) -> list[Command]:
        commands = self._handle(event, now_s)
        if self.receiver.awaits_blocks and not self.batch.lacks_blocks:
            commands += self._take_blocks(now_s)
        freed, self.receiver.freed = self.receiver.freed, []
        released = tuple(Released(key=key, at_s=now_s) for key in freed)
        return [*commands, Emit(events=released)] if released else commands

    def _handle(self, event: Event, now_s: float) -> list[Command]:
        match event:
            case StepWanted():
                return self._next_step(now_s)
            case Restored(holder=holder):
                self.batch.restored(event)
                ended = self._released_if_done(holder.key, now_s)
                return [Emit(events=tuple(ended))] if ended else []
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
            case PieceFetched(key=key):
                commands, failures = self.receiver.fetched(event, now_s)
                failed = self._failed(failures, now_s)
                return [*commands, *failed, *self._join_if_complete(key, now_s)]
            case LinkMeasured(peer=peer, cost=cost):
                self.receiver.pools.measured(peer, cost)
                return []
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
        return self.batch.choices + self.canary.choices + self.receiver.reserved_choices

    def _refusal(self, spec: RequestSpec) -> str | None:
        if self.sequences + spec.sampling.n > self.max_running:
            return "slots_exhausted"
        return "kv_exhausted" if self.batch.lacks_blocks else None

    def _reserve(self, message: Reserve, now_s: float) -> list[Command]:
        refusal = self._refusal(message.spec)
        if refusal is not None:
            return [self._refused(message.spec.key, refusal, now_s)]
        reservation = self.receiver.try_reserve(message, now_s)
        if reservation is None:
            return [self._refused(message.spec.key, "kv_exhausted", now_s)]
        return [self._taken(message.spec.key, now_s, reservation.held_tokens)]

    def _generate(self, spec: RequestSpec, now_s: float) -> list[Command]:
        refusal = self._refusal(spec)
        waits = self.receiver.awaits_blocks  # what was computed already comes first
        if refusal is None and (waits or not self.batch.try_enqueue(spec, now_s)):
            refusal = "kv_exhausted"
        if refusal is not None:
            return [self._refused(spec.key, refusal, now_s)]
        return [self._taken(spec.key, now_s)]

    @staticmethod
    def _taken(key: RequestKey, now_s: float, held_tokens: int = 0) -> Emit:
        return Emit(events=(Reserved(key=key, at_s=now_s, held_tokens=held_tokens),))

    @staticmethod
    def _refused(key: RequestKey, reason: str, now_s: float) -> Emit:
        return Emit(events=(ReserveRefused(key=key, at_s=now_s, reason=reason),))

    def _from_peer(self, event: FromPeer, now_s: float) -> list[Command]:
        match event.message:
            case PeerHello(kv=kv):
                self.receiver.pools.met(event.peer, kv)
                return []
            case PieceAhead() as ahead:
                return self.receiver.ahead(event.peer, ahead, now_s)
            case PieceComputed() as computed:
                return self.receiver.computed(event.peer, computed, now_s)
            case SlabFilled() as filled:
                return self.receiver.filled(filled, now_s)
            case Commit() as commit:
                commands = self.receiver.commit(event.peer, commit, now_s)
                return [*commands, *self._join_if_complete(commit.key, now_s)]
            case TransferCancelled(key=key):
                return self.receiver.fenced(key, now_s)
            case RenewLeases(keys=keys):
                self.receiver.renew(keys, now_s)
                return []
            case _:
                return []

    def _take_blocks(self, now_s: float) -> list[Command]:
        commands, keys = self.receiver.take_blocks(now_s)
        return [*commands, *(c for key in keys for c in self._join_if_complete(key, now_s))]

    def _join_if_complete(self, key: RequestKey, now_s: float) -> list[Command]:
        arrived = self.receiver.take_complete(key)
        if arrived is None:
            return []
        committed = Lifetime(key=key, at_s=now_s, name="handoff_committed")
        if self.canary.try_begin(arrived, now_s):
            return [arrived.answer, Emit(events=(committed,))]
        self.batch.join(arrived, now_s)
        return [arrived.answer, Emit(events=(committed, *self._released_if_done(key, now_s)))]

    def _checked(self, outcome: StepOutcome, now_s: float) -> list[Command]:
        checked = self.canary.ran(outcome)
        events = tuple(event for one in checked for event in self._after_check(one, now_s))
        return [Emit(events=events)]

    def _after_check(self, checked: Checked, now_s: float) -> list[WorkerEvent]:
        key = checked.arrived.key
        released = Released(key=key, at_s=now_s)
        if checked.dropped:
            return [released]
        if checked.problem is not None:
            failure = Failure(key, "kv_mismatch", checked.problem)
            return [self._failure(failure, now_s), released]
        self.batch.join(checked.arrived, now_s)
        passed = Lifetime(key=key, at_s=now_s, name="kv_checked")
        return [passed, *self._released_if_done(key, now_s)]

    # --- steps ----------------------------------------------------------------------------------

    def _next_step(self, now_s: float) -> list[Command]:
        if (check := self.canary.next_step()) is not None:
            return [check]
        step = self.batch.next_step(now_s)
        return [] if step is None else [*self._joined(now_s), step]

    def _joined(self, now_s: float) -> list[Command]:
        fresh = [sequence for sequence, _ in self.batch.on_device if not sequence.joined]
        for sequence in fresh:
            sequence.joined = True
        events = {sequence.key: sequence.joined_event(now_s) for sequence in fresh}
        return [Emit(events=tuple(events.values()))] if events else []

    def _step_done(self, done: StepDone, now_s: float) -> list[Command]:
        if self.canary.runs:
            return self._checked(done.outcome, now_s)
        events: list[WorkerEvent] = []
        for (sequence, take), sampled in zip(
            self.batch.take_ran(), done.outcome.sampled, strict=True
        ):
            if sequence.dropped:
                events += self._released_if_done(sequence.key, now_s)
                continue
            if sequence.needed > 1:
                self.prompt_tokens += take
            self.batch.advance(sequence, take)
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
            ids = tuple(one.token_id for one in sampled)
            self.batch.split(sequence, ids, finished | sequence.stopped, now_s)
        elif finished:
            self.batch.drop(sequence)
        else:
            sequence.emitted.append(sampled[0].token_id)
        return [*tokens, *self._released_if_done(sequence.key, now_s)]

    # --- endings --------------------------------------------------------------------------------

    def _released_if_done(self, key: RequestKey, now_s: float) -> list[WorkerEvent]:
        return [Released(key=key, at_s=now_s)] if self.batch.try_forget(key) else []

    def _stop(self, message: Stop, now_s: float) -> list[Command]:
        self.receiver.stop(message.key, message.choice)
        self.canary.stop(message.key, message.choice)
        for sequence in self.batch.of(message.key):
            if sequence.choices == (message.choice,):
                self.batch.drop(sequence)
            else:
                sequence.stopped |= {message.choice} & {*sequence.choices}
        events = self._released_if_done(message.key, now_s)
        return [Emit(events=tuple(events))] if events else []

    def _abort(self, key: RequestKey, now_s: float) -> list[Command]:
        if key in self.receiver:
            return self.receiver.cancel(key, "aborted", now_s)
        if self.canary.drop(key):
            return [Emit(events=(Released(key=key, at_s=now_s),))]
        for sequence in self.batch.of(key):
            self.batch.drop(sequence)
        events = self._released_if_done(key, now_s)
        return [Emit(events=tuple(events))] if events else []

    @staticmethod
    def _failure(failure: Failure, now_s: float) -> RequestFailed:
        return RequestFailed(
            key=failure.key, at_s=now_s, reason=failure.reason, message=failure.message
        )

    def _failed(self, failures: list[Failure], now_s: float) -> list[Command]:
        events = tuple(self._failure(failure, now_s) for failure in failures)
        return [Emit(events=events)] if events else []

    def validate(self) -> None:
        self.batch.tables.validate()
        self.batch.validate()
        self.receiver.validate()
