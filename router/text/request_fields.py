"""Objectives as a client writes them, in milliseconds -> as the router uses them. Pure.

Which QoS tier a request belongs to, by what came with it. Pure.

The QoS tier of a request: the one that it names, else what its headers say. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite

from kvrelay.errors import InvalidRequest
from kvrelay.qos import ONE_TIER, QosTiers
from kvrelay.types import Objectives

MOST_MS = 24 * 3600 * 1000
"""Nobody means more than a day."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveNames:
    """What a public face calls each of them."""

    ttft: str
    tpot: str
    deadline: str


HEADERS = ObjectiveNames(ttft="x-slo-ttft-ms", tpot="x-slo-tpot-ms", deadline="x-deadline-ms")
FIELDS = ObjectiveNames(ttft="slo.ttft_ms", tpot="slo.tpot_ms", deadline="slo.deadline_ms")


def objectives_of(given: Mapping[str, str | float], names: ObjectiveNames) -> Objectives:
    """`given` by name; those not in it are None. Raises InvalidRequest that names the one at
    fault."""
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
    """`header` is the HTTP header or gRPC metadata that names the tier. A known API key decides
    before it, which anyone could set; an unknown one decides nothing. Headers by lower-case names.

    # values: of the header |-> tier
    # api_keys: bearer token |-> tier
    """

    header: str = "x-customer-tier"
    values: Mapping[str, str] = field(default_factory=dict)
    api_keys: Mapping[str, str] = field(default_factory=dict, repr=False)

    def tier_of_key(self, headers: Mapping[str, str]) -> str:
        """Empty without a bearer token that is known."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        return self.api_keys.get(token.strip(), "") if scheme.lower() == "bearer" else ""

    def tier_of_header(self, headers: Mapping[str, str]) -> str:
        """Empty for a value that means no tier."""
        return self.values.get(headers.get(self.header, "").strip(), "")


NO_MATCH = TierMatch()


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRules:
    """Of one cluster."""

    tiers: QosTiers = ONE_TIER
    match: TierMatch = NO_MATCH

    def tier_of(self, asked: str, headers: Mapping[str, str]) -> str:
        """`asked` by the request's own field; empty: it doesn't say. Headers by lower-case names.
        Raises InvalidRequest for a tier that isn't there, or isn't that of its API key."""
        keyed = self.match.tier_of_key(headers)
        if asked and asked not in self.tiers:
            names = ", ".join(tier.name for tier in self.tiers.tiers)
            raise InvalidRequest(f"tier must be one of {names}, not {asked}", param="tier")
        if asked and keyed and asked != keyed:
            raise InvalidRequest(
                f"tier is {asked}, but this API key is of tier {keyed}: leave it out", param="tier"
            )
        return asked or keyed or self.match.tier_of_header(headers) or self.tiers.default


ONE_FOR_ALL = TierRules()
