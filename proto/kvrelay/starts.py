"""The ledger of a worker's start: its phases follow each other, so they sum to the whole. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise


class StartPhase(StrEnum):
    """In their order."""

    NODE = "node"
    """On Ray: until its node is there, if it came for this: a machine, the image, Ray."""
    PLACE = "place"
    """Until the first line of kvrelay: on Ray from the wish for it, else from its exec."""
    IMPORT = "import"
    CHOOSE = "choose"
    """Its device and transports."""
    FETCH = "fetch"
    """The model from a hub."""
    LOAD = "load"
    COMPILE = "compile"
    CHECK = "check"
    """The first steps, against the reference, and the memory for KV."""
    RECORD = "record"
    """CUDA graphs."""
    TIME = "time"
    """Steps are timed."""
    JOIN = "join"
    """Until the first router has it."""


ORDER = {phase: place for place, phase in enumerate(StartPhase)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSeconds:
    phase: str
    seconds: float


class StartLedger:
    """A process is in one phase at a time, in each at most once. Times are one clock's seconds.
    `node_s`: when its node was there, if that is later."""

    def __init__(self, begun_s: float, node_s: float | None = None) -> None:
        there_s = begun_s if node_s is None else max(begun_s, node_s)
        self._marks = [(StartPhase.NODE, begun_s), (StartPhase.PLACE, there_s)]
        self._ended_s: float | None = None

    def enter(self, phase: StartPhase, now_s: float) -> None:
        """The phase before ends. The present one again changes nothing. Raises ValueError for an
        earlier phase or time."""
        present, since_s = self._marks[-1]
        if phase is present:
            return
        if ORDER[phase] < ORDER[present] or now_s < since_s or self._ended_s is not None:
            raise ValueError(f"{phase} at {now_s:.3f} s follows {present} at {since_s:.3f} s")
        self._marks.append((phase, now_s))

    def end(self, now_s: float) -> bool:
        """It serves. False: it did before, and nothing changes."""
        if self._ended_s is not None:
            return False
        self._ended_s = max(now_s, self._marks[-1][1])
        return True

    def phases(self) -> tuple[PhaseSeconds, ...]:
        """All of them, 0 s for one that was left out. Only of a start that has ended."""
        assert self._ended_s is not None, "it serves"
        borders = [*self._marks, (StartPhase.JOIN, self._ended_s)]
        taken = {phase: till_s - from_s for (phase, from_s), (_, till_s) in pairwise(borders)}
        return tuple(PhaseSeconds(phase=one, seconds=taken.get(one, 0.0)) for one in StartPhase)


def whole_s(start: Iterable[PhaseSeconds]) -> float:
    return sum(one.seconds for one in start)


SHOWN_FROM_S = 0.05


def start_text(seconds: Mapping[str, float]) -> str:
    """Such as "7.4 s: import 3.1, load 0.9", in the order of the phases."""
    parts = [f"{name} {s:.1f}" for name, s in seconds.items() if s >= SHOWN_FROM_S]
    told = f"{sum(seconds.values()):.1f} s"
    return f"{told}: {', '.join(parts)}" if parts else told
