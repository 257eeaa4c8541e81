"""Where a handoff's tokens, or its layers, are cut. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

WRITE_TOKENS = 128
"""Fewer tokens in a write cost more per byte than they save in waiting."""

_GRAIN_TOKENS = 16
"""Sections begin and end at multiples of it where they can: so with blocks of as many tokens, or of
a multiple, whole blocks are copied. No worker's block size may matter: both cut alike."""


def least_tokens(seen: range) -> int:
    """The smallest piece size with which pieces of `seen` all have 128 tokens (or all of them)."""
    lead, grains = _grains(seen)
    count = max(1, (len(seen) - lead) // WRITE_TOKENS)
    return min(len(seen), lead + -(-grains // count) * _GRAIN_TOKENS)


def token_pieces(seen: range, most: int) -> list[range]:
    """The fewest of at most `most` that are of whole grains, but for the ends of `seen`, and even
    otherwise; of any tokens where these would be small."""
    lead, grains = _grains(seen)
    fit = (most - lead) // _GRAIN_TOKENS
    if len(seen) > most and fit > 0:
        parts = even_pieces(range(grains), fit)
        ends = [0, *(min(lead + part.stop * _GRAIN_TOKENS, len(seen)) for part in parts)]
        pieces = [seen[start:end] for start, end in pairwise(ends)]
        if min(map(len, pieces)) >= WRITE_TOKENS:
            return pieces
    return list(even_pieces(seen, most))


def _grains(seen: range) -> tuple[int, int]:
    """Tokens before the first grain, and how many grains there are from then on."""
    lead = -seen.start % _GRAIN_TOKENS
    return lead, max(1, -(-(len(seen) - lead) // _GRAIN_TOKENS))


def even_pieces(whole: range, most: int) -> Iterator[range]:
    """The fewest pieces of at most `most`, their sizes within one of each other."""
    return split(whole, -(-len(whole) // most))


def split(whole: range, count: int) -> Iterator[range]:
    for i in range(count):
        yield whole[len(whole) * i // count : len(whole) * (i + 1) // count]
