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
VALIDATE_EVERY = 32
"""Events between two looks at all that must hold: one takes longer than an event. A replay looks
after each."""


class Simulation(ABC):
    def __init__(self, seed: int, *, tick_s: float = TICK_S) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.tick_s = tick_s
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._channel_s: dict[str, float] = defaultdict(float)
        self._next_tick_s = tick_s
        self.events_done = 0
        self.alive: set[str] = set()
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

    def at(self, when_s: float, action: Callable[[], None]) -> None:
        """At that time exactly."""
        heapq.heappush(self._heap, (when_s, next(self._order), action))

    # --- processes ------------------------------------------------------------------------------

    def born(self, process: str) -> None:
        self.alive.add(process)

    def die(self, process: str) -> None:
        self.alive.discard(process)
        self._stopped.pop(process, None)

    def stop(self, process: str) -> None:
        """As by SIGSTOP: it does nothing until `resume`, and then all at once."""
        if process in self.alive:
            self._stopped.setdefault(process, [])

    def is_stopped(self, process: str) -> bool:
        return process in self._stopped

    def resume(self, process: str) -> None:
        for action in self._stopped.pop(process, []):
            self.let(process, action)

    def let(self, process: str, action: Callable[[], None]) -> None:
        """What the process does now, unless it is gone; later, when it is stopped."""
        if process in self._stopped:
            self._stopped[process].append(action)
        elif process in self.alive:
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

    def wait(self, done: Callable[[], bool], most_s: float) -> bool:
        """Until it is done, also while nothing happens; False: it was not for so long."""
        until_s = self.now_s + most_s
        while not done():
            if self.now_s > until_s:
                return False
            if not self._heap:
                self.now_s = self._next_tick_s
                self.tick()
            self.step()
        return True

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
        self.events_done += 1
        if self.events_done % VALIDATE_EVERY == 0 or not self._heap:
            self.validate()
        return True

    def tick(self) -> None:
        self._next_tick_s = self.now_s + self.tick_s
        self.on_tick()

    def settle(self) -> None:
        """Let every lease end."""
        for _ in range(3):
            self.now_s += 1.1 * LEASE_S
            self.tick()
            self.run()
