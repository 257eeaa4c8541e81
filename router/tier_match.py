"""Which QoS tier a request belongs to, by what came with it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class TierMatch:
    """`header` is the HTTP header or gRPC metadata that names the tier.

    # values: of the header |-> tier
    # api_keys: bearer token |-> tier
    """

    header: str = "x-customer-tier"
    values: Mapping[str, str] = field(default_factory=dict)
    api_keys: Mapping[str, str] = field(default_factory=dict, repr=False)

    def tier_of(self, headers: Mapping[str, str]) -> str:
        """By lower-case names; empty for one that matches none. A known API key decides before
        the header, which anyone could set."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and token in self.api_keys:
            return self.api_keys[token]
        return self.values.get(headers.get(self.header, ""), "")


NO_MATCH = TierMatch()
