"""Objectives as a client writes them, in milliseconds -> as the router uses them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

from kvrelay.errors import InvalidRequest
from kvrelay.types import Objectives

MOST_MS = 24 * 3600 * 1000
"""Nobody means more than a day."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveNames:
    """What a public face calls each of them."""

    ttft: str
    tpot: str
    deadline: str


HEADERS = ObjectiveNames(ttft="x-slo-ttft-ms", tpot="x-slo-tpot-ms", deadline="x-deadline-ms")
FIELDS = ObjectiveNames(ttft="slo.ttft_ms", tpot="slo.tpot_ms", deadline="slo.deadline_ms")


def objectives_of(given: Mapping[str, str | float], names: ObjectiveNames) -> Objectives:
    """`given` by name; those not in it are None. Raises InvalidRequest that names the one at
    fault."""
    return Objectives(
        ttft_s=_seconds(given, names.ttft),
        tpot_s=_seconds(given, names.tpot),
        deadline_s=_seconds(given, names.deadline),
    )


def _seconds(given: Mapping[str, str | float], name: str) -> float | None:
    if name not in given:
        return None
    value_ms = _number(given[name])
    if value_ms is None or not 0 < value_ms <= MOST_MS:
        raise InvalidRequest(
            f"{name} must be milliseconds, over 0 and at most {MOST_MS}, not {given[name]}",
            param=name,
        )
    return value_ms / 1000


def _number(given: str | float) -> float | None:
    try:
        value = float(given)
    except ValueError:
        return None
    return value if isfinite(value) else None
