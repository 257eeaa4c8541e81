"""What is tried before a new request is refused, where its tier allows it: less output, then a
wait; and what its ladder takes from it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvrelay.qos import LadderRules, QosTier
from kvrelay.types import Objectives
from router.admitting.policy import Deferred
from router.demand import Demand
from router.ladder import Ladder, Step
from router.refusal import Refusal

WAITING_HELPS = {"tpot_unreachable", "kv_exhausted", "slots_exhausted", "tier_share_exhausted"}
"""Not with a time to first token, which the wait counts to."""


def ways(demand: Demand, tier: QosTier, step: Step) -> Iterator[Demand]:
    """As asked, then with less output; once the ladder caps, only that."""
    less = capped(demand, tier)
    if less is None or step < Step.CAP:
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
