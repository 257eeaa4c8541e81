"""One process as the supervisor of a cluster sees it, and by which rules it comes back. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.supervision import Home, Kind, State
from engine.activity import Activity, Stage

FIRST_BACKOFF_S = 1.0
LAST_BACKOFF_S = 60.0
STABLE_S = 60.0
"""A process that served for so long starts its back-off anew."""
STARTS_BEFORE_FATAL = 3
"""A process that never served is given up after so many starts."""


STARTS = Activity(stage=Stage.STARTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    startup_timeout_s: float
    driver_timeout_s: float | None
    """None: the cluster outlives its driver."""
    hang_timeout_s: float
    """A process that answers nothing for so long is killed and started again."""


@dataclass(slots=True, kw_only=True)
class Process:
    """`home` is where it runs or last ran; a pool node's is where it shall run. `joined`: the
    routers that know it."""

    name: str
    kind: Kind
    state: State = State.GONE
    life: int = 0
    failures: int = 0
    served_s: float | None = None
    joined: set[str] = field(default_factory=set)
    address: str | None = None
    start_at_s: float = 0.0
    home: Home | None = None
    activity: Activity = STARTS  # what it does while its state is STARTING
    asked_s: float | None = None  # for a sign of life, not answered yet
    heard_s: float = 0.0  # when there was the last one

    def is_due(self, now_s: float) -> bool:
        return self.state is State.BACKING_OFF and self.start_at_s <= now_s

    def hears(self, now_s: float) -> None:
        self.asked_s, self.heard_s = None, now_s

    def back_off(self, now_s: float) -> float:
        """It failed once more; the seconds until it is due."""
        self.failures = 1 if self._was_stable(now_s) else self.failures + 1
        wait_s = min(FIRST_BACKOFF_S * 2 ** (self.failures - 1), LAST_BACKOFF_S)
        self.state, self.start_at_s = State.BACKING_OFF, now_s + wait_s
        self.address, self.joined = None, set()
        return wait_s

    def _was_stable(self, now_s: float) -> bool:
        if self.state is not State.SERVING or self.served_s is None:
            return False
        return now_s - self.served_s >= STABLE_S
