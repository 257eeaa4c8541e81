"""Covering arrays: rows that hold every pair of levels of every two factors. Pure.

Built greedily: of some random rows, the one that covers most pairs that are still missing (Cohen,
Dalal, Fredman and Patton, "The AETG System", 1997).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from random import Random

Row = dict[str, object]
Pair = tuple[tuple[str, object], tuple[str, object]]
TRIED = 50
"""Random rows, of which the best is taken."""


def covering_rows(factors: Mapping[str, Sequence[object]], seed: int) -> list[Row]:
    random, missing, rows = Random(seed), all_pairs(factors), list[Row]()
    while missing:
        wanted = random.choice(sorted(missing, key=repr))
        tried = [_row_with(wanted, factors, random) for _ in range(TRIED)]
        best = max(tried, key=lambda row: len(missing & pairs_of(row)))
        missing -= pairs_of(best)
        rows.append(best)
    return rows


def all_pairs(factors: Mapping[str, Sequence[object]]) -> set[Pair]:
    return {
        ((one, first), (other, second))
        for one, other in combinations(factors, 2)
        for first, second in product(factors[one], factors[other])
    }


def pairs_of(row: Row) -> set[Pair]:
    return set(combinations(row.items(), 2))


def _row_with(pair: Pair, factors: Mapping[str, Sequence[object]], random: Random) -> Row:
    drawn = {name: random.choice(levels) for name, levels in factors.items()}
    return drawn | dict(pair)
