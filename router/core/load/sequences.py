"""The sequences of one decode worker, and how many of them will probably decode at some time. Pure.

They are kept as columns of an array: a full worker has hundreds, and each decision asks for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import sqrt
from typing import NamedTuple

import numpy as np

from kvrelay.types import RequestKey, value
from router.core.load.output_lengths import NONE, Floats, Integers, Survival, SurvivalTable

_EMITTED, _MOST, _PROMPT, _CHOICES, _JOINS, _ENDS, _TIER, _ROWS = range(8)
_FEW = 24
"""So many are looked at one by one: that is faster."""
_FIRST_ROOM = 64
_UNKNOWN = Survival([1.0])


@value
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

    def __add__(self, other: Moments) -> Moments:
        """Of both, which are independent."""
        return Moments(
            sequences=self.sequences + other.sequences,
            kv_tokens=self.kv_tokens + other.kv_tokens,
            variance=self.variance + other.variance,
            kv_variance=self.kv_variance + other.kv_variance,
        )


class _Sums(NamedTuple):
    """Over sequences that are at work, each with its `context` of prompt and emitted tokens: `n`
    is how many go on, `varies` the variance of that, alone and by contexts and their squares."""

    n: float
    n_context: float
    varies: float
    context_varies: float
    squared_varies: float

    def after(self, more: float) -> Moments:
        """Each has so many tokens more."""
        return Moments(
            sequences=self.n,
            kv_tokens=self.n_context + more * self.n,
            variance=self.varies,
            kv_variance=self.squared_varies + more * (2 * self.context_varies + more * self.varies),
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
        self._awaited: set[RequestKey] = set()  # those that have emitted nothing
        self._sums: dict[int, _Sums | None] = {}  # by steps from now; until anything changes

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
        self._awaited.add(key)
        self._sums.clear()

    def remove(self, key: RequestKey) -> None:
        """The last one takes its column."""
        self._awaited.discard(key)
        self._sums.clear()
        at, last = self._index.pop(key), self._keys.pop()
        if last != key:
            self._columns[:, at] = self._columns[:, len(self._keys)]
            self._keys[at] = last
            self._index[last] = at

    def grown(self, key: RequestKey, tokens: int) -> None:
        """One that isn't here changes nothing."""
        at = self._index.get(key)
        if at is not None and tokens:
            self._columns[_EMITTED, at] = tokens
            self._awaited.discard(key)
            self._sums.clear()

    def running(self) -> Iterator[tuple[str, Integers]]:
        """# tier, the tokens of each sequence; of those that have any"""
        columns = self._columns[:, : len(self)]
        for number, tier in enumerate(self._tiers):
            tokens = columns[_EMITTED, columns[_TIER] == number]
            yield tier, tokens[tokens > 0].astype(np.int64)

    def likely(
        self, then_s: float, now_s: float, step_s: float, survivals: Mapping[str, Survival]
    ) -> Moments:
        """Those that decode `then_s`, with steps of `step_s` until then. Of a tier without survival
        each lasts as long as was expected."""
        columns = self._columns[:, : len(self)]
        if len(self) > _FEW:
            more = (then_s - now_s) / step_s
            sums = self._at_work(int(more), survivals)
            if sums is not None and not self._awaited:
                return sums.after(more)
            if sums is not None:
                awaited = columns[:, [self._index[key] for key in self._awaited]]
                return sums.after(more) + self._look(awaited, then_s, now_s, step_s, survivals)
        return self._look(columns, then_s, now_s, step_s, survivals)

    def _at_work(self, steps: int, survivals: Mapping[str, Survival]) -> _Sums | None:
        """Of those that have emitted tokens. None where whole steps don't tell all: of a tier
        nothing is known, or one has outlived all that is known."""
        table = self._survivals(survivals)
        if steps not in self._sums:
            known = all(tier in survivals for tier in self._tiers)
            self._sums[steps] = self._sum_up(steps, table) if known else None
        return self._sums[steps]

    def _sum_up(self, steps: int, table: SurvivalTable) -> _Sums | None:
        columns = self._columns[:, : len(self)]
        emitted, most, prompts, choices = columns[:_JOINS]
        kinds, then = columns[_TIER].astype(np.int64), emitted + steps
        alive = table.longer(kinds, emitted)
        if alive.min() < NONE:
            return None
        share = table.longer(kinds, then) / alive * (then < most)
        n, context = share * choices * (emitted > 0), prompts + emitted
        varies = n * (1 - share)
        by_context = varies * context
        sums = (n.sum(), n @ context, varies.sum(), by_context.sum(), by_context @ context)
        return _Sums(*map(float, sums))

    def _look(
        self,
        columns: Floats,
        then_s: float,
        now_s: float,
        step_s: float,
        survivals: Mapping[str, Survival],
    ) -> Moments:
        look = self._one_by_one if columns.shape[1] <= _FEW else self._all_at_once
        return look(columns, then_s, now_s, step_s, survivals)

    def _one_by_one(
        self,
        columns: Floats,
        then_s: float,
        now_s: float,
        step_s: float,
        survivals: Mapping[str, Survival],
    ) -> Moments:
        sequences = kv_tokens = variance = kv_variance = 0.0
        for column in columns.T.tolist():
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
        return Moments(
            sequences=sequences, kv_tokens=kv_tokens, variance=variance, kv_variance=kv_variance
        )

    def _all_at_once(
        self,
        columns: Floats,
        then_s: float,
        now_s: float,
        step_s: float,
        survivals: Mapping[str, Survival],
    ) -> Moments:
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
            sequences=float(n.sum()),
            kv_tokens=float(kv_tokens.sum()),
            variance=float(uncertain.sum()),
            kv_variance=float((uncertain * tokens) @ tokens),
        )

    def _survivals(self, survivals: Mapping[str, Survival]) -> SurvivalTable:
        """Made once for each mapping that is given: those are replaced, never changed."""
        if self._table is None or self._table_of is not survivals:
            kinds = [survivals.get(tier, _UNKNOWN) for tier in self._tiers]
            self._table, self._table_of = SurvivalTable(kinds), survivals
            self._sums.clear()
        return self._table
