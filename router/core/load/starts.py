"""How long workers took to start, counted for a histogram of each phase. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from kvrelay.starts import PhaseSeconds, whole_s
from router.core.load.histograms import Histograms

BORDERS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, inf)
WHOLE = "whole"


class Starts(Histograms):
    """Of the workers that this router heard of first."""

    def __init__(self) -> None:
        super().__init__(BORDERS_S)

    def note(self, start: Sequence[PhaseSeconds]) -> None:
        for one in (*start, PhaseSeconds(phase=WHOLE, seconds=whole_s(start))):
            self.count(one.phase, one.seconds)
