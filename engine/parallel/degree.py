"""Which tensor parallel degrees a model's heads allow. Pure."""

from __future__ import annotations

from collections.abc import Collection
from math import gcd

from kvrelay.errors import ModelError


def check_degree(size: int, family: str, heads: Collection[int], kv_heads: Collection[int]) -> None:
    """`heads`, `kv_heads`: of any layer. Raises ModelError that names the degrees there are."""
    if _allows(size, heads, kv_heads):
        return
    possible = [str(n) for n in range(1, gcd(*heads) + 1) if _allows(n, heads, kv_heads)]
    raise ModelError(
        f"parallel.tensor {size} can't split the heads of this {family} model, which has "
        f"{_spelled(heads)} and {_spelled(kv_heads)} for KV: choose {' or '.join(possible)}"
    )


def _allows(size: int, heads: Collection[int], kv_heads: Collection[int]) -> bool:
    """A KV head may be on several ranks, and these have nothing of another then."""
    shared = all(count % size == 0 or size % count == 0 for count in kv_heads)
    return shared and all(count % size == 0 for count in heads)


def _spelled(counts: Collection[int]) -> str:
    return " or ".join(str(count) for count in sorted(set(counts)))
