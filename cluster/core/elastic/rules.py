"""How workers follow the offered work. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cluster.core.elastic.fleet import Counts
from kvrelay.types import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRules:
    """At least so many workers keep each role. A change serves at least `gain` more than is served
    now, as a share of that, and comes `dwell_s` after the one before. What is offered is looked at
    over `window_s`."""

    least_prefill: int = 1
    least_decode: int = 1
    gain: float = 0.05
    dwell_s: float = 15.0
    window_s: float = 20.0

    def with_fixed(self, *, prefill: int, decode: int) -> RoleRules:
        """Beside so many workers that keep their roles."""
        return replace(
            self,
            least_prefill=max(self.least_prefill, prefill),
            least_decode=max(self.least_decode, decode),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Of a number of workers."""

    least: int
    most: int

    def clamp(self, count: int) -> int:
        return max(self.least, min(count, self.most))


@dataclass(frozen=True, slots=True)
class SizedPool:
    """Whose number of workers follows the offered work."""

    name: str
    bounds: Bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticRules:
    """`flexible`: the pools whose workers take either role. `sized`: by the role of their workers,
    None for either."""

    roles: RoleRules
    flexible: frozenset[str]
    sized: Mapping[Role | None, SizedPool]
    cooldown_s: float
    start_s: float

    def is_followed_by(self, pool: str) -> bool:
        return pool in self.flexible or any(pool == one.name for one in self.sized.values())

    def totals(self, fixed: Counts) -> TotalRules | None:
        """`fixed`: workers of pools that no rule is for; they count, and stay."""
        if None in self.sized:
            return self._of_both(self.sized[None].bounds, fixed)
        if not self.sized:
            return None
        prefill, decode = self.sized.get(Role.PREFILL), self.sized.get(Role.DECODE)
        return TotalRules(
            prefill=_beside(prefill, fixed.prefill),
            decode=_beside(decode, fixed.decode),
            cooldown_s=self.cooldown_s,
        )

    def _of_both(self, bounds: Bounds, fixed: Counts) -> TotalRules:
        most = bounds.most + fixed.workers
        least_prefill = max(self.roles.least_prefill, fixed.prefill)
        least_decode = max(self.roles.least_decode, fixed.decode)
        return TotalRules(
            prefill=Bounds(least=least_prefill, most=most - least_decode),
            decode=Bounds(least=least_decode, most=most - least_prefill),
            workers=Bounds(least=bounds.least + fixed.workers, most=most),
            cooldown_s=self.cooldown_s,
        )


def _beside(pool: SizedPool | None, fixed: int) -> Bounds:
    """Who has no such pool keeps what there is."""
    if pool is None:
        return Bounds(least=fixed, most=fixed)
    return Bounds(least=pool.bounds.least + fixed, most=pool.bounds.most + fixed)


@dataclass(frozen=True, slots=True, kw_only=True)
class TotalRules:
    """`workers`: of both roles together, where workers change roles, so that only the sum counts;
    None: each role has its own. Workers leave once no more were needed for `cooldown_s`."""

    prefill: Bounds
    decode: Bounds
    workers: Bounds | None = None
    cooldown_s: float = 300.0
