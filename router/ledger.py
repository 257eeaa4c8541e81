"""Where a request's time went: named moments whose gaps are the phases. Pure.

Moments of workers are put on the router's clock by their age when they arrive, so a hop's two ways
are both charged to the phase that waits for the answer. Phases up to `first_token_return` sum to
the time to first token, all of them to the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# moment |-> the phase that ends with it
PHASES: dict[str, str] = {
    "placed": "place",
    "reserved": "reserve",
    "dispatched": "router_queue",
    "prefill_received": "dispatch",
    "prefill_started": "prefill_queue",
    "first_token": "prefill",
    "first_token_received": "first_token_return",
    "handoff_committed": "handoff",
    "decode_joined": "decode_queue",
    "last_token": "decode",
    "last_token_received": "last_token_return",
}


@dataclass(slots=True)
class Ledger:
    """`before_s` are the phases before submission, as the face measured them."""

    before_s: Mapping[str, float]
    submitted_s: float
    is_local: bool = False  # a decode worker computes the prompt, though there are others for that
    _moments: dict[str, float] = field(default_factory=dict)

    def mark(self, moment: str, at_s: float) -> None:
        """Known moments count once, `last_token*` each time."""
        if moment in PHASES and (moment not in self._moments or moment.startswith("last_")):
            self._moments[moment] = at_s

    def age_s(self, now_s: float) -> float:
        """Since the face received it."""
        return self.before_submission_s + now_s - self.submitted_s

    @property
    def before_submission_s(self) -> float:
        return sum(self.before_s.values())

    def after_s(self, moment: str) -> float | None:
        """Since submission, on the router's clock; None before it."""
        at_s = self._moments.get(moment)
        return None if at_s is None else at_s - self.submitted_s

    def phases(self) -> dict[str, float]:
        """# phase |-> seconds, in order"""
        phases = dict(self.before_s)
        previous_s = self.submitted_s
        for moment, at_s in self._in_order():
            phase = PHASES[moment]
            if self.is_local and phase == "prefill":
                phase = "local_prefill"
            phases[phase] = max(0.0, at_s - previous_s)
            previous_s = max(previous_s, at_s)
        return phases

    def _in_order(self) -> list[tuple[str, float]]:
        """Moments in their logical order. A batch that was read late dates its moments late, so
        none is later than those that follow it."""
        ordered: list[tuple[str, float]] = []
        latest_s = float("inf")
        for moment in reversed(PHASES):
            if moment in self._moments:
                latest_s = min(latest_s, self._moments[moment])
                ordered.append((moment, latest_s))
        return ordered[::-1]
