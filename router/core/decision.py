"""Decides which workers are asked for a request, or why none is. Pure; it changes nothing.

Placement suggests ways to serve a request, and admission judges them. A new request is judged as
it was asked first. Then it is judged as its tier lets it degrade: with less output, or later.
While the tier's latencies are outside its objectives, its ladder makes the judgement stricter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from kvrelay.errors import RefusalReason
from kvrelay.qos import LadderRules, QosTier
from kvrelay.types import Incarnation, Objectives, RequestSpec
from router.core.policy.admission import Admitted, Capacity, Deferred, Verdict
from router.core.policy.placement import WorkerChoice
from router.core.promises.refusal import BEHIND_DISPLACED, NO_CAPACITY, Refusal
from router.core.promises.work import NOTHING_PROMISED, Promised
from router.core.request import Ledger, Request, RequestState
from router.core.router_state import RouterState
from router.core.state.candidate import Candidate
from router.core.state.demand import Demand, HeldPrefixes, Known
from router.core.state.generation import GenerationRequest
from router.core.state.ladder import Ladder, LadderStep
from router.core.state.quarantine import trusted
from router.core.state.waiting import WaitingLine

WAITING_HELPS = {
    RefusalReason.TPOT_UNREACHABLE,
    RefusalReason.KV_EXHAUSTED,
    RefusalReason.SLOTS_EXHAUSTED,
    RefusalReason.TIER_SHARE_EXHAUSTED,
}
"""Not `ttft_unreachable`: the wait itself counts to the time to first token."""
CLAIM_PATIENCE_S = 2.0
"""Who comes back when told to waits here for so long before its promise is broken."""
LESS_OUTPUT_HELPS = {
    RefusalReason.TPOT_UNREACHABLE,
    RefusalReason.DEADLINE_UNREACHABLE,
    RefusalReason.KV_EXHAUSTED,
}


def ways(demand: Demand, tier: QosTier, step: LadderStep) -> Iterator[Demand]:
    """As asked, then with less output; only the latter once the ladder caps."""
    less = capped(demand, tier)
    if less is None or step < LadderStep.CAP:
        yield demand
    if less is not None:
        yield less


def capped(demand: Demand, tier: QosTier) -> Demand | None:
    """None where the tier does not allow it, or nothing would be cut."""
    sampling, most = demand.spec.sampling, tier.capped_tokens
    if most is None or not sampling.min_tokens <= most < sampling.max_tokens:
        return None
    spec = replace(demand.spec, sampling=replace(sampling, max_tokens=most))
    return replace(demand, spec=spec, output_tokens=min(demand.output_tokens, most))


def less_output_helps(refusal: Refusal) -> bool:
    return refusal.reason in LESS_OUTPUT_HELPS


def deferred(refusal: Refusal, tier: QosTier, waited_s: float) -> Deferred | None:
    """None: waiting can't help."""
    left_s = tier.patience_s - waited_s
    if refusal.hopeless or refusal.reason not in WAITING_HELPS or left_s <= 0:
        return None
    if refusal.retry_after_s is not None and refusal.retry_after_s > left_s:
        return None
    return Deferred(refusal=refusal, patience_s=left_s)


def stricter(demand: Demand, rules: LadderRules) -> Demand:
    """Judged by tighter objectives than it asks for."""
    ttft_s, tpot_s = demand.objectives.ttft_s, demand.objectives.tpot_s
    objectives = Objectives(
        ttft_s=None if ttft_s is None else ttft_s * rules.stricter,
        tpot_s=None if tpot_s is None else tpot_s * rules.stricter,
        deadline_s=demand.objectives.deadline_s,
    )
    return replace(demand, objectives=objectives)


