"""Doubts in what a worker says of its own speed. Pure.

A worker measures itself when it starts, and corrects that by what it runs. One that measured itself
on a busy machine would be asked for nothing that has objectives, and so never learn better. So once
in a while one that idles gets what it says it is too slow for.
"""

from __future__ import annotations

from dataclasses import dataclass

BELIEVED = 4.0
"""It may be this many times as fast as it says, no more."""
FIRST_S, LONGEST_S = 5.0, 300.0
"""Between two trials: twice as long each time."""


@dataclass(slots=True)
class Doubt:
    _again_s: float = FIRST_S
    _pause_s: float = FIRST_S

    def is_due(self, now_s: float) -> bool:
        return now_s >= self._again_s

    def tried(self, now_s: float) -> None:
        self._again_s = now_s + self._pause_s
        self._pause_s = min(LONGEST_S, 2 * self._pause_s)
