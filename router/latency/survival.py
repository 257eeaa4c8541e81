"""How many of those that decode will decode still. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

STRIDE = 8
NONE = 1e-9
"""A smaller share is none at all."""


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
        if alive < NONE:
            return float(0.5 ** (more / max(1.0, tokens)))
        return shares[then if then < last else last] / alive


class SurvivalTable:
    """The survivals of several kinds of sequences, to be asked for many sequences at once."""

    def __init__(self, kinds: Sequence[Survival]) -> None:
        lengths = np.array([len(kind.shares) for kind in kinds])
        self._shares = np.concatenate([np.asarray(kind.shares, np.float64) for kind in kinds])
        self._last = np.cumsum(lengths) - 1
        self._first = self._last - (lengths - 1)

    def go_on(self, kind: Integers, tokens: Floats, more: Floats) -> Floats:
        """# sequence |-> `goes_on`; `kind` is its index"""
        alive, later = self.longer(kind, tokens), self.longer(kind, tokens + more)
        if alive.min(initial=1.0) >= NONE:
            return later / alive
        known = alive >= NONE
        outlived = 0.5 ** (more / np.maximum(1.0, tokens))
        return np.where(known, later / np.where(known, alive, 1.0), outlived)

    def longer(self, kind: Integers, tokens: Floats) -> Floats:
        """# sequence |-> the share of its kind that yields more than so many tokens"""
        at = self._first[kind] + (tokens / STRIDE).astype(np.int64)
        return self._shares[np.minimum(at, self._last[kind])]
