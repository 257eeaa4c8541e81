"""The `qos` section of a cluster file. Pure."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from cluster.config.types import AutoBool, Count, Name, Seconds, Section


class Degrade(Section):
    """Measures to take before a request of the tier is refused."""

    max_tokens: Count | None = None
    """Cut its output to this many tokens; null: never."""
    defer: Seconds | None = None
    """Let it wait at the router for this long; null: not at all."""


class TierSection(Section):
    """A class of requests. Its objectives hold for requests that have none of their own."""

    priority: Annotated[int, Field(ge=0)] = 0
    """Lower goes first."""
    share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Reserved share of prefill time and of decode slots. Other tiers may borrow it while it is
    unused."""
    ttft: Seconds | None = None
    """Time to first token."""
    tpot: Seconds | None = None
    """Mean time per token after the first."""
    degrade: Degrade = Degrade()
    default: bool = False
    """true: requests that match no tier belong here. Exactly one tier has it."""
    match: tuple[str, ...] = ()
    """Values of the header that mean this tier, besides its name."""


_Share = Annotated[float, Field(gt=0, le=1)]


class LadderSection(Section):
    """Degradation levels of a tier with objectives, used while its latencies exceed them. First
    admission is stricter, then output is cut where `degrade.max_tokens` allows it, then only the
    tier's reserved share is served."""

    enabled: AutoBool = None
    """auto: true, unless router.admission.policy is none."""
    window: Seconds = 60.0
    """Latencies older than this don't count."""
    hold: Seconds = 10.0
    """Least time between two levels up."""
    calm: Seconds = 30.0
    """For this long no more than `missed` of the requests must miss an objective before one level
    down."""
    stricter: _Share = 0.85
    """On the first level a request must be predicted to need at most this share of its
    objectives."""
    missed: _Share = 0.025
    """The share of requests that may miss an objective, which is what admission itself lets
    through."""
    tail: Annotated[float, Field(ge=1)] = 2.0
    """The last level is for requests that take this many times their objective."""


class Qos(Section):
    """Tiers of service. Without any, all requests are alike."""

    header: str = "x-customer-tier"
    """The HTTP header, or gRPC metadata, that names a request's tier."""
    tiers: dict[Name, TierSection] = Field(default_factory=dict)
    ladder: LadderSection = LadderSection()
    tenant_weights: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Inside a tier tenants get prefill time in proportion to these; 1 where none is given."""

    @field_validator("header")
    @classmethod
    def _lower_case(cls, given: str) -> str:
        if not re.fullmatch(r"[a-z0-9][a-z0-9_.-]*", given):
            raise ValueError("the name of a header in lower case")
        if given in ("authorization", "x-api-key") or given.startswith("grpc-"):
            raise ValueError("another header: that one has a meaning of its own")
        return given

    @field_validator("tiers")
    @classmethod
    def _shares_fit(cls, given: dict[str, TierSection]) -> dict[str, TierSection]:
        total = sum(tier.share for tier in given.values())
        if total > 1 + 1e-9:
            raise ValueError(f"shares that sum to 1 at most, not {total:g}")
        return given

    @model_validator(mode="after")
    def _one_default(self) -> Qos:
        defaults = [name for name, tier in self.tiers.items() if tier.default]
        if self.tiers and len(defaults) != 1:
            named = ", ".join(defaults) or "none"
            raise ValueError(f"default: true in exactly one tier, not in {named}")
        return self

    @model_validator(mode="after")
    def _each_match_once(self) -> Qos:
        """A tier's name is one of its values."""
        matches = [v for name, tier in self.tiers.items() for v in {name, *tier.match}]
        if len({*matches}) < len(matches):
            raise ValueError("match: each value in one tier only")
        return self
