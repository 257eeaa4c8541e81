"""The sequences of one decode worker, and how many of them will probably decode at some time. Pure.

They are kept as columns of an array: a full worker has hundreds, and each decision asks for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import sqrt

import numpy as np

from kvrelay.types import RequestKey
from router.latency.survival import Survival, SurvivalTable

_EMITTED, _MOST, _PROMPT, _CHOICES, _JOINS, _ENDS, _TIER, _ROWS = range(8)
_FEW = 24
"""So many are looked at one by one: that is faster."""
_FIRST_ROOM = 64
_UNKNOWN = Survival([1.0])


@dataclass(frozen=True, slots=True)
class Moments:
    """Means and variances of how many sequences there are, and of the sum of their contexts."""

    sequences: float
    kv_tokens: float
    variance: float
    kv_variance: float

    def at_most(self, sigmas: float) -> tuple[float, float]:
        return (
            self.sequences + sigmas * sqrt(self.variance),
            self.kv_tokens + sigmas * sqrt(self.kv_variance),
        )


class Sequences:
    """Each has the `tokens` that it has emitted, and may emit `most`."""

    def __init__(self) -> None:
        self._columns = np.zeros((_ROWS, _FIRST_ROOM))
        self._keys: list[RequestKey] = []  # in the order of the columns
        self._index: dict[RequestKey, int] = {}
        self._tiers: list[str] = []  # tiers by their number in the columns
        self._table: SurvivalTable | None = None  # of these survivals, and of all these tiers
        self._table_of: Mapping[str, Survival] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def add(
        self,
        key: RequestKey,
        *,
        tier: str,
        prompt_tokens: int,
        most: int,
        choices: int,
        joins_s: float,
        ends_s: float,
    ) -> None:
        at = len(self._keys)
        if at == self._columns.shape[1]:
            self._columns = np.hstack([self._columns, np.zeros_like(self._columns)])
        if tier not in self._tiers:
            self._tiers.append(tier)
            self._table = None
        number = self._tiers.index(tier)
        self._columns[:, at] = (0, most, prompt_tokens, choices, joins_s, ends_s, number)
        self._keys.append(key)
        self._index[key] = at

    def remove(self, key: RequestKey) -> None:
        """The last one takes its column."""
        at, last = self._index.pop(key), self._keys.pop()
        if last != key:
            self._columns[:, at] = self._columns[:, len(self._keys)]
            self._keys[at] = last
            self._index[last] = at

    def grown(self, key: RequestKey, tokens: int) -> None:
        """One that isn't here changes nothing."""
        at = self._index.get(key)
        if at is not None:
            self._columns[_EMITTED, at] = tokens

    def running(self) -> Iterator[tuple[str, int]]:
        """# tier, tokens; of those that have any"""
        columns = self._columns[:, : len(self)]
        for tokens, tier in zip(columns[_EMITTED].tolist(), columns[_TIER].tolist(), strict=True):
            if tokens:
                yield self._tiers[int(tier)], int(tokens)

    def likely(
        self, then_s: float, now_s: float, step_s: float, survivals: Mapping[str, Survival]
    ) -> Moments:
        """Those that decode `then_s`, with steps of `step_s` until then. Of a tier without survival
        each lasts as long as was expected."""
        look = self._one_by_one if len(self) <= _FEW else self._all_at_once
        return look(then_s, now_s, step_s, survivals)

    def _one_by_one(
        self, then_s: float, now_s: float, step_s: float, survivals: Mapping[str, Survival]
    ) -> Moments:
        sequences = kv_tokens = variance = kv_variance = 0.0
        for column in self._columns[:, : len(self)].T.tolist():
            emitted, most, prompt_tokens, choices, joins_s, ends_s, tier = column
            from_s = now_s if emitted else max(now_s, joins_s)
            if from_s > then_s:
                continue
            more, survival = (then_s - from_s) / step_s, survivals.get(self._tiers[int(tier)])
            if survival is None:
                share = 1.0 if then_s < ends_s else 0.0
            else:
                share = survival.goes_on(emitted, more) if emitted + more < most else 0.0
            n, tokens = share * choices, prompt_tokens + emitted + more
            sequences += n
            kv_tokens += n * tokens
            variance += n * (1 - share)
            kv_variance += n * (1 - share) * tokens * tokens
        return Moments(sequences, kv_tokens, variance, kv_variance)

    def _all_at_once(
        self, then_s: float, now_s: float, step_s: float, survivals: Mapping[str, Survival]
    ) -> Moments:
        columns = self._columns[:, : len(self)]
        emitted, most, prompts, choices, joins_s, ends_s = columns[:_TIER]
        from_s = np.where(emitted > 0, now_s, np.maximum(now_s, joins_s))
        more = np.maximum(0.0, (then_s - from_s) / step_s)
        then = emitted + more
        table = self._survivals(survivals)
        share = table.go_on(columns[_TIER].astype(np.int64), emitted, more)
        share *= (then < most) & (from_s <= then_s)
        if len(survivals) < len(self._tiers) or not survivals.keys() >= {*self._tiers}:
            unknown = [i for i, tier in enumerate(self._tiers) if tier not in survivals]
            lasts = (then_s < ends_s) & (from_s <= then_s)
            share = np.where(np.isin(columns[_TIER], unknown), lasts, share)
        n, tokens = share * choices, prompts + then
        kv_tokens, uncertain = n * tokens, n * (1 - share)
        return Moments(
            float(n.sum()),
            float(kv_tokens.sum()),
            float(uncertain.sum()),
            float((uncertain * tokens) @ tokens),
        )

    def _survivals(self, survivals: Mapping[str, Survival]) -> SurvivalTable:
        """Made once for each mapping that is given: those are replaced, never changed."""
        if self._table is None or self._table_of is not survivals:
            kinds = [survivals.get(tier, _UNKNOWN) for tier in self._tiers]
            self._table, self._table_of = SurvivalTable(kinds), survivals
        return self._table
