"""Where a request goes, or why it goes nowhere. Pure; part of a router's core.

Placement suggests, admission judges; as asked first, then as the request's tier lets it degrade.

What is tried before a new request is refused, where its tier allows it: less output, then a
wait; and what its ladder takes from it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvrelay.qos import LadderRules, QosTier, QosTiers
from kvrelay.types import Objectives, RequestSpec
from router.core.load.output_lengths import OutputLengths
from router.core.policy.admission import AdmissionPolicy, Capacity, Deferred, Verdict
from router.core.policy.forecast import Forecast
from router.core.policy.placement import PlacementPolicy, WorkerChoice
from router.core.request import Request
from router.core.state.candidate import Candidate
from router.core.state.demand import Demand, HeldPrefixes, Known
from router.core.state.directory import Directory
from router.core.state.ladder import Ladder, Ladders, LadderStep
from router.core.state.promises import NOTHING_PROMISED, Promised, Promises, Refusal
from router.core.state.quarantine import Quarantine
from router.core.state.waiting import WaitingRoom
from router.core.workers import Workers

WAITING_HELPS = {"tpot_unreachable", "kv_exhausted", "slots_exhausted", "tier_share_exhausted"}
"""Not with a time to first token, which the wait counts to."""


def ways(demand: Demand, tier: QosTier, step: LadderStep) -> Iterator[Demand]:
    """As asked, then with less output; once the ladder caps, only that."""
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
    return refusal.reason in ("tpot_unreachable", "deadline_unreachable", "kv_exhausted")


def deferred(refusal: Refusal, tier: QosTier, waited_s: float) -> Deferred | None:
    """None: waiting for so long would be in vain."""
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
        reason="tier_share_exhausted",
        message=f"only the reserve of tier {tier.name} is served until {whose} latencies are "
        "inside the objectives again",
        retry_after_s=max(0.0, ladder.falls_in_s(now_s)),
    )


EXPECTED = 0.5
"""The quantile of its tier's output lengths that a request is expected to have."""
SOON_S = 0.5
"""Who is to come back later than this finds the worker done with whoever is taken now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deciding:
    """Reads what the core knows, and changes none of it but a request's cap."""

    placing: PlacementPolicy
    admitting: AdmissionPolicy
    workers: Workers
    requests: dict[str, Request]
    directory: Directory
    lengths: OutputLengths
    promises: Promises
    waiting: WaitingRoom
    quarantine: Quarantine
    ladders: Ladders
    forecast: Forecast
    tiers: QosTiers

    def consider(
        self, request: Request, otherwise: Refusal, now_s: float
    ) -> tuple[Demand, Verdict]:
        """As asked, or if need be as its tier allows: with less output, or later."""
        if request.admitted:
            demand = self.demand(request, request.spec, now_s)
            return demand, self._judge(request, demand, otherwise, now_s)
        request.capped_tokens = None
        demand, tier = self.demand(request, request.spec, now_s), request.tier
        ladder = self.ladders.highest(tier)
        if ladder is not None and ladder.step is LadderStep.TRIP and not self._in_reserve(request):
            return demand, tripped(tier, ladder, now_s)
        refusal = otherwise
        for way in ways(demand, tier, LadderStep.NORMAL if ladder is None else ladder.step):
            if refusal is not otherwise and self._is_alike(demand, way):
                break
            judged = way if ladder is None else stricter(way, ladder.rules)
            verdict = self._judge(request, judged, otherwise, now_s)
            if not isinstance(verdict, Refusal):
                request.cap(way.spec.sampling.max_tokens)
                return way, verdict
            refusal = verdict if ladder is None else replace(verdict, hopeless=False)
            if not less_output_helps(refusal):
                break
        waited_s = self.waiting.waited_s(request.request_id, now_s)
        return demand, deferred(refusal, tier, waited_s) or refusal

    def _is_alike(self, demand: Demand, less: Demand) -> bool:
        """Less output makes no difference: no more was expected, and each worker could serve it."""
        expected = (less.output_tokens, less.decodes) == (demand.output_tokens, demand.decodes)
        return expected and demand.longest_tokens <= self.workers.least_tokens

    def _in_reserve(self, request: Request) -> bool:
        """Whether the tier's own share of decode places has room for it, beside what other routers
        have sent. One request is always let through: nothing else shows that things are better."""
        held = self.workers.held(request.tier.name)
        own = request.tier.own_places(self.workers.decode_places)
        return held == 0 or held + len(request.choices) <= own

    def _judge(self, request: Request, demand: Demand, otherwise: Refusal, now_s: float) -> Verdict:
        """What was admitted once is taken wherever there is a place for it."""
        objections = self.quarantine.objections(request.avoided, now_s)
        choice = self.workers.choice(demand, request.tried, objections, self.forecast)
        policy = Capacity() if request.admitted else self.admitting
        ways = self._ways(demand, choice, now_s)
        return policy.judge(demand, ways, otherwise, self.forecast, now_s)

    def _ways(self, demand: Demand, choice: WorkerChoice, now_s: float) -> Iterator[Candidate]:
        """With less output than was asked for, the same ways are the best ones, as long as no more
        workers could serve it."""
        known = demand.known
        assert known is not None, "a demand of another decision"
        fitting = [view.incarnation for view in (*choice.prefills, *choice.decoders)]
        if known.fitting != fitting:
            suggested = self.placing.candidates(demand, choice, now_s)
            known.more_ways = choice.acceptable(suggested)
            known.fitting, known.ways = fitting, []
        yield from known.ways
        for way in known.more_ways:
            known.ways.append(way)
            yield way

    def demand(self, request: Request, spec: RequestSpec, now_s: float) -> Demand:
        return Demand(
            spec=spec,
            output_tokens=self._output_tokens(request, spec),
            held=HeldPrefixes(spec, self.directory),
            objectives=request.objectives,
            tier=request.tier,
            tiers=self.tiers,
            waited_s=request.ledger.age_s(now_s),
            promised=self._soon(request, now_s),
            line=self._line(request),
            known=Known(),
        )

    def _output_tokens(self, request: Request, spec: RequestSpec) -> int:
        """Of each choice, still to come."""
        since = (len(spec.resumed_by(c.choice)) for c in request.choices if not c.finished)
        emitted = len(spec.emitted_ids) + min(since, default=0)
        most = spec.sampling.max_tokens
        expected = self.lengths.quantile(
            request.tier.name, EXPECTED, max_tokens=most, emitted=emitted
        )
        return max(1, expected - emitted)

    def _soon(self, request: Request, now_s: float) -> Promised:
        """What goes before it at each worker though it isn't there yet."""
        if request.admitted or request.promise is not None or not self.promises:
            return NOTHING_PROMISED
        soon = self.promises.before(now_s + SOON_S, request.tier.priority)
        return self.workers.per_worker(soon.times(self.workers.all_by_own()))

    def _line(self, request: Request) -> Promised:
        """And if it has to come back."""
        if request.admitted or not self.promises:
            return NOTHING_PROMISED
        return self.workers.per_worker(self.promises.line(request.tier.priority))