def tripped(tier: QosTier, ladder: Ladder, now_s: float) -> Refusal:
    whose = "its" if ladder.tier is tier else f"{ladder.tier.name}'s"
    return Refusal(
        reason=RefusalReason.TIER_SHARE_EXHAUSTED,
        message=f"only the reserve of tier {tier.name} is served until {whose} latencies are "
        "inside the objectives again",
        retry_after_s=max(0.0, ladder.falls_in_s(now_s)),
    )


EXPECTED = 0.5
"""The quantile of its tier's output lengths that a request is expected to have."""


def decide(
    state: RouterState, request: Request, otherwise: Refusal, now_s: float
) -> tuple[Demand, Verdict]:
    """What it is admitted with, or why not. `otherwise` is the answer where no worker is left."""
    demand = demand_of(state, request, request.spec, now_s)
    if request.admitted:
        return demand, _judge(state, request, demand, otherwise, now_s)
    tier = request.tier
    ladder = state.ladders.highest(tier)
    if ladder is not None and ladder.step is LadderStep.TRIP and not _in_reserve(state, request):
        return demand, tripped(tier, ladder, now_s)
    refusal = otherwise
    for way in ways(demand, tier, LadderStep.NORMAL if ladder is None else ladder.step):
        if refusal is not otherwise and _is_alike(state, demand, way):
            break
        judged = way if ladder is None else stricter(way, ladder.rules)
        verdict = _judge(state, request, judged, otherwise, now_s)
        if not isinstance(verdict, Refusal):
            return way, verdict
        refusal = verdict if ladder is None else replace(verdict, hopeless=False)
        if not less_output_helps(refusal):
            break
    waited_s = state.waiting.waited_s(request.request_id, now_s)
    waits = deferred(refusal, tier, waited_s) or _held_for(request, refusal, waited_s)
    return demand, waits or refusal


def appraise(state: RouterState, submitted: GenerationRequest, now_s: float) -> Refusal | None:
    """Why it would be refused if it came now; None: it would not. It changes nothing."""
    request = Request(
        submitted=submitted,
        tier=state.tiers[submitted.qos_tier],
        ledger=Ledger(before_s=submitted.phases_s, submitted_s=now_s),
        attempt=0,
    )
    _, verdict = decide(state, request, NO_CAPACITY, now_s)
    match verdict:
        case Admitted():
            return None
        case Deferred(refusal=refusal):
            return refusal
        case Refusal():
            return verdict


def _held_for(request: Request, refusal: Refusal, waited_s: float) -> Deferred | None:
    """Who comes back in time may wait for a place that is about to be free."""
    left_s = CLAIM_PATIENCE_S - waited_s
    if request.promise is None or refusal.reason not in WAITING_HELPS or left_s <= 0:
        return None
    return Deferred(refusal=refusal, patience_s=left_s)


def _is_alike(state: RouterState, demand: Demand, less: Demand) -> bool:
    """Less output makes no difference: no more was expected, and each worker could serve it."""
    expected = (less.output_tokens, less.decodes) == (demand.output_tokens, demand.decodes)
    return expected and demand.longest_tokens <= state.workers.least_tokens


def _in_reserve(state: RouterState, request: Request) -> bool:
    """Whether the tier's reserved slots have room for it, beside the requests of other routers. One
    request is always let through: only that can show that latencies are better."""
    held = state.workers.held(request.tier.name)
    own = request.tier.own_places(state.workers.decode_places)
    return held == 0 or held + len(request.choices) <= own


def _judge(
    state: RouterState, request: Request, demand: Demand, otherwise: Refusal, now_s: float
) -> Verdict:
    """A request that was admitted once is taken wherever a slot is free."""
    objections = state.quarantine.objections(request.avoided, now_s)
    shut: Collection[Incarnation] = request.tried
    if state.waiting.displaced and (kept := _kept(state, request, demand)):
        shut, otherwise = kept | request.tried, BEHIND_DISPLACED
    choice = state.workers.choice(demand, shut, objections, state.forecast)
    policy = Capacity() if request.admitted else state.admitting
    candidates = _candidates(state, demand, choice, now_s)
    return policy.judge(demand, candidates, otherwise, state.forecast, now_s)


