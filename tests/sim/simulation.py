"""A virtual clock: what is put off happens in order per channel, each after a random delay."""

from __future__ import annotations

import heapq
import random
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from itertools import count

LEASE_S = 30.0
TICK_S = 10.0
LONGEST_S = 10_000.0
VALIDATE_EVERY = 8
"""Events between two looks at all that must hold: it takes longer than the events."""


class Simulation(ABC):
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._channel_s: dict[str, float] = defaultdict(float)
        self._next_tick_s = TICK_S
        self._events = 0
        self._alive: set[str] = set()
        self._stopped: dict[str, list[Callable[[], None]]] = {}

    @abstractmethod
    def on_tick(self) -> None:
        """Time has passed, for every worker."""

    @abstractmethod
    def validate(self) -> None:
        """What must hold after any event."""

    def after(self, channel: str, action: Callable[[], None], scale_s: float = 0.01) -> None:
        """In order per channel, after a random delay."""
        at_s = max(self.now_s + self.random.expovariate(1 / scale_s), self._channel_s[channel])
        self._channel_s[channel] = at_s
        heapq.heappush(self._heap, (at_s, next(self._order), action))

    # --- processes ------------------------------------------------------------------------------

    def born(self, process: str) -> None:
        self._alive.add(process)

    def die(self, process: str) -> None:
        self._alive.discard(process)
        self._stopped.pop(process, None)

    def stop(self, process: str) -> None:
        """As by SIGSTOP: it does nothing until `resume`, and then all at once."""
        if process in self._alive:
            self._stopped.setdefault(process, [])

    def resume(self, process: str) -> None:
        for action in self._stopped.pop(process, []):
            self.let(process, action)

    def let(self, process: str, action: Callable[[], None]) -> None:
        """What the process does now, unless it is gone; later, when it is stopped."""
        if process in self._stopped:
            self._stopped[process].append(action)
        elif process in self._alive:
            action()

    def by(
        self, process: str, channel: str, action: Callable[[], None], scale_s: float = 0.01
    ) -> None:
        """`after`, done by that process."""
        self.after(channel, lambda: self.let(process, action), scale_s)

    # --- time -----------------------------------------------------------------------------------

    def run(self, until_s: float = LONGEST_S) -> None:
        """Until then, or until nothing happens any more."""
        while self._heap and self._heap[0][0] <= until_s:
            self.step()
        assert not self._heap or until_s < LONGEST_S, "it never ends"

    def step(self) -> bool:
        """What happens next; False when nothing does."""
        if not self._heap:
            return False
        if self._heap[0][0] >= self._next_tick_s:
            self.now_s = self._next_tick_s
            self.tick()
            return True
        self.now_s, _, action = heapq.heappop(self._heap)
        action()
        self._events += 1
        if self._events % VALIDATE_EVERY == 0 or not self._heap:
            self.validate()
        return True

    def tick(self) -> None:
        self._next_tick_s = self.now_s + TICK_S
        self.on_tick()

    def settle(self) -> None:
        """Let every lease end."""
        for _ in range(3):
            self.now_s += 1.1 * LEASE_S
            self.tick()
            self.run()
