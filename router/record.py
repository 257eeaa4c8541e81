"""What a router's core heard and decided, as lines of JSON; and back. Pure.

A log begins with a Beginning, then a line for each event: when, what, and the commands that came of
it. The same events make a core of the same beginning say the same, so a log can be replayed; the
simulator reads one as a trace.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

from kvrelay import messages, qos, types
from kvrelay.step_times import StepCoefficients
from router import beginning, events, generation, ladder, placement, policies, refusal
from router.beginning import Beginning
from router.events import Command, Event

_MODULES = (
    *(messages, types, qos, beginning, events, generation),
    *(ladder, placement, policies, refusal),
)
_CLASS, _BYTES, _ENUM, _MAP = "$", "$bytes", "$enum", "$map"

Json = Any
"""What JSON holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    at_s: float
    event: Event
    commands: tuple[Command, ...]


def to_line(value: Beginning | Entry) -> str:
    return json.dumps(_encode(value), separators=(",", ":"))


def from_line(line: str) -> Beginning | Entry:
    """Raises ValueError for anything else."""
    try:
        value = _decode(json.loads(line))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a line of a router's record: {error!r}") from None
    if not isinstance(value, Beginning | Entry):
        raise ValueError("not a line of a router's record")
    return value


def _encode(value: object) -> Json:
    if isinstance(value, Enum):
        return {_ENUM: type(value).__name__, "value": value.value}
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, bytes):
        return {_BYTES: value.hex()}
    if _has_fields(value):
        return _encode_fields(value)
    if isinstance(value, Mapping):
        return {_MAP: [[_encode(key), _encode(item)] for key, item in value.items()]}
    assert isinstance(value, Iterable), type(value)
    return [_encode(item) for item in value]


def _has_fields(value: object) -> bool:
    """A dataclass, or a value of one, or a named tuple."""
    return is_dataclass(value) or hasattr(value, "_fields")


def _encode_fields(value: Any) -> Json:
    """Those that are not as by default."""
    kind: Any = type(value)
    encoded: dict[str, Json] = {_CLASS: kind.__name__}
    for name, default in _fields(kind):
        given = getattr(value, name)
        if given is not default and given != default:
            encoded[name] = _encode(given)
    return encoded


@lru_cache(maxsize=256)
def _fields(cls: Any) -> tuple[tuple[str, object], ...]:
    """(name, default)"""
    if not is_dataclass(cls):
        return tuple((name, MISSING) for name in cls._fields)
    return tuple((one.name, one.default) for one in fields(cls))


def _decode(value: Json) -> Any:
    if isinstance(value, list):
        return tuple([_decode(item) for item in value])
    if not isinstance(value, dict):
        return value
    if _BYTES in value:
        return bytes.fromhex(value[_BYTES])
    if _ENUM in value:
        return _known()[value[_ENUM]](value["value"])
    if _MAP in value:
        return {_decode(key): _decode(item) for key, item in value[_MAP]}
    given = {key: _decode(item) for key, item in value.items() if key != _CLASS}
    return _known()[value[_CLASS]](**given)


@lru_cache(maxsize=1)
def _known() -> dict[str, Any]:
    """# name |-> class"""
    found = {name: one for module in _MODULES for name, one in _classes(vars(module))}
    return found | {one.__name__: one for one in (Entry, StepCoefficients)}


def _classes(names: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for name, one in names.items():
        if isinstance(one, type) and (_has_fields(one) or issubclass(one, Enum)):
            yield name, one