def _kept(state: RouterState, request: Request, demand: Demand) -> frozenset[Incarnation]:
    """The workers whose free places displaced requests need."""
    if demand.is_prompt_only:
        return frozenset()
    kept = state.waiting.kept(request.tier.priority + (not request.admitted))
    found = ((state.workers.get(worker), places) for worker, places in kept.items())
    return frozenset(
        view.incarnation
        for view, places in found
        if view is not None and view.free_places - demand.choices < places
    )


def failover_patience_s(state: RouterState, request: Request, now_s: float) -> float:
    """How long an admitted request waits for another worker."""
    deadline_s = request.objectives.deadline_s
    if deadline_s is None:
        return state.failover_patience_s
    return deadline_s - request.ledger.age_s(now_s)


def line_of(state: RouterState, request: Request, demand: Demand) -> WaitingLine:
    workers = usable(state, demand) if request.admitted else None
    return WaitingLine(request.tier.priority, request.tier.name, workers)


def usable(state: RouterState, demand: Demand) -> frozenset[Incarnation]:
    """The workers that could hold the request, once they have a place for it."""
    choice = state.workers.choice(demand, (), trusted, state.forecast)
    paired = choice.decodes if choice.prefills or state.workers.decode_alone else ()
    return frozenset(view.incarnation for view in (*choice.alone, *paired))


def _candidates(
    state: RouterState, demand: Demand, choice: WorkerChoice, now_s: float
) -> Iterator[Candidate]:
    """With less output than was asked for, the same ways are the best ones, as long as no more
    workers could serve it."""
    known = demand.known
    assert known is not None, "a demand of another decision"
    fitting = [view.incarnation for view in (*choice.prefills, *choice.decoders)]
    if known.fitting != fitting:
        suggested = state.placing.candidates(demand, choice, now_s)
        known.more_ways = choice.acceptable(suggested)
        known.fitting, known.ways = fitting, []
    yield from known.ways
    for way in known.more_ways:
        known.ways.append(way)
        yield way


def demand_of(state: RouterState, request: Request, spec: RequestSpec, now_s: float) -> Demand:
    """What the request asks of the workers, if it runs as `spec` says."""
    return Demand(
        spec=spec,
        output_tokens=_output_tokens(state, request, spec),
        held=HeldPrefixes(spec, state.directory, request.chains),
        objectives=request.objectives,
        tier=request.tier,
        tiers=state.tiers,
        waited_s=request.ledger.age_s(now_s),
        promised=_promised_soon(state, request, now_s),
        line=_promised_line(state, request),
        known=Known(),
        displaced=request.admitted and request.state is RequestState.SEEKING,
    )


def _output_tokens(state: RouterState, request: Request, spec: RequestSpec) -> int:
    """Tokens that each choice is expected to have still to come."""
    since = [len(spec.resumed_by(c.choice)) for c in request.choices if not c.finished]
    emitted = len(spec.emitted_ids) + min(since, default=0)
    most = spec.sampling.max_tokens
    expected = state.lengths.quantile(request.tier.name, EXPECTED, max_tokens=most, emitted=emitted)
    return max(1, expected - emitted)


def _promised_soon(state: RouterState, request: Request, now_s: float) -> Promised:
    """Work that goes before it at each worker, though it is not there yet."""
    if request.admitted or request.promise is not None or not state.promises:
        return NOTHING_PROMISED
    all_by_own = state.workers.all_by_own()
    soon = state.promises.soon(now_s, request.tier.priority, all_by_own)
    return state.workers.per_worker(soon)


def _promised_line(state: RouterState, request: Request) -> Promised:
    """Work that goes before it if it has to come back."""
    if request.admitted or not state.promises:
        return NOTHING_PROMISED
    return state.workers.per_worker(state.promises.line(request.tier.priority))
