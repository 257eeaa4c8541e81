"""The longest decode step that was predicted for a worker's batch since some time. Pure.

A request is admitted by the step that it joins; those that are admitted after it make it longer,
within everybody's objectives. What it took is to be compared with the longest of these.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

_MOST = 512


@dataclass(slots=True)
class StepPeaks:
    _at_s: list[float] = field(default_factory=list)  # ascending
    _step_s: list[float] = field(default_factory=list)  # descending: none before is shorter

    def add(self, step_s: float, now_s: float) -> None:
        while self._step_s and self._step_s[-1] <= step_s:
            self._step_s.pop()
            self._at_s.pop()
        self._at_s.append(now_s)
        self._step_s.append(step_s)
        if len(self._at_s) > _MOST:
            del self._at_s[0], self._step_s[0]

    def since(self, at_s: float) -> float:
        """0 when nothing was admitted."""
        first = bisect_left(self._at_s, at_s)
        return self._step_s[first] if first < len(self._step_s) else 0.0
