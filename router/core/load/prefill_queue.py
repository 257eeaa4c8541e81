"""The prompts that this router has sent to one worker, and how long a new one will wait. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from kvrelay.messages import Lifetime, LifetimeMoment
from kvrelay.types import RequestKey

_LAST = inf
_NEW_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """A prompt that will take `seconds`; a lower `priority` number goes first. Of its `tokens` so
    many are `cached`, as far as is known."""

    seconds: float
    tokens: int
    priority: int = 0
    cached: int = 0


@dataclass(slots=True)
class PrefillQueue:
    """The worker is assumed to compute whenever it has a prompt. `token_s`: the usual seconds per
    token of these prompts, cached tokens included; 0 before there were any."""

    tokens: int = 0
    token_s: float = 0.0
    _ahead: dict[RequestKey, Ahead] = field(default_factory=dict)  # in the order sent
    _left: dict[RequestKey, int] = field(default_factory=dict)  # tokens to be computed
    _seconds: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    _told: set[RequestKey] = field(default_factory=set)  # those that the worker has begun
    _since_s: float = 0.0  # when the worker turned to what it works on

    def __len__(self) -> int:
        return len(self._ahead)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._ahead

    def __iter__(self) -> Iterator[RequestKey]:
        return iter(self._ahead)

    def add(self, key: RequestKey, ahead: Ahead, now_s: float) -> None:
        assert key not in self._ahead, f"{key} waits here already"
        if not self._ahead:
            self._since_s = now_s
            self._seconds.clear()  # and with it what rounding left
        self._ahead[key] = ahead
        self._left[key] = ahead.tokens - ahead.cached
        self._seconds[ahead.priority] += ahead.seconds
        self.tokens += ahead.tokens
        token_s = ahead.seconds / max(1, ahead.tokens)
        self.token_s += (_NEW_SHARE if self.token_s else 1.0) * (token_s - self.token_s)

    def remove(self, key: RequestKey, now_s: float) -> None:
        """It is prefilled, or given up; removing what isn't there changes nothing."""
        ahead = self._ahead.pop(key, None)
        if ahead is None:
            return
        del self._left[key]
        self._told.discard(key)
        self._seconds[ahead.priority] -= ahead.seconds
        self.tokens -= ahead.tokens
        self._since_s = now_s

    def has_begun(self, key: RequestKey) -> bool:
        """As far as the worker has told."""
        return key in self._told

    @property
    def left_tokens(self) -> int:
        """To be computed, as far as the worker has told."""
        return sum(self._left.values())

    def others_tokens(self, waiting_tokens: int) -> int:
        """Of all that waits there, as the worker counts: whole prompts before it has looked what
        is cached, then what is left of them."""
        begun = sum([self._ahead[key].tokens - self._left[key] for key in self._told])
        return max(0, waiting_tokens - self.tokens + begun)

    def on_lifetime(self, moment: Lifetime) -> None:
        """The worker has found or computed some of the prompt."""
        key = moment.key
        if key not in self._ahead:
            return
        if moment.name == LifetimeMoment.PREFILL_STARTED:
            self._left[key] = self._ahead[key].tokens - moment.tokens
        elif moment.name == LifetimeMoment.PREFILL_CHUNK:
            self._left[key] = max(0, self._left[key] - moment.tokens)
        else:
            return
        self._told.add(key)

    def all_s(self, now_s: float, waiting_tokens: int = 0) -> float:
        """Until all are computed."""
        return self.wait_s(_LAST, now_s, waiting_tokens)

    def wait_s(self, priority: float, now_s: float, waiting_tokens: int = 0) -> float:
        """Until a prompt of this priority would be next. `waiting_tokens`: those that the worker
        has told, if more than this router's."""
        others = self.others_tokens(waiting_tokens) if waiting_tokens else 0
        if not self._ahead:
            return others * self.token_s
        before_s = 0.0
        for other, seconds in self._seconds.items():
            if other <= priority:
                before_s += seconds
        if others:
            return max(0.0, before_s - self._told_s()) + others * self.token_s
        first = next(iter(self._ahead.values()))
        begun_s = min(now_s - self._since_s, first.seconds)
        left_s = before_s - begun_s if begun_s > 0 else before_s
        return left_s if left_s > 0 else 0.0

    def _told_s(self) -> float:
        """Of the prompts here, what the worker has told that it has computed."""
        done_s = 0.0
        for key in self._told:
            ahead = self._ahead[key]
            done_s += ahead.seconds * (1 - self._left[key] / max(1, ahead.tokens - ahead.cached))
        return max(0.0, done_s)
