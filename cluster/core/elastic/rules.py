"""How workers follow the offered work. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TotalRules:
    """`workers`: of both roles together, where workers change roles, so that only the sum counts;
    None: each role has its own. Workers leave once no more were needed for `cooldown_s`."""

    prefill: Bounds
    decode: Bounds
    workers: Bounds | None = None
    cooldown_s: float = 300.0
