"""Sums of what was spent lately, by name. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp

_MOST_NAMES = 4096


@dataclass(slots=True, kw_only=True)
class Decaying:
    """What was spent `span_s` ago counts 1/e of what is spent now."""

    span_s: float
    _spent: dict[str, tuple[float, float]] = field(default_factory=dict)  # name |-> amount, as of

    def at(self, name: str, now_s: float) -> float:
        amount, since_s = self._spent.get(name, (0.0, now_s))
        return amount * exp((since_s - now_s) / self.span_s)

    def spend(self, name: str, amount: float, now_s: float) -> None:
        self._spent[name] = (self.at(name, now_s) + amount, now_s)
        if len(self._spent) > _MOST_NAMES:
            self._forget_small(now_s)

    def _forget_small(self, now_s: float) -> None:
        """The half that spent least."""
        by_amount = sorted(self._spent, key=lambda name: self.at(name, now_s))
        for name in by_amount[: _MOST_NAMES // 2]:
            del self._spent[name]
