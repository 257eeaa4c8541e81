"""A virtual clock: what is put off happens in order of time, and of asking among equals. Pure."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any

Action = Callable[[Any], None]


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Action, Any]] = []
        self._order = count()

    def at(self, at_s: float, action: Action, argument: object = None) -> None:
        heappush(self._heap, (at_s, next(self._order), action, argument))

    def after(self, delay_s: float, action: Action, argument: object = None) -> None:
        heappush(self._heap, (self.now_s + delay_s, next(self._order), action, argument))

    def run(self) -> int:
        """Until nothing happens any more; how many events there were."""
        heap, events = self._heap, 0
        while heap:
            self.now_s, _, action, argument = heappop(heap)
            action(argument)
            events += 1
        return events


class Server:
    """Does one thing after another, first come first served; each takes its time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._free_s = 0.0

    def serve(self, seconds: float, action: Action, argument: object = None) -> None:
        """`action` comes when it is done."""
        self._free_s = max(self._clock.now_s, self._free_s) + seconds
        self._clock.at(self._free_s, action, argument)
