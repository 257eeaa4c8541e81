"""The prompts that this router has sent to one worker, and how long a new one will wait. Pure.

The worker packs waiting prompts into chunks, so several share a step and what each step takes
whatever it computes.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from kvrelay.types import RequestKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """A prompt that takes `seconds` by itself, to compute `computed_tokens` of its `tokens`; a
    lower `priority` number goes first."""

    seconds: float
    tokens: int
    priority: int = 0
    computed_tokens: int = 0


@dataclass(slots=True)
class _Sum:
    """`steps` are those of each prompt by itself."""

    seconds: float = 0.0
    computed_tokens: int = 0
    steps: int = 0


@dataclass(slots=True)
class PrefillQueue:
    """The worker is taken to work on something whenever there is something."""

    chunk_tokens: int = 1
    tokens: int = 0
    _ahead: dict[RequestKey, Ahead] = field(default_factory=dict)  # in the order sent
    _sums: defaultdict[int, _Sum] = field(default_factory=lambda: defaultdict(_Sum))
    """# priority |-> all prompts of it"""
    _since_s: float = 0.0  # when the worker turned to what it works on

    def __len__(self) -> int:
        return len(self._ahead)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._ahead

    def add(self, key: RequestKey, ahead: Ahead, now_s: float) -> None:
        assert key not in self._ahead, f"{key} waits here already"
        if not self._ahead:
            self._since_s = now_s
            self._sums.clear()  # and with it what rounding left
        self._ahead[key] = ahead
        self.tokens += ahead.tokens
        self._count(ahead, 1)

    def remove(self, key: RequestKey, now_s: float) -> None:
        """It is prefilled, or given up; removing what isn't there changes nothing."""
        ahead = self._ahead.pop(key, None)
        if ahead is None:
            return
        self.tokens -= ahead.tokens
        self._count(ahead, -1)
        self._since_s = now_s

    def _count(self, ahead: Ahead, sign: int) -> None:
        total = self._sums[ahead.priority]
        total.seconds += sign * ahead.seconds
        total.computed_tokens += sign * ahead.computed_tokens
        total.steps += sign * self._steps(ahead.computed_tokens)

    def _steps(self, computed_tokens: int) -> int:
        return -(-computed_tokens // self.chunk_tokens)

    def wait_s(self, priority: int, now_s: float) -> float:
        """Until a prompt of this priority would be next, if each were computed by itself."""
        if not self._ahead:
            return 0.0
        before_s = sum(one.seconds for other, one in self._sums.items() if other <= priority)
        first = next(iter(self._ahead.values()))
        begun_s = min(max(0.0, now_s - self._since_s), first.seconds)
        return max(0.0, before_s - begun_s)

    def shared_steps(self, priority: int, computed_tokens: int) -> int:
        """How many steps fewer that and a new prompt of so many tokens take, packed into chunks.
        The first one's steps are its own: they run already."""
        if not self._ahead:
            return 0
        before = [one for other, one in self._sums.items() if other <= priority]
        alone = sum(one.steps for one in before) + self._steps(computed_tokens)
        tokens = sum(one.computed_tokens for one in before) + computed_tokens
        first = next(iter(self._ahead.values()))
        if first.priority <= priority:
            alone -= self._steps(first.computed_tokens)
            tokens -= first.computed_tokens
        return alone - self._steps(tokens)
