"""How many sequences a worker will be decoding, and when. Pure.

Each sequence that this router has sent there is expected to join and to end at some time. Those
that outlive it are expected to end one after another, as often as all of them do: nothing more is
known of them.

How long a decode worker's batch has waited for prompts that are computed there. Pure.

The longest decode step that was predicted for a worker's batch since some time. Pure.

A request is admitted by the step that it joins; those that are admitted after it make it longer,
within everybody's objectives. What it took is to be compared with the longest of these.

How long sequences decode, by tier, as of a moment ago. Pure.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from math import exp, inf
from typing import NamedTuple

import numpy as np

from kvrelay.types import RequestKey
from router.core.load.margins import Margin
from router.core.load.output_lengths import Integers, OutputLengths, Survival
from router.core.load.sequences import Sequences

_MOST_PAUSES = 512


@dataclass(slots=True)
class Pauses:
    """As predicted when each was booked."""

    _at_s: list[float] = field(default_factory=list)  # ascending
    _before_s: list[float] = field(default_factory=list)  # the sum of those before it
    _all_s: float = 0.0

    def add(self, pause_s: float, now_s: float) -> None:
        self._at_s.append(now_s)
        self._before_s.append(self._all_s)
        self._all_s += pause_s
        if len(self._at_s) > _MOST_PAUSES:
            del self._at_s[0], self._before_s[0]

    def since(self, at_s: float) -> float:
        """Their sum."""
        first = bisect_left(self._at_s, at_s)
        return self._all_s - self._before_s[first] if first < len(self._at_s) else 0.0


SIGMAS, FAR_S = 3.0, 15.0
"""Of what lengths leave open so far ahead, fewer sooner: what else is unknown, as who joins before
one that is here already, grows with time. At 2 s none were enough, at 20 s two weren't."""
OVERDUE_SHARE = 0.25
"""Of its expected length, is what a sequence that outlives it is taken to still have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """`tokens` is each choice's mean context while it decodes; behind its prompt it may yield
    `most_tokens`."""

    joins_s: float
    ends_s: float
    tokens: int
    prompt_tokens: int = 0
    most_tokens: int = 0
    choices: int = 1
    tpot_s: float | None = None
    gaps: int = 1
    tier: str = ""

    @property
    def lasts_s(self) -> float:
        return max(1e-3, self.ends_s - self.joins_s)

    def gaps_left(self, now_s: float) -> float:
        """Tokens that it probably still yields. One that outlives its time goes on for a while."""
        lasts_s, left_s = self.ends_s - self.joins_s, self.ends_s - max(now_s, self.joins_s)
        share = left_s / lasts_s if lasts_s > 0 else 1.0
        return max(1.0, self.gaps * max(OVERDUE_SHARE, share))


Survivals = dict[str, Survival]
"""# tier |-> how long its sequences decode; those of which nothing is known are missing"""


class BatchThen(NamedTuple):
    sequences: int
    kv_tokens: int


class Likely(NamedTuple):
    """`at_most`: some standard deviations more."""

    mean: BatchThen
    at_most: BatchThen


@dataclass(slots=True)
class _Moments:
    """When sequences join, or end, ascending, and the context of each."""

    at_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    _before: list[int] | None = None  # tokens of those before each, until anything changes

    def add(self, at_s: float, tokens: int) -> None:
        index = bisect_right(self.at_s, at_s)
        self.at_s.insert(index, at_s)
        self.tokens.insert(index, tokens)
        self._before = None

    def discard(self, at_s: float, tokens: int) -> None:
        index = self.tokens.index(tokens, bisect_left(self.at_s, at_s))
        assert self.at_s[index] == at_s
        del self.at_s[index], self.tokens[index]
        self._before = None

    def tokens_of(self, first: int, last: int) -> int:
        """Of those from `first` to `last`, without the latter."""
        if self._before is None:
            self._before = [*accumulate(self.tokens, initial=0)]
        return self._before[last] - self._before[first] if first < last else 0


