"""A request's objectives and QoS tier, from its fields and headers. Pure.

Clients write objectives in milliseconds. The tier is the one that the request names, else the one
that its headers mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

from kvrelay.errors import InvalidRequest, NotAllowed
from kvrelay.qos import ONE_TIER, QosTiers
from kvrelay.types import Objectives

MOST_MS = 24 * 3600 * 1000
"""More than a day is a mistake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveNames:
    """The names of the objectives in one API."""

    ttft: str
    tpot: str
    deadline: str


HEADERS = ObjectiveNames(ttft="x-slo-ttft-ms", tpot="x-slo-tpot-ms", deadline="x-deadline-ms")
FIELDS = ObjectiveNames(ttft="slo.ttft_ms", tpot="slo.tpot_ms", deadline="slo.deadline_ms")


def objectives_of(given: Mapping[str, str | float], names: ObjectiveNames) -> Objectives:
    """`given`: by name; missing ones are None. Raises InvalidRequest that names the wrong one."""
    return Objectives(
        ttft_s=_seconds(given, names.ttft),
        tpot_s=_seconds(given, names.tpot),
        deadline_s=_seconds(given, names.deadline),
    )


def _seconds(given: Mapping[str, str | float], name: str) -> float | None:
    if name not in given:
        return None
    value_ms = _number(given[name])
    if value_ms is None or not 0 < value_ms <= MOST_MS:
        raise InvalidRequest(
            f"{name} must be milliseconds, over 0 and at most {MOST_MS}, not {given[name]}",
            param=name,
        )
    return value_ms / 1000


def _number(given: str | float) -> float | None:
    try:
        value = float(given)
    except ValueError:
        return None
    return value if isfinite(value) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TierMatch:
    """`header` is the HTTP header or gRPC metadata that names the tier. Names of headers are in
    lower case.

    # values: of the header |-> tier
    """

    header: str = "x-customer-tier"
    values: Mapping[str, str] = field(default_factory=dict)

    def tier_of_header(self, headers: Mapping[str, str]) -> str:
        """Empty for a value of no tier."""
        return self.values.get(headers.get(self.header, "").strip(), "")


NO_MATCH = TierMatch()


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRules:
    """The tiers of one cluster."""

    tiers: QosTiers = ONE_TIER
    match: TierMatch = NO_MATCH

    def tier_of(self, asked: str, headers: Mapping[str, str], allowed: Sequence[str] = ()) -> str:
        """`asked` is the request's own field, empty if absent. `allowed`: the tiers of its API key,
        the one of requests that name none first; empty: all. Names of headers are in lower case.
        Raises InvalidRequest for an unknown tier, NotAllowed for one that the key may not use."""
        if asked and asked not in self.tiers:
            names = ", ".join(allowed or (tier.name for tier in self.tiers.tiers))
            raise InvalidRequest(f"tier must be one of {names}, not {asked}", param="tier")
        named = asked or self.match.tier_of_header(headers)
        if named and allowed and named not in allowed:
            names = ", ".join(allowed)
            raise NotAllowed(
                f"this API key may use the tiers {names}, not {named}",
                code="tier_not_allowed",
                param="tier" if asked else self.match.header,
            )
        return named or (allowed[0] if allowed else self.tiers.default)


ONE_FOR_ALL = TierRules()
