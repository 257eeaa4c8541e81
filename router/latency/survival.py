"""How many of those that decode will decode still. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

STRIDE = 8
_NONE = 1e-9


@dataclass(frozen=True, slots=True)
class Survival:
    """`shares`: of requests, those that yield more than 0, 8, 16 ... tokens. The last one is of all
    longer ones; if it is 0, half of those that outlive all that are known yield as much again."""

    shares: Sequence[float]

    def goes_on(self, tokens: float, more: float) -> float:
        """Of those with so many tokens, the share that yields so many `more`."""
        shares, last = self.shares, len(self.shares) - 1
        now, then = int(tokens) // STRIDE, int(tokens + more) // STRIDE
        alive = shares[now if now < last else last]
        if alive < _NONE:
            return float(0.5 ** (more / max(1.0, tokens)))
        return shares[then if then < last else last] / alive
