"""What became of each tier's requests in one phase of a load. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bench.live.offered import Offered
from bench.live.outcome import Objectives, Outcome
from bench.live.points import quantile


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPoint:
    """Latencies are those of requests that were served. `lost` are neither served nor refused,
    `good` kept the `objectives` of their tier."""

    tier: str
    offered: int
    served: int
    lost: int
    good: int
    refused: dict[str, int]
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p99_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """`preemptions`: sequences that lost their place or blocks, and went on later."""

    name: str
    seconds: float
    preemptions: int
    tiers: list[TierPoint]

    def tier(self, name: str) -> TierPoint:
        return next(one for one in self.tiers if one.tier == name)


def tier_points(
    offered: Sequence[Offered], outcomes: Sequence[Outcome], objectives: dict[str, Objectives]
) -> list[TierPoint]:
    """Of the tiers that sent any."""
    by_tier: dict[str, list[Outcome]] = {tier: [] for tier in objectives}
    for one, outcome in zip(offered, outcomes, strict=True):
        by_tier[one.tier].append(outcome)
    return [_point(tier, own, objectives[tier]) for tier, own in by_tier.items() if own]


def _point(tier: str, outcomes: Sequence[Outcome], objectives: Objectives) -> TierPoint:
    served = [one for one in outcomes if one.ended == "done"]
    firsts, later = [one.first_s for one in served], [one.tpot_s for one in served]
    return TierPoint(
        tier=tier,
        offered=len(outcomes),
        served=len(served),
        lost=sum(one.ended not in ("done", "refused") for one in outcomes),
        good=sum(one.is_good(objectives) for one in outcomes),
        refused=dict(Counter(one.reason for one in outcomes if one.ended == "refused")),
        ttft_p50_s=quantile(firsts, 0.5),
        ttft_p99_s=quantile(firsts, 0.99),
        tpot_p50_s=quantile(later, 0.5),
        tpot_p99_s=quantile(later, 0.99),
    )
