"""From a request's submission, or a failure of what it ran on, until a decode worker is asked for
it. Pure; part of a router's core.

    place -> a decode worker is asked
         `-> waits, and is placed again; or is refused; or fails, if it was admitted before

What the workers of a request's attempt hold for it, and how that is given up. Pure; part of a
router's core.

What a refused client is told: when to come back, as a promise where one can be given. Pure; part
of a router's core.

How requests end before their time: stopped, aborted, too late, or on a worker that failed, from
where they go on elsewhere. Pure; part of a router's core.

What the fate of requests teaches: how far predictions were off, how long outputs are, whether a
tier keeps its objectives. Pure; part of a router's core.

Tokens, from whoever decodes a request to its client: in order, each once. Pure; part of a
router's core.

Whether the two workers of a request are to be trusted with others. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import inf, isfinite

from kvrelay.messages import Lifetime, RequestFailed, Tokens
from kvrelay.types import FinishReason
from router.core import dispatch
from router.core import dispatch as orders
from router.core.decision import Deciding
from router.core.dispatch import Dispatch
from router.core.events import (
    ChoiceStopped,
    Command,
    Deliver,
    Fail,
    PairQuarantined,
    PairTrusted,
    Refuse,
)
from router.core.load.output_lengths import OutputLengths
from router.core.policy.admission import Admitted, Deferred
from router.core.policy.forecast import Forecast, messages_s
from router.core.request import Request
from router.core.state.candidate import PromptPrediction
from router.core.state.ladder import Ladders
from router.core.state.promises import Promises, Refusal, ReleaseClock
from router.core.state.quarantine import SUSPICIOUS, Quarantine
from router.core.state.story import Moment, StoryRing, choice_end, ending, why
from router.core.state.waiting import PATIENCE_S, WaitingRoom
from router.core.state.worker_view import WorkerView
from router.core.workers import Workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Legs:
    workers: Workers
    dispatch: Dispatch

    def abort(self, request: Request, now_s: float) -> list[Command]:
        """The workers say Released once nothing is held; until then the places stay taken. Of a
        prompt that has not been sent yet a prefill worker says nothing."""
        self.workers.prefilled(request.key, request.legs, now_s)
        self.dispatch.forget(request)
        return [send for send in orders.abort(request) if send.worker in self.workers]

    def forget(self, request: Request, now_s: float) -> None:
        """Nothing is held any more, or nobody will say so."""
        self.workers.forget(request.key, request.legs, now_s)
        self.dispatch.forget(request)
        request.placed = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusing:
    promises: Promises
    workers: Workers
    releases: ReleaseClock = field(default_factory=ReleaseClock)

    def told(self, request: Request, refusal: Refusal, now_s: float) -> Refusal:
        if request.promise is not None:
            self.promises.settle(kept=False)
        known = refusal.retry_after_s is not None and isfinite(refusal.retry_after_s)
        if not known and not refusal.hopeless:
            refusal = replace(refusal, retry_after_s=self.releases.retry_after_s())
        return self._promise(request, refusal, now_s)

    def _promise(self, request: Request, refusal: Refusal, now_s: float) -> Refusal:
        soonest_s = refusal.retry_after_s
        if refusal.work is None or soonest_s is None or not isfinite(refusal.work.prefill_s):
            return refusal
        retry_after_s = self.promises.make(
            request.digest,
            refusal.work,
            soonest_s,
            now_s,
            request.tier.priority,
            again=request.promise is not None,
            all_by_own=self.workers.all_by_own(),
        )
        return replace(refusal, retry_after_s=retry_after_s)


@dataclass(slots=True, kw_only=True)
class Seeking:
    deciding: Deciding
    dispatch: Dispatch
    refusing: Refusing
    waiting: WaitingRoom
    workers: Workers
    requests: dict[str, Request]
    stories: StoryRing

    def place(self, request: Request, otherwise: Refusal, now_s: float) -> list[Command]:
        """Ask the next decode worker; refuse for the last reason when none is left."""
        demand, verdict = self.deciding.consider(request, otherwise, now_s)
        match verdict:
            case Refusal() as refusal:
                return self._refuse(request, refusal, now_s)
            case Deferred(refusal=refusal, patience_s=patience_s):
                return self._wait(request, refusal, patience_s, now_s)
            case Admitted() as admitted:
                admitted.note_trial(now_s)
                return self.dispatch.place(request, demand, admitted, now_s)

    def ask_again(self, now_s: float) -> list[Command]:
        """Whoever is refused again waits on, and its line with it."""
        commands: list[Command] = []
        due_s = now_s if self.workers else inf
        while (turn := self.waiting.take_next(due_s)) is not None:
            request_id, refusal = turn
            request = self.requests[request_id]
            request.tried.clear()
            commands += self.place(request, refusal, now_s)
            self.waiting.follow(request_id, now_s)
        return commands

    def fail(self, request: Request, reason: str, message: str, now_s: float) -> list[Command]:
        request.story.note(Moment.FAILED, now_s, request.worker_names, why(reason, message))
        self.leave(request)
        return [Fail(request_id=request.request_id, reason=reason, message=message)]

    def leave(self, request: Request) -> None:
        """It seeks nothing any more."""
        self.stories.keep(request.story)
        del self.requests[request.request_id]
        self.waiting.leave(request.request_id)
        self.dispatch.forget(request)

    def _refuse(self, request: Request, refusal: Refusal, now_s: float) -> list[Command]:
        if request.admitted:
            return self._wait(request, refusal, PATIENCE_S, now_s)
        request.story.note(Moment.REFUSED, now_s, (), why(refusal.reason, refusal.message))
        self.leave(request)
        told = self.refusing.told(request, refusal, now_s)
        return [Refuse(request_id=request.request_id, refusal=told)]

    def _wait(
        self, request: Request, refusal: Refusal, patience_s: float, now_s: float
    ) -> list[Command]:
        """Without any worker there is nothing to wait for."""
        line = "" if request.admitted else request.tier.name
        waits = self.workers and self.waiting.try_wait(
            request.request_id, line, refusal, patience_s, now_s
        )
        if waits:
            request.story.note(Moment.WAITS, now_s, (), why(refusal.reason, refusal.message))
            request.placed = None
            return []
        if not request.admitted:
            return self._refuse(request, refusal, now_s)
        return self.fail(request, refusal.reason, f"can't go on: {refusal.message}", now_s)


MAX_ATTEMPTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    requests: dict[str, Request]
    legs: Legs
    seeking: Seeking
    refusing: Refusing
    attempts: Iterator[int]

    def ended(self, request: Request, now_s: float) -> None:
        """It has left a place to others."""
        self.seeking.leave(request)
        self.refusing.releases.released(now_s)

    def stopped(self, event: ChoiceStopped, now_s: float) -> list[Command]:
        request = self.requests.get(event.request_id)
        if request is None or request.choices[event.choice].finished:
            return []
        request.choices[event.choice].finished = True
        if request.done:
            request.story.note(Moment.DONE, now_s, request.decoder, ending(request.told, 0.0))
            return self._end(request, now_s)
        request.story.note(Moment.CHOICE_DONE, now_s, (), choice_end(event.choice, "stop string"))
        if request.placement is None:
            return []  # told to the next worker once it has taken the request
        decode = request.placement.decode
        return [dispatch.stop(request, decode, event.choice, event.valid_tokens)]

    def aborted(self, request_id: str, now_s: float) -> list[Command]:
        request = self.requests.get(request_id)
        if request is None:
            return []
        request.story.note(Moment.ABORTED, now_s, request.worker_names, "by its client")
        return self._end(request, now_s)

    def _end(self, request: Request, now_s: float) -> list[Command]:
        """Before its workers are done with it."""
        self.ended(request, now_s)
        return self.legs.abort(request, now_s)

    def too_late(self, request_id: str, now_s: float) -> list[Command]:
        request = self.requests.get(request_id)
        if request is None:
            return []
        deadline_s = request.objectives.deadline_s or 0.0
        message = f"its deadline of {deadline_s:.3f} s has passed"
        failure = Fail(request_id=request_id, reason="deadline_exceeded", message=message)
        request.story.note(Moment.FAILED, now_s, request.worker_names, message)
        return [*self._end(request, now_s), failure]

    def sent_back(self, request: Request, refusal: Refusal, now_s: float) -> list[Command]:
        """Its prefill worker takes no prompts any more: it is placed anew, which is no failure."""
        aborts = self.legs.abort(request, now_s)
        self.legs.forget(request, now_s)
        request.story.note(Moment.TRIED_AGAIN, now_s, request.worker_names, refusal.message)
        request.begin_again(next(self.attempts))
        return [*aborts, *self.seeking.place(request, refusal, now_s)]

    def leg_failed(
        self, request: Request, reason: str, message: str, now_s: float
    ) -> list[Command]:
        """Run it again elsewhere; what the old attempt still says is dropped."""
        aborts = self.legs.abort(request, now_s)
        if request.tries >= MAX_ATTEMPTS:
            return [*aborts, *self.seeking.fail(request, reason, message, now_s)]
        self.legs.forget(request, now_s)
        cause = f"{why(reason, message)}; {ending(request.told, 0.0)} so far"
        request.story.note(Moment.TRIED_AGAIN, now_s, request.worker_names, cause)
        request.try_again(next(self.attempts))
        refusal = Refusal(reason=reason, message=message)
        return [*aborts, *self.seeking.place(request, refusal, now_s)]


TOO_LATE = 1.1
"""Of its time, is what a first token that came too late is taken to have needed at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    workers: Workers
    lengths: OutputLengths
    ladders: Ladders
    forecast: Forecast

    def reserved(self, request: Request, now_s: float) -> None:
        """Its decode worker has taken it."""
        request.reserved_s = now_s
        if request.placed is not None and request.placed.candidate.prefill is not None:
            request.placed.candidate.decode.reserving.observe(now_s - request.placed_s)

    def _dispatched(self, request: Request, now_s: float) -> None:
        """Its first token has come. What its prompt took beside its own time, where it had none to
        wait for."""
        if request.predicted is None or request.placed is None:
            return
        prompt, candidate = request.predicted.prompt, request.placed.candidate
        if prompt.queue_s <= 0 and isfinite(prompt.prefill_s):
            first_s = request.placed_s + _at_most_due_s(request, prompt.first_token_s, now_s)
            sent_s = request.placed_s if candidate.prefill is None else request.reserved_s
            computed_s = prompt.pull_s + prompt.prefill_s
            candidate.prefiller.dispatching.observe(first_s - sent_s - computed_s)

    @staticmethod
    def _as_known_now(request: Request, prompt: PromptPrediction) -> PromptPrediction:
        """With the delays of its workers' messages that it has shown itself: they are not to count
        as errors too."""
        if request.placed is None or prompt.queue_s > 0:
            return prompt
        return replace(prompt, messages_s=messages_s(request.placed.candidate))

    def begun(self, request: Request, now_s: float) -> None:
        """Its first token has come, before anyone has counted it."""
        if any(choice.next_index for choice in request.choices):
            return
        if request.submitted.objectives.ttft_s is None:  # it is held to its tier's objective
            age_s = request.ledger.age_s(now_s)
            begun_s = now_s - age_s
            self.ladders.saw_ttft(request.tier.name, age_s, begun_s=begun_s, now_s=now_s)
        predicted = request.predicted
        if predicted is not None and not request.disturbed:
            self._dispatched(request, now_s)
            predicted_s = self._as_known_now(request, predicted.prompt).first_token_s
            self.forecast.ttft.observe(
                predicted_s,
                _at_most_due_s(request, predicted_s, now_s),
                now_s,
                undisturbed=predicted.prompt.queue_s <= 0,
            )

    def choice_grown(self, request: Request, event: Tokens) -> None:
        if event.finish_reason is not None and request.sampling.max_tokens:
            tokens = request.choices[event.choice].next_index
            was_cut = event.finish_reason is not FinishReason.STOP
            self.lengths.observe(request.tier.name, tokens, was_cut=was_cut)

    def ended(self, request: Request, now_s: float) -> None:
        """Its last token has come. That it stood back for others was not for want of speed."""
        actual_s = request.tpot_s()
        if actual_s is None:
            return
        if request.submitted.objectives.tpot_s is None:
            begun_s = now_s - request.ledger.age_s(now_s)
            self.ladders.saw_tpot(request.tier.name, actual_s, begun_s=begun_s, now_s=now_s)
        paced_s = request.tpot_s(less_s=request.stood_back_s)
        expected_s = self._expected_tpot_s(request)
        if expected_s is not None and paced_s is not None:
            self.forecast.tpot.observe(expected_s, paced_s, now_s, undisturbed=False)

    def _expected_tpot_s(self, request: Request) -> float | None:
        """Beside the longest steps that it was to have with those admitted after it."""
        predicted, placement = request.predicted, request.placement
        if predicted is None or placement is None:
            return None
        worker = self.workers.get(placement.decode)
        worst_s = 0.0 if worker is None else worker.peaks.since(request.placed_s)
        return max(0.0, worst_s - predicted.decode.step_s) + predicted.tpot_s


