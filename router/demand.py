"""What a request asks of the workers, as placement and admission see it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from kvrelay.qos import ONE_TIER, QosTier, QosTiers
from kvrelay.types import NO_OBJECTIVES, Incarnation, Objectives, RequestSpec
from router.candidate import Arrival, Candidate, PromptPrediction, PromptWay, Way
from router.prefixes import HeldPrefixes
from router.promises import NOTHING_PROMISED, Promised


@dataclass(slots=True)
class Known:
    """What was found out in one decision, at one moment: it is the same for several of its ways."""

    prompts: dict[PromptWay, PromptPrediction] = field(default_factory=dict)
    arrivals: dict[Way, Arrival] = field(default_factory=dict)
    fitting: list[Incarnation] | None = None  # the workers for which these ways were suggested
    ways: list[Candidate] = field(default_factory=list)
    more_ways: Iterator[Candidate] = field(default_factory=lambda: iter(()))


@dataclass(frozen=True, kw_only=True)
class Demand:
    """`output_tokens` is how many each choice will probably have. It is of one `tier` of the
    `tiers`. `waited_s` of its time to first token are over. What others were `promised` for the
    time that it would wait goes before it, for each prefill worker and each decode worker; the
    `line` is all that was promised, which goes before it if it has to come back. `known` is shared
    by all ways that are looked at in one decision."""

    spec: RequestSpec
    output_tokens: int
    held: HeldPrefixes
    objectives: Objectives = NO_OBJECTIVES
    tier: QosTier = ONE_TIER.tiers[0]
    tiers: QosTiers = ONE_TIER
    waited_s: float = 0.0
    promised: Promised = NOTHING_PROMISED
    line: Promised = NOTHING_PROMISED
    known: Known | None = None

    @cached_property
    def priority(self) -> int:
        """A lower one goes first."""
        return self.tier.priority

    @cached_property
    def prompt_tokens(self) -> int:
        """To be computed, with those that earlier attempts emitted."""
        return self.spec.context_tokens

    @property
    def decodes(self) -> bool:
        """It may have more than its first token."""
        return self.spec.sampling.max_tokens - len(self.spec.emitted_ids) > 1

    @property
    def is_prompt_only(self) -> bool:
        """It has no output: nothing is handed over."""
        return not self.spec.sampling.max_tokens

    @cached_property
    def choices(self) -> int:
        return self.spec.sampling.n

    @cached_property
    def mean_tokens(self) -> int:
        """A choice's context while it decodes, on average."""
        return self.prompt_tokens + (self.output_tokens + 1) // 2

    @cached_property
    def kv_tokens(self) -> int:
        """The contexts of all choices."""
        return self.choices * self.mean_tokens

    @cached_property
    def longest_tokens(self) -> int:
        """Prompt and output, if it generates all it may."""
        return len(self.spec.prompt_ids) + self.spec.sampling.max_tokens
