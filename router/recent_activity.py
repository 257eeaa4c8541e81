"""A worker's activity over the last seconds, from the counters that it sends. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvrelay.activity import NO_ACTIVITY, Activity, activity
from kvrelay.messages import Counters

WINDOW_S = 10.0
SAMPLE_S = 1.0
"""Counters come with every batch of events: only one reading a second is kept."""


@dataclass(slots=True)
class RecentActivity:
    """The latest counters of one worker, and one earlier reading for each second of the window."""

    total_blocks: int
    _samples: deque[tuple[float, Counters]] = field(default_factory=deque)  # oldest first
    _latest: tuple[float, Counters] | None = None

    def heard(self, counters: Counters, now_s: float) -> None:
        self._latest = now_s, counters
        if not self._samples or now_s - self._samples[-1][0] >= SAMPLE_S:
            self._samples.append(self._latest)
            self._forget(now_s)

    def _forget(self, now_s: float) -> None:
        """One sample that is older than the window stays: the window begins there."""
        while len(self._samples) > 1 and now_s - self._samples[1][0] >= WINDOW_S:
            self._samples.popleft()

    def activity(self) -> Activity:
        if self._latest is None:
            return NO_ACTIVITY
        (from_s, before), (to_s, after) = self._samples[0], self._latest
        return activity(before, after, to_s - from_s, self.total_blocks)
