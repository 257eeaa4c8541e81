"""What became of an offered request, as its client saw it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Seconds count from `sent_s`, a reading of the machine's monotonic clock. `ended` "cut": the
    client gave up long after the load. `reason` is a refusal's, `answered_s` when it came."""

    sent_s: float
    ended: Literal["done", "refused", "failed", "cut"]
    reason: str = ""
    retry_after_s: float | None = None
    answered_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    tokens: int = 0

    @property
    def tpot_s(self) -> float | None:
        """None: it has no second token."""
        if self.first_s is None or self.last_s is None or self.tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.tokens - 1)

    def is_good(self, objectives: Objectives) -> bool:
        if self.ended != "done" or self.first_s is None or self.first_s > objectives.ttft_s:
            return False
        return self.tpot_s is None or self.tpot_s <= objectives.tpot_s
