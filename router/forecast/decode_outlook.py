"""How many sequences a worker will be decoding, and when. Pure.

Each sequence that this router has sent there is expected to join and to end at some time. One that
outlives its time counts as staying: nothing is known of it any more.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvrelay.types import RequestKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """`tokens` is each choice's mean context while it decodes."""

    joins_s: float
    ends_s: float
    tokens: int
    choices: int = 1
    tpot_s: float | None = None


@dataclass(frozen=True, slots=True)
class BatchThen:
    sequences: int
    kv_tokens: int


@dataclass(slots=True)
class DecodeOutlook:
    sequences: int = 0
    kv_tokens: int = 0
    _expected: dict[RequestKey, Expected] = field(default_factory=dict)
    _joins_s: list[float] = field(default_factory=list)  # of each choice, ascending
    _ends_s: list[float] = field(default_factory=list)
    _objectives_s: list[float] = field(default_factory=list)  # TPOT objectives, ascending

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
        self.sequences += expected.choices
        self.kv_tokens += expected.tokens * expected.choices
        for _ in range(expected.choices):
            insort(self._joins_s, expected.joins_s)
            insort(self._ends_s, expected.ends_s)
        if expected.tpot_s is not None:
            insort(self._objectives_s, expected.tpot_s)

    def remove(self, key: RequestKey) -> None:
        """Removing what isn't there changes nothing."""
        expected = self._expected.pop(key, None)
        if expected is None:
            return
        self.sequences -= expected.choices
        self.kv_tokens -= expected.tokens * expected.choices
        for _ in range(expected.choices):
            _discard(self._joins_s, expected.joins_s)
            _discard(self._ends_s, expected.ends_s)
        if expected.tpot_s is not None:
            _discard(self._objectives_s, expected.tpot_s)

    def at(self, then_s: float, now_s: float) -> BatchThen:
        """Of the sequences that are known now, those that decode `then_s`."""
        joined = bisect_right(self._joins_s, then_s)
        overdue = bisect_right(self._ends_s, now_s)
        ended = bisect_right(self._ends_s, then_s) - overdue
        sequences = max(0, joined - ended)
        mean_tokens = self.kv_tokens / self.sequences if self.sequences else 0.0
        return BatchThen(sequences, round(sequences * mean_tokens))

    def end_s(self, ends: int, now_s: float) -> float | None:
        """When the next `ends` of them will have ended; None if fewer are expected to."""
        index = bisect_right(self._ends_s, now_s) + ends - 1
        return self._ends_s[index] if 0 <= index < len(self._ends_s) else None


def _discard(ascending: list[float], value: float) -> None:
    index = bisect_left(ascending, value)
    assert ascending[index] == value
    del ascending[index]
