"""What a router's core heard and decided, as lines of JSON; and back. Pure.

A log begins with a Beginning, then a line for each event: when, what, and the commands that came of
it. The same events make a core of the same beginning say the same, so a log can be replayed; the
simulator reads one as a trace.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import lru_cache, partial
from typing import Any

from kvrelay import counters, messages, qos, types
from kvrelay.errors import FailureReason, RefusalReason
from kvrelay.messages import LifetimeMoment
from kvrelay.types import StepCoefficients
from router.core import events, start
from router.core.events import Command, Event
from router.core.faults import poison
from router.core.policy import choice
from router.core.promises import refusal, work
from router.core.start import Beginning
from router.core.state import generation, ladder, quarantine

_MODULES = (
    *(messages, counters, types, qos, start, events, generation),
    *(ladder, quarantine, choice, refusal, work, poison),
)
_CLASS, _BYTES, _ENUM, _MAP = "$", "$bytes", "$enum", "$map"

_AS_TEXT = (RefusalReason, FailureReason, LifetimeMoment)
"""A worker, or another version, may name others."""
_PLAIN = frozenset({type(None), bool, int, float, str})
_JSON = json.JSONEncoder(separators=(",", ":"), check_circular=False)

Json = Any
"""What JSON holds."""
Fields = tuple[tuple[str, object], ...]
"""(name, default)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    at_s: float
    event: Event
    commands: tuple[Command, ...]


def to_line(value: Beginning | Entry) -> str:
    return _JSON.encode(_encode(value))


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
    kind: Any = type(value)
    return value if kind in _PLAIN else _encoder(kind)(value)


@lru_cache(maxsize=256)
def _encoder(kind: Any) -> Callable[[Any], Json]:
    if issubclass(kind, Enum) and kind not in _AS_TEXT:
        return lambda value: {_ENUM: kind.__name__, "value": value.value}
    if issubclass(kind, str | int | float):
        return lambda value: value
    if issubclass(kind, bytes):
        return lambda value: {_BYTES: value.hex()}
    if _has_fields(kind):
        return partial(_encode_fields, kind.__name__, _fields(kind))
    if issubclass(kind, Mapping):
        return lambda value: {_MAP: [[_encode(key), _encode(of)] for key, of in value.items()]}
    assert issubclass(kind, Iterable), kind
    return _encode_items


def _has_fields(kind: Any) -> bool:
    """A dataclass, or a named tuple."""
    return is_dataclass(kind) or hasattr(kind, "_fields")


def _encode_items(value: Iterable[object]) -> Json:
    """Prompts are long."""
    items = tuple(value)
    return items if _PLAIN.issuperset(map(type, items)) else [*map(_encode, items)]


def _encode_fields(name: str, fields_: Fields, value: object) -> Json:
    """Those that are not as by default."""
    encoded: dict[str, Json] = {_CLASS: name}
    for field, default in fields_:
        given = getattr(value, field)
        if given is not default and given != default:
            encoded[field] = _encode(given)
    return encoded


def _fields(cls: Any) -> Fields:
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
