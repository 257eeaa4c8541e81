"""Which prompts the workers of a pool compute: `workers[].takes` of a cluster file. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import inf

from pydantic import model_validator

from cluster.config.types import Count, Name, Section
from kvrelay.types import PromptRule


class Takes(Section):
    """Prompts by their length, in tokens, and by their QoS tier. A prompt that no worker takes goes
    to any of those that are there."""

    min_prompt_tokens: Count | None = None
    """null: no prompt is too short."""
    max_prompt_tokens: Count | None = None
    """null: none is too long."""
    tiers: tuple[Name, ...] = ()
    """Names of qos.tiers; none: those of every tier."""

    @model_validator(mode="after")
    def _is_a_range(self) -> Takes:
        least, most = self.min_prompt_tokens, self.max_prompt_tokens
        if least is not None and most is not None and most < least:
            raise ValueError(f"max_prompt_tokens: {least} or more, which is min_prompt_tokens")
        return self

    @property
    def rule(self) -> PromptRule:
        return PromptRule(
            min_prompt_tokens=self.min_prompt_tokens,
            max_prompt_tokens=self.max_prompt_tokens,
            tiers=self.tiers,
        )


def untaken(rules: Collection[PromptRule], tiers: Iterable[str]) -> PromptRule | None:
    """The shortest prompts that no rule admits, of the first tier that has such."""
    for tier in tiers:
        ranges = [_range(rule) for rule in rules if not rule.tiers or tier in rule.tiers]
        if (gap := _gap(ranges)) is not None:
            least, most = gap
            return PromptRule(
                min_prompt_tokens=None if least == 1 else least,
                max_prompt_tokens=None if most == inf else int(most),
                tiers=(tier,),
            )
    return None


def _range(rule: PromptRule) -> tuple[int, float]:
    most = rule.max_prompt_tokens
    return rule.min_prompt_tokens or 1, inf if most is None else most


def _gap(ranges: Iterable[tuple[int, float]]) -> tuple[int, float] | None:
    """The first lengths from 1 on that are in none of these ranges, both ends included."""
    length = 1
    for least, most in sorted(ranges):
        if least > length:
            return length, least - 1
        if most == inf:
            return None
        length = max(length, int(most) + 1)
    return length, inf
