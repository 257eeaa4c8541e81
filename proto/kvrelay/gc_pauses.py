"""Pauses of Python's garbage collector, in which all threads of the process stand still.

Call `freeze` once, when the process has started: objects loaded by then are never scanned again.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class GcPauses:
    """Number, sum and maximum of the pauses, over all generations."""

    count: int = 0
    total_s: float = 0.0
    longest_s: float = 0.0
    _began_s: float | None = field(default=None, repr=False)

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        """One of `gc.callbacks`, which no collection interrupts."""
        if phase == "start":
            self._began_s = time.perf_counter()
        elif self._began_s is not None:
            self.saw(time.perf_counter() - self._began_s)

    def saw(self, seconds: float) -> None:
        self.count += 1
        self.total_s += seconds
        self.longest_s = max(self.longest_s, seconds)


PAUSES = GcPauses()
"""The pauses of this process since `freeze`."""


def freeze() -> None:
    """Collects once more, exempts all remaining objects, and measures later pauses."""
    gc.collect()
    gc.freeze()
    if PAUSES not in gc.callbacks:
        gc.callbacks.append(PAUSES)


@contextmanager
def paused() -> Iterator[None]:
    """No collections meanwhile, such as while a process imports: hardly anything of that is
    garbage. `freeze` collects what is."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