@dataclass(slots=True)
class DecodeOutlook:
    sequences: int = 0
    kv_tokens: int = 0
    of_tier: Counter[str] = field(default_factory=Counter)  # tier |-> its sequences
    _expected: dict[RequestKey, Expected] = field(default_factory=dict)
    _each: Sequences = field(default_factory=Sequences)
    _joins: _Moments = field(default_factory=_Moments)  # of each choice
    _ends: _Moments = field(default_factory=_Moments)
    _lasting_s: float = 0.0  # how long they are expected to decode, all together
    _objectives_s: list[float] = field(default_factory=list)  # TPOT objectives, ascending
    pauses: Pauses = field(default_factory=Pauses)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._expected

    def __iter__(self) -> Iterator[RequestKey]:
        return iter(self._expected)

    @property
    def strictest_tpot_s(self) -> float | None:
        return self._objectives_s[0] if self._objectives_s else None

    def add(self, key: RequestKey, expected: Expected) -> None:
        assert key not in self._expected, f"{key} is expected already"
        self._expected[key] = expected
        self._each.add(
            key,
            tier=expected.tier,
            prompt_tokens=expected.prompt_tokens,
            most=expected.most_tokens,
            choices=expected.choices,
            joins_s=expected.joins_s,
            ends_s=expected.ends_s,
        )
        self.sequences += expected.choices
        self.of_tier[expected.tier] += expected.choices
        self.kv_tokens += expected.tokens * expected.choices
        self._lasting_s += expected.lasts_s * expected.choices
        for _ in range(expected.choices):
            self._joins.add(expected.joins_s, expected.tokens)
            self._ends.add(expected.ends_s, expected.tokens)
        if expected.tpot_s is not None:
            insort(self._objectives_s, expected.tpot_s)

    def remove(self, key: RequestKey) -> None:
        """Removing what isn't there changes nothing."""
        expected = self._expected.pop(key, None)
        if expected is None:
            return
        self._each.remove(key)
        self.sequences -= expected.choices
        self.of_tier[expected.tier] -= expected.choices
        self.kv_tokens -= expected.tokens * expected.choices
        self._lasting_s -= expected.lasts_s * expected.choices
        for _ in range(expected.choices):
            self._joins.discard(expected.joins_s, expected.tokens)
            self._ends.discard(expected.ends_s, expected.tokens)
        if expected.tpot_s is not None:
            _discard(self._objectives_s, expected.tpot_s)

    def grown(self, key: RequestKey, tokens: int) -> None:
        """It has so many tokens now."""
        self._each.grown(key, tokens)

    def running(self) -> Iterator[tuple[str, Integers]]:
        """# tier, the tokens of each sequence"""
        return self._each.running()

    def likely(self, then_s: float, now_s: float, step_s: float, survivals: Survivals) -> Likely:
        """Of the sequences that are known now, as many as will probably decode `then_s`, with
        steps of `step_s` until then."""
        if not survivals:
            return Likely(*[self.at(then_s, now_s)] * 2)
        found = self._each.likely(then_s, now_s, step_s, survivals)
        most = found.at_most(SIGMAS * min(1.0, (then_s - now_s) / FAR_S))
        mean = BatchThen(round(found.sequences), round(found.kv_tokens))
        return Likely(mean, BatchThen(round(most[0]), round(most[1])))

    def at(self, then_s: float, now_s: float) -> BatchThen:
        """Of the sequences that are known now, those that decode `then_s`."""
        return self.met_by(then_s, then_s, now_s)

    def met_by(self, joins_s: float, ends_s: float, now_s: float) -> BatchThen:
        """Of the sequences that are known now, those that one which decodes in that time meets,
        however shortly."""
        ends = self._ends.at_s
        joined, overdue = bisect_right(self._joins.at_s, ends_s), bisect_right(ends, now_s)
        ended = max(overdue, bisect_right(ends, joins_s))
        tokens = self._joins.tokens_of(0, joined) - self._ends.tokens_of(overdue, ended)
        sequences = joined - (ended - overdue)
        if overdue and joins_s > now_s:
            gone = 1 - exp((now_s - joins_s) * self.sequences / self._lasting_s)
            sequences -= round(overdue * gone)
            tokens -= round(self._ends.tokens_of(0, overdue) * gone)
        return BatchThen(max(0, sequences), max(0, tokens))

    def bears(
        self, pause_s: float, pending_s: float, step_s: float, margin: Margin, now_s: float
    ) -> bool:
        """Whether all keep their TPOT objectives with a pause of `pause_s` more, behind `pending_s`
        of those that are booked, and steps of `step_s` otherwise: over the tokens that each has
        left, and over all of them with all the pauses of its life."""

        def paused_s(one: Expected) -> float:
            whole_s = pause_s + self.pauses.since(one.joins_s)
            return max((pause_s + pending_s) / one.gaps_left(now_s), whole_s / max(1, one.gaps))

        return not self._objectives_s or all(
            margin.apply(step_s + paused_s(one)) <= one.tpot_s
            for one in self._expected.values()
            if one.tpot_s is not None
        )

    def end_s(self, ends: int, now_s: float) -> float | None:
        """When the next `ends` of them will have ended; None if fewer are expected to."""
        index = bisect_right(self._ends.at_s, now_s) + ends - 1
        return self._ends.at_s[index] if 0 <= index < len(self._ends.at_s) else None


def _discard(ascending: list[float], value: float) -> None:
    index = bisect_left(ascending, value)
    assert ascending[index] == value
    del ascending[index]


_MOST_PEAKS = 512


@dataclass(slots=True)
class StepPeaks:
    _at_s: list[float] = field(default_factory=list)  # ascending
    _step_s: list[float] = field(default_factory=list)  # descending: none before is shorter

    def add(self, step_s: float, now_s: float) -> None:
        while self._step_s and self._step_s[-1] <= step_s:
            self._step_s.pop()
            self._at_s.pop()
        self._at_s.append(now_s)
        self._step_s.append(step_s)
        if len(self._at_s) > _MOST_PEAKS:
            del self._at_s[0], self._step_s[0]

    def since(self, at_s: float) -> float:
        """0 when nothing was admitted."""
        first = bisect_left(self._at_s, at_s)
        return self._step_s[first] if first < len(self._step_s) else 0.0


FRESH_S = 0.25


@dataclass(slots=True)
class Lifetimes:
    lengths: OutputLengths = field(default_factory=OutputLengths)
    _of_tier: Survivals = field(default_factory=dict)
    _since_s: float = -inf

    def by_tier(self, outlooks: Iterable[DecodeOutlook], now_s: float) -> Survivals:
        """With those that run, at any worker."""
        if now_s - self._since_s >= FRESH_S:
            self._since_s = now_s
            self._of_tier = self._look(outlooks)
        return self._of_tier

    def _look(self, outlooks: Iterable[DecodeOutlook]) -> Survivals:
        running = defaultdict[str, list[Integers]](list)
        for outlook in outlooks:
            for tier, tokens in outlook.running():
                running[tier].append(tokens)
        found = {
            tier: self.lengths.survival(tier, np.concatenate(tokens))
            for tier, tokens in running.items()
            if any(map(len, tokens))
        }
        return {tier: survival for tier, survival in found.items() if survival is not None}
