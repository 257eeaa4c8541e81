"""Pauses of Python's garbage collector in this process: all of its threads stand still meanwhile.

`freeze` once, when a process has started: what it has loaded by then is never looked at again.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class GcPauses:
    """How many there were, how long together, and the longest; of all generations."""

    count: int = 0
    total_s: float = 0.0
    longest_s: float = 0.0
    _began_s: float | None = field(default=None, repr=False)

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        """As one of `gc.callbacks`, which no collection interrupts."""
        if phase == "start":
            self._began_s = time.perf_counter()
        elif self._began_s is not None:
            self.saw(time.perf_counter() - self._began_s)

    def saw(self, seconds: float) -> None:
        self.count += 1
        self.total_s += seconds
        self.longest_s = max(self.longest_s, seconds)


PAUSES = GcPauses()
"""Of this process, since `freeze`."""


def freeze() -> None:
    """Collect once more, spare all that is left from then on, and measure the pauses to come."""
    gc.collect()
    gc.freeze()
    if PAUSES not in gc.callbacks:
        gc.callbacks.append(PAUSES)
