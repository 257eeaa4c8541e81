"""What the fate of a request teaches a router. Pure.

How much work clients offer, how far predictions were off, how long outputs are, whether a tier
keeps its objectives, and whether a link between two workers is to be trusted.
"""

from __future__ import annotations

from dataclasses import replace
from math import isfinite

from kvrelay.messages import Lifetime, LifetimeMoment, RequestFailed, Tokens
from kvrelay.types import FinishReason
from router.core.events import Command, PairQuarantined, PairTrusted
from router.core.policy.admission import Admitted, Verdict
from router.core.policy.forecast import messages_s
from router.core.promises.returning import tells_of_refusal
from router.core.request import Request
from router.core.router_state import RouterState
from router.core.state.candidate import PromptPrediction
from router.core.state.demand import Demand
from router.core.state.offered import could_be_kept, most_cached
from router.core.state.quarantine import SUSPICIOUS

MAX_LATENESS = 1.1
"""A late first token is recorded as at most 1.1 x its deadline, so that one outlier does not
distort the margin: it went behind all prompts that could still be in time."""


def was_offered(state: RouterState, request: Request, now_s: float) -> bool:
    """It was admitted elsewhere, or comes back after it was refused."""
    if request.admitted or tells_of_refusal(request.submitted.promise):
        return True
    is_due = request.promise is not None
    return state.returning.is_back(request.digest, now_s, state.requests, is_due=is_due)


def learn_offered(state: RouterState, request: Request, demand: Demand, verdict: Verdict) -> None:
    """Once. What is admitted is work, whatever it asks for. What is refused of a prompt that
    comes in parts comes again with the rest."""
    if request.submitted.is_ahead and not isinstance(verdict, Admitted):
        return
    request.is_counted = True
    cached = most_cached(demand, state.workers.first)
    if request.submitted.is_ahead:
        state.offered.add_prompt(demand, cached)
    elif isinstance(verdict, Admitted) or _could_be_kept(state, demand, cached):
        state.offered.add(demand, cached, verdict.shares)
    else:
        state.offered.add_hopeless(demand, verdict.shares)


def _could_be_kept(state: RouterState, demand: Demand, cached: int) -> bool:
    prefills, decodes, both = state.workers.by_role()
    overhead_s = state.forecast.ttft.overhead_s
    return could_be_kept(demand, cached, prefills + both, decodes + both, overhead_s)


def learn_ttft(state: RouterState, request: Request, now_s: float) -> None:
    """The first token of its first choice has come, and is not counted yet."""
    if request.submitted.is_ahead or any(choice.delivered for choice in request.choices):
        return
    if request.submitted.objectives.ttft_s is None:  # it is held to its tier's objective
        age_s = request.ledger.age_s(now_s)
        begun_s = now_s - age_s
        state.ladders.saw_ttft(request.tier.name, age_s, begun_s=begun_s, now_s=now_s)
    predicted = request.predicted
    if predicted is not None and not request.disturbed:
        _learn_dispatching(request, predicted.prompt, now_s)
        predicted_s = _as_known_now(request, predicted.prompt).first_token_s
        state.forecast.ttft.observe(
            predicted_s,
            _recorded_ttft_s(request, predicted_s, now_s),
            now_s,
            undisturbed=predicted.prompt.queue_s <= 0,
        )


def _learn_dispatching(request: Request, prompt: PromptPrediction, now_s: float) -> None:
    """How long its prompt took beside its own time, if it did not have to wait."""
    if request.placed is None or prompt.queue_s > 0 or not isfinite(prompt.prefill_s):
        return
    candidate = request.placed.candidate
    first_s = request.placed_s + _recorded_ttft_s(request, prompt.first_token_s, now_s)
    sent_s = request.placed_s if candidate.prefill is None else request.reserved_s
    computed_s = prompt.pull_s + prompt.prefill_s
    candidate.prefiller.dispatching.observe(first_s - sent_s - computed_s, now_s)


def _as_known_now(request: Request, prompt: PromptPrediction) -> PromptPrediction:
    """With the delays of its workers' messages that it has shown itself, so that these do not count
    as errors too."""
    if request.placed is None or prompt.queue_s > 0:
        return prompt
    return replace(prompt, messages_s=messages_s(request.placed.candidate))


def _recorded_ttft_s(request: Request, predicted_s: float, now_s: float) -> float:
    """From its placement to its first token, at most MAX_LATENESS times its deadline."""
    took_s, objective_s = now_s - request.placed_s, request.objectives.ttft_s
    if objective_s is None:
        return took_s
    waited_s = request.ledger.age_s(now_s) - took_s
    return min(took_s, MAX_LATENESS * max(objective_s - waited_s, predicted_s))


def learn_length(state: RouterState, request: Request, event: Tokens) -> None:
    """A choice has ended."""
    if request.sampling.max_tokens:
        tokens = len(request.choices[event.choice].delivered)
        was_cut = event.finish_reason is not FinishReason.STOP
        state.lengths.observe(request.tier.name, tokens, was_cut=was_cut)


def learn_pace(state: RouterState, request: Request, now_s: float) -> None:
    """Its last token has come. Time for which it was preempted says nothing about speed."""
    actual_s = request.tpot_s()
    if actual_s is None:
        return
    if request.submitted.objectives.tpot_s is None:
        begun_s = now_s - request.ledger.age_s(now_s)
        state.ladders.saw_tpot(request.tier.name, actual_s, begun_s=begun_s, now_s=now_s)
    paced_s = request.tpot_s(less_s=request.stood_back_s)
    expected_s = _expected_tpot_s(state, request)
    if expected_s is not None and paced_s is not None:
        state.forecast.tpot.observe(expected_s, paced_s, now_s, undisturbed=False)


def _expected_tpot_s(state: RouterState, request: Request) -> float | None:
    """With the longest steps that were predicted of requests admitted after it."""
    predicted = request.predicted
    if predicted is None or request.placed is None:
        return None
    worker = state.workers.get(request.placed.candidate.decode.incarnation)
    worst_s = 0.0 if worker is None else worker.peaks.since(request.placed_s)
    return max(0.0, worst_s - predicted.decode.step_s) + predicted.tpot_s


def suspect(
    state: RouterState, request: Request, failed: RequestFailed, now_s: float
) -> list[Command]:
    """Quarantines the link between its workers, if the reason tells of it."""
    pair, reason = request.pair, failed.reason
    if pair is None or reason not in SUSPICIOUS:
        return []
    request.avoided.add(pair)
    seconds = state.quarantine.failed(pair, reason, now_s)
    if seconds is None:
        return []
    return [PairQuarantined(pair=pair, seconds=seconds, reason=reason, message=failed.message)]


SHOWS_A_GOOD_LINK = (LifetimeMoment.HANDOFF_COMMITTED, LifetimeMoment.KV_CHECKED)


def trust(state: RouterState, request: Request, moment: Lifetime) -> list[Command]:
    """Its KV was handed over, or even checked."""
    pair, checked = request.pair, moment.name == LifetimeMoment.KV_CHECKED
    if pair is None:
        return []
    trusted = state.quarantine.succeeded(pair, begun_s=request.placed_s, checked=checked)
    return [PairTrusted(pair=pair)] if trusted else []
