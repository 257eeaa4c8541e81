"""Which QoS tier a request belongs to, by what came with it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
