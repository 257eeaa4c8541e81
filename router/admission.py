"""Whether to take a request now, and if not, when to come back. Pure.

By capacity alone: a decode worker must have a free place in its batch and blocks for the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.types import RequestSpec
from router.placement import WorkerView

FIRST_RETRY_S = 1.0
SHORTEST_RETRY_S = 0.05
LONGEST_RETRY_S = 30.0
_WEIGHT = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """`reason` is one of no_capacity, slots_exhausted, kv_exhausted, draining."""

    reason: str
    message: str


NO_CAPACITY = Refusal(
    reason="no_capacity", message="no prefill and decode worker is ready to serve"
)


def refusal_of(spec: RequestSpec, worker: WorkerView) -> Refusal | None:
    """What the decode worker would answer, as far as the router knows; None: ask it."""
    taken = sum(worker.sequences.values())
    if taken + spec.sampling.n > worker.hello.max_running_requests:
        places = worker.hello.max_running_requests
        return Refusal(
            reason="slots_exhausted",
            message=f"all {places} places of every decode worker are taken",
        )
    return None


def refused_by_worker(reason: str) -> Refusal:
    messages = {
        "slots_exhausted": "all places of every decode worker are taken",
        "kv_exhausted": "no decode worker has KV blocks left for this prompt",
        "draining": "the worker is draining",
    }
    return Refusal(reason=reason, message=messages.get(reason, reason))


@dataclass(slots=True)
class ReleaseClock:
    """Predicts when the next place is free: the running mean gap between ended requests."""

    _last_s: float | None = None
    _gap_s: float | None = None

    def released(self, now_s: float) -> None:
        if self._last_s is not None:
            gap_s = now_s - self._last_s
            old_s = gap_s if self._gap_s is None else self._gap_s
            self._gap_s = (1 - _WEIGHT) * old_s + _WEIGHT * gap_s
        self._last_s = now_s

    def retry_after_s(self) -> float:
        gap_s = FIRST_RETRY_S if self._gap_s is None else self._gap_s
        return min(max(gap_s, SHORTEST_RETRY_S), LONGEST_RETRY_S)
