"""Reports of one trace under several values of one key, line by line. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from cluster.sim.report import Report, Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One figure of every report, in their order; None where a report lacks it."""

    name: str
    values: tuple[float | None, ...]

    @property
    def ratio(self) -> float | None:
        """The last by the first."""
        first, last = self.values[0], self.values[-1]
        return last / first if first and last is not None else None


FIGURES: tuple[tuple[str, Callable[[Report], float | None]], ...] = (
    ("offered", lambda one: one.offered),
    ("completed", lambda one: one.completed),
    ("refused", lambda one: sum(one.refused.values())),
    ("failed", lambda one: sum(one.failed.values())),
    ("attainment, %", lambda one: 100 * one.attainment),
    ("goodput/s", lambda one: one.goodput_per_s),
    ("output tokens/s", lambda one: one.output_tokens_per_s),
    ("prefix hits, %", lambda one: 100 * one.hit_rate),
    ("KV moved, GB", lambda one: one.moved_bytes / 1e9),
    ("preempted", lambda one: one.preemptions),
    ("$ per million tokens", lambda one: one.cost.price_per_million_tokens),
)
LATENCIES: tuple[tuple[str, Callable[[Report], Spread | None]], ...] = (
    ("TTFT", lambda one: one.ttft_s),
    ("TPOT", lambda one: one.tpot_s),
    ("E2E", lambda one: one.e2e_s),
)
QUANTILES: tuple[tuple[str, Callable[[Spread], float]], ...] = (
    ("mean", lambda spread: spread.mean),
    ("p50", lambda spread: spread.p50),
    ("p99", lambda spread: spread.p99),
)


def lines(reports: Sequence[Report]) -> list[Line]:
    found = [Line(name=name, values=tuple(map(figure, reports))) for name, figure in FIGURES]
    return [*found, *_latencies(reports), *_pools(reports)]


def _latencies(reports: Sequence[Report]) -> list[Line]:
    found = []
    for kind, spread_of in LATENCIES:
        spreads = [spread_of(one) for one in reports]
        for name, quantile in QUANTILES:
            values = tuple(None if s is None else 1000 * quantile(s) for s in spreads)
            found.append(Line(name=f"{kind} {name}, ms", values=values))
    return found


def _pools(reports: Sequence[Report]) -> list[Line]:
    """How busy each pool was; a report may have fewer pools."""
    found = []
    for index, pools in enumerate(zip_longest(*(one.pools for one in reports))):
        role = next(pool.role for pool in pools if pool is not None)
        busy = tuple(None if pool is None else 100 * pool.utilisation for pool in pools)
        found.append(Line(name=f"pool {index} ({role}) busy, %", values=busy))
    return found
