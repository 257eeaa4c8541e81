"""Goes round a fault of llguidance 1.9: between 18, excluded, and 18.5 it takes 18 for valid, and
between -18.5 and -18, excluded, -18.

So where a range of numbers lies within 1 of an excluded whole bound, away from 0, that bound
becomes one that is included, a millionth further in. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isnan, nan
from typing import Any

_IN = 1e-6
_LARGEST = 1e9
"""Beyond it a float has no millionths."""
_DATA = frozenset({"const", "enum", "default", "examples"})
"""Keywords whose values are no schemas."""


def with_inclusive_bounds(schema: Any) -> Any:
    """A copy of a JSON schema."""
    if isinstance(schema, list):
        return [with_inclusive_bounds(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {k: v if k in _DATA else with_inclusive_bounds(v) for k, v in schema.items()}
    low, high = _number(inner.get("exclusiveMinimum")), _number(inner.get("exclusiveMaximum"))
    least, most = _number(inner.get("minimum")), _number(inner.get("maximum"))
    if inner.get("type") == "integer":
        return inner
    if _is_wrong(low, _nearest(most, high, min)):
        del inner["exclusiveMinimum"]
        inner["minimum"] = _nearest(low + _IN, least, max)
    if _is_wrong(-high, -_nearest(least, low, max)):
        del inner["exclusiveMaximum"]
        inner["maximum"] = _nearest(high - _IN, most, min)
    return inner


def _is_wrong(excluded: float, other: float) -> bool:
    """Mirrored for upper bounds. Nothing is wrong with what is not a number."""
    is_near = 2 * _IN < other - excluded < 1
    return is_near and 0 <= excluded < _LARGEST and excluded == int(excluded)


def _nearest(one: float, other: float, nearest: Callable[[float, float], float]) -> float:
    if isnan(one) or isnan(other):
        return other if isnan(one) else one
    return nearest(one, other)


def _number(value: object) -> float:
    """nan: it is none, or too large."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return nan
    return value if abs(value) < 2 * _LARGEST else nan
