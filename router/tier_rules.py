"""The QoS tier of a request: the one that it names, else what its headers say. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvrelay.errors import InvalidRequest
from kvrelay.qos import ONE_TIER, QosTiers
from router.tier_match import NO_MATCH, TierMatch


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
