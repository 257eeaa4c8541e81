"""Prompts that wait at the router until a prefill worker is about to be free. Pure.

They go in the order in which a prefill worker computes its own (`engine.prompts.order`). So none
waits behind another at a worker that is slow, or gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import inf

from engine.prompts.order import Order
from kvrelay.types import RequestKey, RequestSpec


@dataclass(slots=True, kw_only=True, eq=False)
class Queued:
    """Implements `engine.prompts.prompt.Prompt`. It will probably take `seconds`; the decode worker
    holds the KV of its first `held_tokens`."""

    spec: RequestSpec
    seconds: float
    priority: int
    within_s: float | None = None
    held_tokens: int = 0
    since_s: float = 0.0  # when it was certain
    arrival: int = 0
    deadline_s: float | None = None
    left_s: float = 0.0

    @property
    def key(self) -> RequestKey:
        return self.spec.key

    @property
    def tenant(self) -> str:
        return self.spec.tenant

    @property
    def qos_tier(self) -> str:
        return self.spec.qos_tier

    @property
    def computed(self) -> int:
        return 0

    @property
    def remaining(self) -> int:
        return self.spec.context_tokens


@dataclass(slots=True, kw_only=True)
class SharedQueue:
    """Those whose place at a decode worker isn't certain yet are expected: they count in forecasts,
    and are given to nobody."""

    order: Order[Queued] = field(default_factory=Order)
    _expected: dict[RequestKey, Queued] = field(default_factory=dict)
    _waiting: dict[RequestKey, Queued] = field(default_factory=dict)
    _seconds: dict[int, float] = field(default_factory=dict)  # by priority, of both
    _level: tuple[tuple[float, int, int], float] | None = None  # as last asked for
    _changes: int = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._waiting or key in self._expected

    def expect(self, prompt: Queued) -> None:
        assert prompt.key not in self, f"{prompt.key} waits here already"
        self._expected[prompt.key] = prompt
        self._changes += 1
        before_s = self._seconds.get(prompt.priority, 0.0)
        self._seconds[prompt.priority] = before_s + prompt.seconds

    def add(
        self, key: RequestKey, *, held_tokens: int, within_s: float | None, now_s: float
    ) -> None:
        """It is certain now."""
        prompt = self._expected.pop(key)
        prompt.held_tokens, prompt.within_s, prompt.since_s = held_tokens, within_s, now_s
        self._waiting[key] = prompt
        self.order.add(prompt, now_s)

    def remove(self, key: RequestKey) -> None:
        """Removing what isn't here changes nothing."""
        waiting = self._waiting.pop(key, None)
        if waiting is not None:
            self.order.remove(waiting)
        prompt = waiting or self._expected.pop(key, None)
        if prompt is not None:
            self._changes += 1
            self._seconds[prompt.priority] -= prompt.seconds
            if not self._expected and not self._waiting:
                self._seconds.clear()  # and with it what rounding left

    def in_order(self, now_s: float) -> Iterator[Queued]:
        """Those that wait; may be left at any point."""
        return self.order.order(now_s)

    def given(self, prompt: Queued, *, workers: int, now_s: float) -> None:
        """One of so many workers has it: that share of all their time will be its tier's."""
        self.remove(prompt.key)
        self.order.ran([(prompt, prompt.remaining)], prompt.seconds / workers, now_s)

    def starts_in_s(self, priority: int, busy_s: Iterable[float], now_s: float) -> float:
        """When a new prompt's turn comes, with workers that are busy for so long (read once for
        all questions of a moment): as soon as they have taken all that goes before it."""
        asked = (now_s, priority, self._changes)
        if self._level is None or self._level[0] != asked:
            before_s = sum(s for other, s in self._seconds.items() if other <= priority)
            self._level = asked, level(max(0.0, before_s), busy_s)
        return self._level[1]

    def validate(self) -> None:
        self.order.validate(self._waiting.values())
        assert not self._expected.keys() & self._waiting.keys()


def level(work_s: float, busy_s: Iterable[float]) -> float:
    """When workers that are busy for so long have taken `work_s` more, each as soon as it is free;
    0 without any."""
    ascending = sorted(busy_s)
    if not ascending:
        return 0.0
    level_s = ascending[0]
    for workers, next_s in enumerate([*ascending[1:], inf], 1):
        if work_s <= workers * (next_s - level_s):
            return level_s + work_s / workers
        work_s -= workers * (next_s - level_s)
        level_s = next_s
    return level_s
