"""Durations and sizes as the cluster file spells them: "30s", "500ms", "2GiB". Pure."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

SECONDS_PER_UNIT = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
BYTES_PER_UNIT = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}

DURATION_HELP = 'a duration with its unit (ms, s, m, h), such as "30s"'
SIZE_HELP = 'a size with its unit (B, KB, MB, GB, KiB, MiB, GiB), such as "2GiB"'


def parse_duration_s(given: object) -> float:
    """Seconds. Raises ValueError, saying what was expected, for anything but "<number><unit>"."""
    return _scaled(given, SECONDS_PER_UNIT, DURATION_HELP)


def parse_size_bytes(given: object) -> int:
    """Bytes, rounded down. Raises ValueError, saying what was expected."""
    return int(_scaled(given, BYTES_PER_UNIT, SIZE_HELP))


def format_duration(seconds: float) -> str:
    """The shortest spelling that reads back as the same duration."""
    for unit in ("h", "m", "s"):
        if seconds and seconds % SECONDS_PER_UNIT[unit] == 0:
            return f"{seconds / SECONDS_PER_UNIT[unit]:.0f}{unit}"
    return f"{seconds * 1000:g}ms"


def format_size(size_bytes: int) -> str:
    """The shortest spelling that reads back as the same size."""
    whole = [(unit, n) for unit, n in BYTES_PER_UNIT.items() if size_bytes % n == 0]
    return min((f"{size_bytes // n}{unit}" for unit, n in whole), key=len)


def _scaled(given: object, units: dict[str, float] | dict[str, int], expected: str) -> float:
    text = given if isinstance(given, str) else ""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text)
    if match is None or match[2] not in units or float(match[1]) == 0:
        raise ValueError(expected)
    return float(match[1]) * units[match[2]]


def _text_schema(units: dict[str, float] | dict[str, int], example: str) -> WithJsonSchema:
    pattern = rf"^\d+(\.\d+)?\s*({'|'.join(units)})$"
    return WithJsonSchema({"type": "string", "pattern": pattern, "examples": [example]})


Seconds = Annotated[
    float,
    BeforeValidator(parse_duration_s),
    PlainSerializer(format_duration),
    _text_schema(SECONDS_PER_UNIT, "30s"),
]
Bytes = Annotated[
    int,
    BeforeValidator(parse_size_bytes),
    PlainSerializer(format_size),
    _text_schema(BYTES_PER_UNIT, "2GiB"),
]
