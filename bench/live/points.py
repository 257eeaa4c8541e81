"""One rate under one policy: what was offered, and what came of it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.live.outcome import Objectives, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """The same arrivals in the simulator."""

    goodput_per_s: float
    admitted: int
    attainment: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """`ladder`: it stood beside the policy. `factor` is the rate by the capacity, `attainment` over
    those admitted, `goodput_per_s` over `seconds` of arrivals. TTFT and TPOT are those of admitted
    requests, `refusal_p99_s` is between the router's `received` and `refused`: the bound of a
    histogram's bucket."""

    policy: str
    ladder: bool
    own_ends: bool
    routers: int
    factor: float
    rate_per_s: float
    seconds: float
    offered: int
    admitted: int
    good: int
    refused: dict[str, int]
    late_first: int
    late_others: int
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p99_s: float | None
    refusal_p99_s: float | None
    simulated: Simulated | None = None

    @property
    def kind(self) -> str:
        """What decided, and whether it could know lengths."""
        return kind_of(self.policy, own_ends=self.own_ends)

    @property
    def goodput_per_s(self) -> float:
        return self.good / self.seconds

    @property
    def attainment(self) -> float:
        return self.good / self.admitted if self.admitted else 1.0

    @property
    def broken(self) -> float:
        """Of all that were offered: taken, and not in time."""
        return (self.admitted - self.good) / self.offered if self.offered else 0.0


def kind_of(policy: str, *, own_ends: bool) -> str:
    """An oracle is told each output's length, as max_tokens that every output reaches."""
    return policy if own_ends else f"{policy}, oracle"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    policy: str
    ladder: bool
    own_ends: bool
    routers: int
    factor: float
    rate_per_s: float
    seconds: float


def point(
    load: Load, outcomes: Sequence[Outcome], objectives: Objectives, refusal_p99_s: float | None
) -> Point:
    admitted = [one for one in outcomes if one.ended != "refused"]
    firsts = [one.first_s for one in admitted]
    later = [one.tpot_s for one in admitted]
    return Point(
        policy=load.policy,
        ladder=load.ladder,
        own_ends=load.own_ends,
        routers=load.routers,
        factor=load.factor,
        rate_per_s=load.rate_per_s,
        seconds=load.seconds,
        offered=len(outcomes),
        admitted=len(admitted),
        good=sum(one.is_good(objectives) for one in outcomes),
        refused=dict(Counter(one.reason for one in outcomes if one.ended == "refused")),
        late_first=sum(s is None or s > objectives.ttft_s for s in firsts),
        late_others=sum(s is not None and s > objectives.tpot_s for s in later),
        ttft_p50_s=quantile(firsts, 0.5),
        ttft_p99_s=quantile(firsts, 0.99),
        tpot_p50_s=quantile(later, 0.5),
        tpot_p99_s=quantile(later, 0.99),
        refusal_p99_s=refusal_p99_s,
    )


def bucket_quantile(
    before: Mapping[float, float], after: Mapping[float, float], q: float
) -> float | None:
    """The bound that a share `q` of what came between two readings of a histogram is not above."""
    counts = {bound: count - before.get(bound, 0.0) for bound, count in after.items()}
    total = max(counts.values(), default=0.0)
    return (
        min((b for b, count in counts.items() if count >= q * total), default=None)
        if total
        else None
    )


def quantile(values: Iterable[float | None], q: float) -> float | None:
    known = sorted(value for value in values if value is not None)
    return known[min(len(known) - 1, int(q * len(known)))] if known else None
