"""Which tensor parallel degrees a model's heads allow. Pure."""

from __future__ import annotations

from collections.abc import Collection
from math import gcd

from kvrelay.errors import ModelError


def check_degree(size: int, family: str, heads: Collection[int], kv_heads: Collection[int]) -> None:
    """`heads`, `kv_heads`: of any layer. Raises ModelError that names the degrees there are."""
    common = gcd(*heads, *kv_heads)
    if common % size == 0:
        return
    possible = [str(degree) for degree in range(1, common + 1) if common % degree == 0]
    raise ModelError(
        f"parallel.tensor {size} can't split the heads of this {family} model, which has "
        f"{_spelled(heads)} and {_spelled(kv_heads)} for KV: choose {' or '.join(possible)}"
    )


def _spelled(counts: Collection[int]) -> str:
    return " or ".join(str(count) for count in sorted(set(counts)))
