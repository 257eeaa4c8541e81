"""Decides what a decode worker does next. Pure; one per worker.

Continuous batching: at every step requests join and leave. They come by handoff with their prompt's
KV, or are prefilled here (role both).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from decode_worker.admission import Admission
from decode_worker.batch import Batch, Taken
from decode_worker.fetch_ahead import FetchAhead
from decode_worker.reservations import IncomingEvent, Reservations
from decode_worker.sequence import Sequence
from engine.core.step import (
    Command,
    Emit,
    OverlapStepWanted,
    RunStep,
    Sampled,
    StepDone,
    StepWanted,
    scored_event,
)
from kvpool.core.blocks.holding import Holder
from kvpool.core.fetch.fetches import Restored
from kvpool.core.fetch.prefix_lookup import AHEAD
from kvpool.core.transfer.commands import FromPeer
from kvpool.core.transfer.messages import PrefixStored
from kvrelay.errors import FailureReason, RefusalReason
from kvrelay.messages import (
    Abort,
    Generate,
    Lifetime,
    LifetimeMoment,
    Released,
    RequestFailed,
    Reserve,
    Reserved,
    ReserveRefused,
    Stop,
    WorkerEvent,
)
from kvrelay.types import RequestKey

Ask = Reserve | Generate
StepEvent = StepWanted | OverlapStepWanted | StepDone | Restored
DecodeEvent = Reserve | Generate | Abort | Stop | StepEvent | IncomingEvent


@dataclass(slots=True, kw_only=True)
class DecodeScheduler:
    """`asking` are requests that wait for the step to end, and for the blocks of others."""

    reservations: Reservations
    batch: Batch
    prompt_tokens: int = 0
    generated_tokens: int = 0
    asking: list[Ask] = field(default_factory=list)
    admission: Admission = field(init=False)
    ahead: FetchAhead = field(init=False)

    def __post_init__(self) -> None:
        self.ahead = FetchAhead(lookup=self.batch.lookup, reservations=self.reservations)
        self.admission = Admission(reservations=self.reservations, batch=self.batch)

    def handle(self, event: DecodeEvent, now_s: float) -> list[Command]:
        match event:
            case StepWanted(most_steps=most_steps):
                commands = self._next_step(most_steps, now_s)
            case OverlapStepWanted():
                commands = self._overlapped_step(now_s)
            case StepDone():
                commands = self._step_done(event, now_s)
            case Reserve() | Generate():
                commands = self._ask(event, now_s)
            case Restored(holder=Holder(side=side)) if side == AHEAD:
                commands = self.ahead.restored(event, now_s)
            case FromPeer(peer=peer, message=PrefixStored() as told):
                self.ahead.stored(peer, told, now_s)
                commands = []
            case Restored(holder=holder):
                self.batch.running_set.restored(event)
                commands = self._release_if_done(holder.key, now_s)
            case Abort(key=key):
                commands = self._abort(key, now_s)
            case Stop():
                commands = self._stop(event, now_s)
            case _:
                commands = self.reservations.on_incoming_event(event, now_s)
        if self.reservations.arrived:
            commands += self._join_arrived(now_s)
        if self.asking:
            commands += self._answer_asking(now_s)
        if self.reservations.awaiting_blocks or self.reservations.freed:
            commands += self.settle_reservations(now_s)
        return commands

    def settle_reservations(self, now_s: float) -> list[Command]:
        """Blocks for those that await them, and word of those that hold nothing any more."""
        commands: list[Command] = []
        if self.reservations.awaiting_blocks and not self.batch.running_set.lacks_blocks:
            commands = self.reservations.take_blocks(now_s)
            commands += self._join_arrived(now_s)
        if freed := self.reservations.take_freed():
            commands.append(Emit(events=tuple(Released(key=key, at_s=now_s) for key in freed)))
        return commands

    def _join_arrived(self, now_s: float) -> list[Command]:
        """Those whose KV is here now are in the batch from the next step on."""
        commands: list[Command] = []
        for arrived in self.reservations.take_arrived():
            key = arrived.spec.key
            self.batch.join(arrived, now_s)
            ended = self.batch.running_set.released_if_done(key, now_s)
            committed = Lifetime(key=key, at_s=now_s, name=LifetimeMoment.HANDOFF_COMMITTED)
            commands += [arrived.answer, Emit(events=(committed, *ended))]
        return commands

    @property
    def has_work(self) -> bool:
        """There may be a step to run."""
        here = self.batch.running_set
        return bool(here.running or here.awaiting_prefill)

    # --- admission ------------------------------------------------------------------------------

    @property
    def sequences(self) -> int:
        """Running, waiting and reserved."""
        return self.batch.running_set.choices + self.reservations.choices

    def _ask(self, message: Ask, now_s: float) -> list[Command]:
        counted = message.counted if isinstance(message, Reserve) else None
        asking = (ask.spec for ask in self.asking)
        displaced = message.displaced
        refusal = self.admission.refusal(message.spec, asking, counted, displaced=displaced)
        if refusal is not None:
            return [self._refused(message.spec.key, refusal, now_s)]
        if (taken := self._try_take(message, now_s)) is not None:
            return [taken]
        may_reclaim = self.admission.may_reclaim(message.spec, displaced=displaced)
        if self._waits_behind(message) or not may_reclaim:
            return [self._refused(message.spec.key, RefusalReason.KV_EXHAUSTED, now_s)]
        self.asking.append(message)
        return []

    def _answer_asking(self, now_s: float) -> list[Command]:
        """Between two steps, when the blocks of others can be taken."""
        if self.batch.running_set.on_device:
            return []
        asking, self.asking = self.asking, []
        return [self._reclaim(message, now_s) for message in asking]

    def _reclaim(self, message: Ask, now_s: float) -> Emit:
        while (taken := self._try_take(message, now_s)) is None:
            if self._waits_behind(message) or not self.admission.try_reclaim(message.spec):
                return self._refused(message.spec.key, RefusalReason.KV_EXHAUSTED, now_s)
        return taken

    def _try_take(self, message: Ask, now_s: float) -> Emit | None:
        """None when blocks have run out."""
        key = message.spec.key
        if isinstance(message, Reserve):
            held_tokens = self.reservations.try_reserve(message, now_s)
            return None if held_tokens is None else self._taken(key, now_s, held_tokens)
        if self._waits_behind(message):
            return None
        return self._taken(key, now_s) if self.batch.try_enqueue(message, now_s) else None

    def _waits_behind(self, message: Ask) -> bool:
        """Prompts that were computed elsewhere get blocks first."""
        return isinstance(message, Generate) and bool(self.reservations.awaiting_blocks)

    @staticmethod
    def _taken(key: RequestKey, now_s: float, held_tokens: int = 0) -> Emit:
        return Emit(events=(Reserved(key=key, at_s=now_s, held_tokens=held_tokens),))

    @staticmethod
    def _refused(key: RequestKey, reason: RefusalReason, now_s: float) -> Emit:
        return Emit(events=(ReserveRefused(key=key, at_s=now_s, reason=reason),))

    # --- steps ----------------------------------------------------------------------------------

    def _next_step(self, most_steps: int, now_s: float) -> list[Command]:
        step = self.batch.next_step(now_s, most_steps)
        return [] if step is None else self._launch(step, self.batch.running_set.on_device, now_s)

    def _overlapped_step(self, now_s: float) -> list[Command]:
        """None while requests wait for the device to be free."""
        step = None if self.asking else self.batch.overlapped_step(now_s)
        return [] if step is None else self._launch(step, self.batch.running_set.overlapped, now_s)

    def _launch(self, step: RunStep, taken: Taken, now_s: float) -> list[Command]:
        """Tells of each request that is in a step for the first time."""
        fresh = [sequence for sequence, _ in taken if not sequence.joined]
        if not fresh:
            return [step]
        for sequence in fresh:
            sequence.joined = True
        events = {sequence.key: sequence.joined_event(now_s) for sequence in fresh}
        return [Emit(events=tuple(events.values())), step]

    def _step_done(self, done: StepDone, now_s: float) -> list[Command]:
        events: list[WorkerEvent] = []
        ran, outcome = self.batch.running_set.take_ran(), done.outcome
        scores, failed = outcome.prompt_logprobs, outcome.failed
        for i, (sequence, take) in enumerate(ran):
            if sequence.dropped:
                events += self.batch.running_set.released_if_done(sequence.key, now_s)
            elif i in failed:
                events += self._fail(sequence.key, failed[i], now_s)
            else:
                if i in scores:
                    end = sequence.computed + take
                    events.append(scored_event(sequence.spec, end, take, scores[i], now_s))
                events += self._advance(sequence, take * done.steps, outcome.sampled[i], now_s)
        self.batch.step_over(ran)
        return [Emit(events=tuple(events))] if events else []

    def _advance(
        self, sequence: Sequence, computed: int, drawn: tuple[Sampled, ...], now_s: float
    ) -> list[WorkerEvent]:
        """The KV of `computed` more tokens is there. `drawn` is a token of each choice, or of one
        choice a token for each step, the last of which can end it."""
        if sequence.needed > 1:
            self.prompt_tokens += computed
        if not drawn or len(sequence.choices) > 1:
            self.batch.advance(sequence, computed)
            return self._part(sequence, drawn, now_s) if drawn else []
        tokens = sequence.tokens_event(sequence.choices[0], drawn, now_s)
        self.generated_tokens += len(drawn)
        sequence.emitted += tokens.token_ids
        sequence.length += len(drawn)
        self.batch.advance(sequence, computed)
        if tokens.finish_reason is None:
            return [tokens]
        self.batch.end(sequence)
        return [tokens, *self.batch.running_set.released_if_done(sequence.key, now_s)]

    def _part(
        self, whole: Sequence, sampled: tuple[Sampled, ...], now_s: float
    ) -> list[WorkerEvent]:
        """The first token of each choice, but for those that ended in an earlier attempt, or go on
        after its tokens."""
        spec = whole.spec
        tokens = [
            whole.tokens_event(choice, (one,), now_s)
            for choice, one in zip(whole.choices, sampled, strict=True)
            if not spec.resumed_by(choice) and choice not in spec.finished_choices
        ]
        self.generated_tokens += len(tokens)
        finished = frozenset([one.choice for one in tokens if one.finish_reason is not None])
        ids = tuple([one.token_id for one in sampled])
        self.batch.split(whole, ids, finished | whole.stopped, now_s)
        return [*tokens, *self.batch.running_set.released_if_done(whole.key, now_s)]

    # --- endings --------------------------------------------------------------------------------

    def _release_if_done(self, key: RequestKey, now_s: float) -> list[Command]:
        events = self.batch.running_set.released_if_done(key, now_s)
        return [Emit(events=tuple(events))] if events else []

    def _stop(self, message: Stop, now_s: float) -> list[Command]:
        self.reservations.stop(message.key, message.choice)
        for sequence in self.batch.running_set.of(message.key):
            if sequence.choices == (message.choice,):
                self.batch.running_set.drop(sequence)
            else:
                sequence.stopped |= {message.choice} & {*sequence.choices}
        return self._release_if_done(message.key, now_s)

    def _fail(self, key: RequestKey, message: str, now_s: float) -> list[WorkerEvent]:
        """Its grammar can't be followed; others go on."""
        reason = FailureReason.GRAMMAR
        failed = RequestFailed(key=key, at_s=now_s, reason=reason, message=message)
        for sequence in self.batch.running_set.of(key):
            self.batch.running_set.drop(sequence)
        return [failed, *self.batch.running_set.released_if_done(key, now_s)]

    def _abort(self, key: RequestKey, now_s: float) -> list[Command]:
        if any(ask.spec.key == key for ask in self.asking):
            self.asking = [ask for ask in self.asking if ask.spec.key != key]
            return [Emit(events=(Released(key=key, at_s=now_s),))]
        if key in self.reservations:
            return self.reservations.cancel(key, FailureReason.ABORTED, now_s)
        for sequence in self.batch.running_set.of(key):
            self.batch.running_set.drop(sequence)
        return self._release_if_done(key, now_s)

    def validate(self) -> None:
        self.batch.tables.validate()
        self.batch.running_set.validate()
        self.reservations.validate()
