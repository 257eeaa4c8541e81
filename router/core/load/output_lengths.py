"""How many tokens a request will yield, learnt from those that ended. Pure.

Of a request that was cut (by its max_tokens, or aborted) only a lower bound is known, so quantiles
are those of the Kaplan-Meier estimate (1958). Lengths are counted in bands of at most 8 %.

How many of those that decode will decode still. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, log

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


_TokenCounts = Sequence[int] | Integers

_EXACT = 16
"""Shorter lengths have bands of their own."""
_RATIO = 1.08
_BANDS = 160
"""The last one, of all that is longer, begins at about a million tokens."""
_FADE = 0.998
"""What a request counts for less with each later one: the last 500 make up two thirds."""
_LARGEST = 1e100
_LAST_SHARED = 115
"""The band of some 33,000 tokens: of those that are longer no more is told."""
FIRST_GUESS = 256
"""Tokens of a request before any of its tier has ended: few use all that they may."""


def _band(tokens: int) -> int:
    if tokens < _EXACT:
        return tokens
    return min(_BANDS - 1, _EXACT + int(log(tokens / _EXACT) / log(_RATIO)))


def _counts(tokens: _TokenCounts) -> list[int]:
    """# band |-> how many of these"""
    each = np.asarray(tokens, np.int64)
    longer = _EXACT + (np.log(np.maximum(each, _EXACT) / _EXACT) / log(_RATIO)).astype(np.int64)
    bands = np.where(each < _EXACT, each, np.minimum(_BANDS - 1, longer))
    counts: list[int] = np.bincount(bands, minlength=_BANDS).tolist()
    return counts


def _end(band: int) -> int:
    """The longest of a band, at least."""
    return band if band < _EXACT else ceil(_EXACT * _RATIO ** (band - _EXACT + 1))


@dataclass(slots=True)
class _Tier:
    ended: list[float] = field(default_factory=lambda: [0.0] * _BANDS)
    cut: list[float] = field(default_factory=lambda: [0.0] * _BANDS)
    weight: float = 1.0  # of the next one: later ones weigh more, so that none need fade
    _quantiles: dict[tuple[float, int], int | None] = field(default_factory=dict)  # as of now

    def add(self, tokens: int, *, was_cut: bool) -> None:
        (self.cut if was_cut else self.ended)[_band(tokens)] += self.weight
        self.weight /= _FADE
        self._quantiles.clear()
        if self.weight > _LARGEST:
            self.ended = [count / self.weight for count in self.ended]
            self.cut = [count / self.weight for count in self.cut]
            self.weight = 1.0

    def survival(self, running: _TokenCounts) -> Survival | None:
        """What ends in a band ends in its middle."""
        longest = max((band for band, count in enumerate(self.ended) if count), default=None)
        if longest is None:
            return None
        counts = zip(self.cut, _counts(running), strict=True)
        cut = [before + n * self.weight for before, n in counts]
        alive, longer, shares = sum(self.ended) + sum(cut), 1.0, list[float]()
        for band in range(min(longest, _LAST_SHARED) + 1):
            middle = (_end(band) + _end(max(0, band - 1)) + 1) // 2
            shares += [longer] * (middle // STRIDE + 1 - len(shares))
            if self.ended[band]:
                longer *= max(0.0, 1 - self.ended[band] / alive)  # but for rounding
            alive -= self.ended[band] + cut[band]
        return Survival([*shares, longer])

    def quantile(self, share: float, emitted: int) -> int | None:
        """None: too few are known to end."""
        asked = (share, _band(emitted + 1))
        if asked not in self._quantiles:
            self._quantiles[asked] = self._look(*asked)
        return self._quantiles[asked]

    def _look(self, share: float, first: int) -> int | None:
        alive = sum(self.ended[first:]) + sum(self.cut[first:])
        longer = 1.0
        enough = 1 - share + 1e-9
        for band, (ended, cut) in enumerate(zip(self.ended[first:], self.cut[first:], strict=True)):
            if alive <= 0:
                return None
            if ended:
                longer *= 1 - ended / alive
                if longer <= enough:
                    return _end(first + band)
            alive -= ended + cut
        return None


@dataclass(slots=True)
class OutputLengths:
    """By QoS tier name."""

    _tiers: dict[str, _Tier] = field(default_factory=dict)

    def observe(self, tier: str, tokens: int, *, was_cut: bool) -> None:
        """A choice is over. `was_cut`: it would have gone on."""
        self._tiers.setdefault(tier, _Tier()).add(tokens, was_cut=was_cut)

    def survival(self, tier: str, running: _TokenCounts = ()) -> Survival | None:
        """Those that run have their tokens at least: who has ended first was short. None: of none
        of the tier it is known how long it would have been."""
        known = self._tiers.get(tier)
        return None if known is None else known.survival(running)

    def quantile(self, tier: str, share: float, *, max_tokens: int, emitted: int = 0) -> int:
        """The length that `share` of the tier's requests don't exceed, among those with more than
        `emitted` tokens; `max_tokens` where that is less, or all that is known were cut."""
        known = self._tiers.get(tier)
        if known is None:
            return min(max_tokens, emitted + FIRST_GUESS)
        found = known.quantile(share, emitted)
        return max_tokens if found is None else max(emitted, min(found, max_tokens))
