"""Tiers of service: who goes first, what each is promised, and what it may take. Pure.

A tier's share is its own at every time; what it doesn't use is lent to the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.types import NO_OBJECTIVES, Objectives

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class QosTier:
    """A lower `priority` goes first. `share` (0 to 1) of prefill time and of decode places is
    reserved. `objectives` hold for requests that bring none. Before a request is refused, its
    output may be cut to `capped_tokens`, and it may wait for `patience_s`."""

    name: str
    priority: int = 0
    share: float = 0.0
    objectives: Objectives = NO_OBJECTIVES
    capped_tokens: int | None = None
    patience_s: float = 0.0

    def own_places(self, places: int) -> int:
        """Of so many decode places, those that are always its own."""
        return int(self.share * places + _ROUNDING)


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderRules:
    """When a router tightens a tier whose latencies leave its objectives
    (`router.core.state.ladder`).

    Latencies of the last `window_s` count. A step up: the 99th percentile is over `tolerance` times
    the objective, or the 99.9th over `tail` times it; for the last step, to trip, both over `tail`
    times as much. The next one comes `hold_s` later at the earliest. A step down:
    `calm_s` with the 99th percentile under `easing` times the objective. While it is tight,
    requests are judged by `stricter` times what they ask for.
    """

    window_s: float = 60.0
    hold_s: float = 10.0
    calm_s: float = 30.0
    stricter: float = 0.85
    easing: float = 0.95
    tolerance: float = 1.1
    tail: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QosTiers:
    """`default` names the tier of requests that match none. `ladder` None: none tightens."""

    tiers: tuple[QosTier, ...] = (QosTier(name="default"),)
    default: str = "default"
    ladder: LadderRules | None = LadderRules()

    def __contains__(self, name: str) -> bool:
        return any(tier.name == name for tier in self.tiers)

    def __getitem__(self, name: str) -> QosTier:
        """The tier of this name, else the default one."""
        found = {tier.name: tier for tier in self.tiers}
        return found.get(name) or found[self.default]


ONE_TIER = QosTiers()