def _at_most_due_s(request: Request, predicted_s: float, now_s: float) -> float:
    """From its placing to its first token. One that came too late went behind all that could still
    be in time: how late it was then says nothing of the prediction."""
    took_s, objective_s = now_s - request.placed_s, request.objectives.ttft_s
    if objective_s is None:
        return took_s
    waited_s = request.ledger.age_s(now_s) - took_s
    return min(took_s, TOO_LATE * max(objective_s - waited_s, predicted_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivering:
    workers: Workers
    learning: Learning
    ending: Ending

    def said(
        self, request: Request, worker: WorkerView, event: Tokens, now_s: float
    ) -> list[Command]:
        worker.outlook.grown(event.key, event.first_index + len(event.token_ids))
        if event.first_index == request.choices[event.choice].resumed:
            self._begun(request, worker, event, now_s)
        request.ledger.mark("last_token", event.at_s)
        request.ledger.mark("last_token_received", now_s)
        ready = request.take(event)
        if not ready:
            return []
        self.learning.choice_grown(request, event)
        if ready[-1].finish_reason is not None and len(request.choices) > 1:
            cause = choice_end(event.choice, ready[-1].finish_reason)
            request.story.note(Moment.CHOICE_DONE, now_s, request.decoder, cause)
        if request.done:
            request.story.note(
                Moment.DONE, now_s, request.decoder, ending(request.told, request.stood_back_s)
            )
            self.learning.ended(request, now_s)
            self.ending.ended(request, now_s)
        return [Deliver(request_id=request.request_id, tokens=tuple(ready), done=request.done)]

    def _begun(self, request: Request, worker: WorkerView, event: Tokens, now_s: float) -> None:
        request.ledger.mark("first_token", event.at_s)
        request.ledger.mark("first_token_received", now_s)
        request.story.note(Moment.FIRST_TOKEN, event.at_s, (worker.hello.name,))
        self.workers.prefilled(request.key, request.legs, now_s)
        self.learning.begun(request, now_s)


def suspect(
    quarantine: Quarantine, request: Request, failed: RequestFailed, now_s: float
) -> list[PairQuarantined]:
    """The link between them, where the reason tells of it."""
    pair = request.pair
    if pair is None or failed.reason not in SUSPICIOUS:
        return []
    request.avoided.add(pair)
    seconds = quarantine.failed(pair, failed.reason, now_s)
    if seconds is None:
        return []
    return [
        PairQuarantined(pair=pair, seconds=seconds, reason=failed.reason, message=failed.message)
    ]


def trust(quarantine: Quarantine, request: Request, moment: Lifetime) -> list[PairTrusted]:
    """Its KV has been handed over, or even checked."""
    if moment.name not in ("handoff_committed", "kv_checked"):
        return []
    pair = request.pair
    if pair is None:
        return []
    checked = moment.name == "kv_checked"
    if not quarantine.succeeded(pair, begun_s=request.placed_s, checked=checked):
        return []
    return [PairTrusted(pair=pair)]
