"""QoS tiers: their priority, objectives and shares. Pure.

A tier always has its own share; other tiers may borrow the unused part.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.types import NO_OBJECTIVES, Objectives

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class QosTier:
    """A lower `priority` goes first. `share` (0 to 1) of prefill time and of decode slots is
    reserved. `objectives` hold for requests without their own. Before a request is refused, its
    output may be cut to `capped_tokens`, and it may wait for `patience_s`."""

    name: str
    priority: int = 0
    share: float = 0.0
    objectives: Objectives = NO_OBJECTIVES
    capped_tokens: int | None = None
    patience_s: float = 0.0

    def own_places(self, places: int) -> int:
        """The slots, of this many decode slots, that always belong to the tier."""
        return int(self.share * places + _ROUNDING)


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderRules:
    """When a router tightens admission of a tier whose latencies exceed its objectives
    (`router.core.state.ladder`).

    Requests of the last `window_s` count. One level up: more than `missed` of them miss an
    objective, beyond doubt. For the last level, to trip, so many must take `tail` times as long.
    The next level comes `hold_s` later at the earliest. One level down: `calm_s` in which no more
    miss one. On a raised level, requests are judged by `stricter` times their objectives.
    """

    window_s: float = 60.0
    hold_s: float = 10.0
    calm_s: float = 30.0
    stricter: float = 0.85
    missed: float = 0.025
    tail: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QosTiers:
    """`default` names the tier of requests that match none. `ladder` None: no tier is tightened."""

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
