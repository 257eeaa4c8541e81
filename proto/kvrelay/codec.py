"""Dataclasses to protobuf messages and back, field by field, by name. Pure.

How a field travels follows from its type and from the message's field of the same name:

    in the dataclass                          in the message
    int, float, bool, str                     the same
    StrEnum                                   string
    bytes: a hash                             bytes
    dataclass, named tuple                    message
    several numbers, strings or dataclasses   repeated
    several hashes                            bytes: one after another
    several tuples                            repeated message, with a field for each item, in order
    several pairs of numbers                  repeated number: one pair after another
    one of these or None                      optional

"Several" is a tuple or a sequence. `travels_by` registers exceptions, `check` what else a value has
to be. A type that fits no row is a TypeError as soon as the codec is made; so is a field that only
one side has.

What can't be read is a PeerError that names sender, message and field, such as "a worker sent
Tokens.finish_reason 'x', which is none of stop, length, abort".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import StrEnum
from functools import cache, partial
from itertools import chain
from operator import attrgetter
from types import UnionType
from typing import Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from kvrelay.errors import PeerError

HASH_BYTES = 32

V = TypeVar("V")
M = TypeVar("M", bound=Message)

_SCALARS: Mapping[Any, frozenset[int]] = {
    bool: frozenset({FieldDescriptor.CPPTYPE_BOOL}),
    str: frozenset({FieldDescriptor.CPPTYPE_STRING}),
    float: frozenset({FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT}),
    int: frozenset(
        {
            *(FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64),
            *(FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64),
        }
    ),
}
"""# Python's type |-> types of protobuf that carry it"""


@dataclass(frozen=True, slots=True)
class _Form:
    """Of a field or of a class; without a function it travels as it is. A class travels as the
    dictionary of its message's fields."""

    to_wire: Callable[[Any], Any] | None = None
    from_wire: Callable[..., Any] | None = None
    is_optional: bool = False


_AS_IT_IS = _Form()
_EXCEPTIONS: dict[type, _Form] = {}
_CHECKS: dict[type, Callable[[Any], None]] = {}


def travels_by(
    cls: type[V],
    to_wire: Callable[[V], dict[str, object]],
    from_wire: Callable[..., V],
) -> None:
    """The fields of the message of a `cls`, and the `cls` of a message. `from_wire` is also given
    by name what the message has not (see MessageCodec)."""
    _EXCEPTIONS[cls] = _Form(to_wire, from_wire)


def check(cls: type[V], fault: Callable[[V], None]) -> None:
    """`fault` raises ValueError for a value that arrived and can't be used."""
    _CHECKS[cls] = fault


class MessageCodec(Generic[V, M]):
    """One class. `apart` are fields that only one side has: the caller gives them. `sender` is who
    sends such messages, for errors."""

    def __init__(
        self, cls: type[V], message: type[M], sender: str, *, apart: tuple[str, ...] = ()
    ) -> None:
        kind: Any = cls
        form = _class_form(kind, message.DESCRIPTOR, apart)
        assert form.to_wire is not None and form.from_wire is not None
        self._to_wire, self._from_wire = form.to_wire, form.from_wire
        self._message, self._sender = message, sender

    def encode(self, value: V, **apart: object) -> M:
        return self._message(**self._to_wire(value), **apart)

    def decode(self, message: M, **apart: object) -> V:
        """Raises PeerError."""
        try:
            value: V = self._from_wire(message, **apart)
        except PeerError as error:
            raise PeerError(f"{self._sender} sent {error}") from None
        return value


class EnvelopeCodec(Generic[V, M]):
    """One of several classes, in a message with a oneof: the field whose message has the class's
    name. `apart` are fields that the classes have and their messages have not."""

    def __init__(
        self, union: Any, message: type[M], sender: str, *, apart: tuple[str, ...] = ()
    ) -> None:
        oneof = message.DESCRIPTOR.oneofs[0]
        kinds = [(field, field.message_type) for field in oneof.fields]
        by_class = {kind.name: (field.name, kind) for field, kind in kinds if kind is not None}
        self._message, self._oneof, self._sender = message, oneof.name, sender
        self._to_wire: dict[type, tuple[str, Callable[[Any], Any]]] = {}
        self._from_wire: dict[str, Callable[..., Any]] = {}
        for cls in get_args(union):
            if cls.__name__ not in by_class:
                raise TypeError(f"{oneof.full_name} has no message of the name {cls.__name__}")
            name, kind = by_class[cls.__name__]
            form = _class_form(cls, kind, apart)
            assert form.to_wire is not None and form.from_wire is not None
            self._to_wire[cls], self._from_wire[name] = (name, form.to_wire), form.from_wire

    def encode(self, value: V, **beside: object) -> M:
        """`beside` are the envelope's own fields."""
        name, to_wire = self._to_wire[type(value)]
        return self._message(**{name: to_wire(value)}, **beside)

    def decode(self, message: M, **apart: object) -> V:
        """Raises PeerError."""
        name = message.WhichOneof(self._oneof) or "nothing"
        if (from_wire := self._from_wire.get(name)) is None:
            raise PeerError(f"{self._sender} sent {name}, which this version can't read")
        try:
            value: V = from_wire(getattr(message, name), **apart)
        except PeerError as error:
            raise PeerError(f"{self._sender} sent {error}") from None
        return value


@cache
def _class_form(cls: Any, descriptor: Descriptor, apart: tuple[str, ...] = ()) -> _Form:
    if cls in _EXCEPTIONS:
        return _EXCEPTIONS[cls]
    ours = {name: hint for name, hint in _hints(cls).items() if name not in apart}
    theirs = {name: one for name, one in descriptor.fields_by_name.items() if name not in apart}
    if ours.keys() != theirs.keys():
        odd = ", ".join(sorted(ours.keys() ^ theirs.keys()))
        raise TypeError(f"{cls.__name__} and the message {descriptor.name} differ in {odd}")
    forms = {
        name: _field_form(hint, theirs[name], f"{cls.__name__}.{name}")
        for name, hint in ours.items()
    }
    given = tuple(name for name in _names(cls) if name in apart)
    return _Form(_encoder(forms), _decoder(cls, forms, given))


def _hints(cls: Any) -> dict[str, Any]:
    """# field |-> its type"""
    hints = get_type_hints(cls)
    return {name: hints[name] for name in _names(cls)}


def _names(cls: Any) -> tuple[str, ...]:
    return tuple(one.name for one in fields(cls)) if is_dataclass(cls) else cls._fields


def _encoder(forms: Mapping[str, _Form]) -> Callable[[Any], dict[str, Any]]:
    """For Tokens: `lambda value: {"choice": value.choice, "logprobs": to_logprobs(value.logprobs),
    ...}`. Written out like this it takes about 0.6 of the time of a loop over the fields."""
    parts = []
    for name, form in forms.items():
        turned = f"value.{name}" if form.to_wire is None else f"to_{name}(value.{name})"
        parts.append(f"{name!r}: {turned}")
    turns = {f"to_{name}": form.to_wire for name, form in forms.items()}
    encode: Callable[[Any], dict[str, Any]] = eval(f"lambda value: {{{', '.join(parts)}}}", turns)
    return encode


def _decoder(cls: Any, forms: Mapping[str, _Form], apart: Sequence[str]) -> Callable[..., Any]:
    """For Tokens: `lambda message, key, at_s: cls(key=key, at_s=at_s, choice=message.choice, ..."""
    parts = [f"{name}={name}" for name in apart]
    for name, form in forms.items():
        turned = f"message.{name}" if form.from_wire is None else f"from_{name}(message.{name})"
        perhaps = f" if message.HasField({name!r}) else None" if form.is_optional else ""
        parts.append(f"{name}={turned}{perhaps}")
    turns = {f"from_{name}": form.from_wire for name, form in forms.items()} | {"cls": cls}
    source = f"lambda {', '.join(('message', *apart))}: cls({', '.join(parts)})"
    return _checked(cls, eval(source, turns))


def _checked(cls: Any, decode: Callable[..., Any]) -> Callable[..., Any]:
    fault = _CHECKS.get(cls)
    if fault is None and not hasattr(cls, "__post_init__"):
        return decode

    def decode_checked(message: Any, **apart: Any) -> Any:
        try:
            value = decode(message, **apart)
            if fault is not None:
                fault(value)
        except ValueError as error:
            raise PeerError(f"{cls.__name__}: {error}") from None
        return value

    return decode_checked


def _field_form(hint: Any, told: FieldDescriptor, where: str) -> _Form:
    """`where` names the field, in errors."""
    hint = _plain_type(hint)
    if get_origin(hint) in (Union, UnionType):
        return _optional_form(hint, told, where)
    if get_origin(hint) in (tuple, Sequence):
        return _several_form(get_args(hint), told, where)
    if told.is_repeated:
        raise TypeError(f"{where}: {hint} does not travel as a repeated {told.name}")
    return _one_form(hint, told, where)


def _plain_type(hint: Any) -> Any:
    """Without its NewType."""
    while hasattr(hint, "__supertype__"):
        hint = hint.__supertype__
    return hint


def _optional_form(hint: Any, told: FieldDescriptor, where: str) -> _Form:
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    if len(kinds) != 1 or not told.has_presence:
        raise TypeError(f"{where}: {hint} needs one type, and an optional field")
    form = _field_form(kinds[0], told, where)
    if (to_wire := form.to_wire) is not None:
        form = replace(form, to_wire=lambda one: None if one is None else to_wire(one))
    return replace(form, is_optional=True)


def _one_form(hint: Any, told: FieldDescriptor, where: str) -> _Form:
    if _carries(told, hint):
        return _AS_IT_IS
    if hint is bytes and told.type == FieldDescriptor.TYPE_BYTES:
        return _Form(None, partial(_hash_of, where))
    if isinstance(hint, type) and issubclass(hint, StrEnum) and _carries(told, str):
        return _Form(None, partial(_member, {one.value: one for one in hint}, where))
    if _has_fields(hint) and told.message_type is not None:
        return _class_form(hint, told.message_type)
    raise TypeError(f"{where}: {hint} does not travel as {told.name}")


def _carries(told: FieldDescriptor, kind: Any) -> bool:
    is_bytes = told.type == FieldDescriptor.TYPE_BYTES
    return not is_bytes and told.cpp_type in _SCALARS.get(kind, ())


def _has_fields(kind: Any) -> bool:
    """A dataclass, or a named tuple."""
    return isinstance(kind, type) and (is_dataclass(kind) or hasattr(kind, "_fields"))


def _several_form(kinds: tuple[Any, ...], told: FieldDescriptor, where: str) -> _Form:
    if len(kinds) != 1 and kinds[1:] != (...,):
        raise TypeError(f"{where}: a tuple of {len(kinds)} travels only within another one")
    kind = _plain_type(kinds[0])
    if kind is bytes and told.type == FieldDescriptor.TYPE_BYTES and not told.is_repeated:
        return _Form(b"".join, partial(_hashes_of, where))
    if not told.is_repeated:
        raise TypeError(f"{where}: several {kind} do not travel as one {told.name}")
    if get_origin(kind) is tuple:
        return _rows_form(get_args(kind), told, where)
    return _each(_one_form(kind, told, where))


def _each(form: _Form) -> _Form:
    to_wire, from_wire = form.to_wire, form.from_wire
    return _Form(
        None if to_wire is None else lambda ones: [to_wire(one) for one in ones],
        tuple if from_wire is None else lambda told: tuple([from_wire(one) for one in told]),
    )


def _rows_form(kinds: tuple[Any, ...], told: FieldDescriptor, where: str) -> _Form:
    """Tuples within a tuple, of scalars."""
    kind = told.message_type
    if kind is None and all(_carries(told, _plain_type(one)) for one in kinds):
        return _Form(lambda rows: [*chain.from_iterable(rows)], partial(_cut, len(kinds), where))
    if kind is not None and kinds[1:] == (...,):
        return _lists_form(kinds[0], kind, where)
    if kind is None or len(kind.fields) != len(kinds) or not all(map(_fits, kind.fields, kinds)):
        raise TypeError(f"{where}: {kinds} do not travel as {told.name}")
    names = tuple(one.name for one in kind.fields)
    get = attrgetter(*names)
    return _Form(
        lambda rows: [dict(zip(names, row, strict=True)) for row in rows],
        lambda rows: tuple(map(get, rows)),
    )


def _lists_form(item: Any, kind: Descriptor, where: str) -> _Form:
    """Each tuple is the only field of a message."""
    (only,) = kind.fields
    if not only.is_repeated or not _carries(only, _plain_type(item)):
        raise TypeError(f"{where}: {item} does not travel as {only.full_name}")
    name, get = only.name, attrgetter(only.name)
    return _Form(
        lambda rows: [{name: row} for row in rows],
        lambda rows: tuple([tuple(get(row)) for row in rows]),
    )


def _fits(told: FieldDescriptor, kind: Any) -> bool:
    return not told.is_repeated and _carries(told, _plain_type(kind))


# --- what arrives, checked ----------------------------------------------------------------------


def _member(known: Mapping[str, StrEnum], where: str, told: str) -> StrEnum:
    if (found := known.get(told)) is None:
        raise PeerError(f"{where} {told!r}, which is none of {', '.join(known)}")
    return found


def _hash_of(where: str, told: bytes) -> bytes:
    if len(told) != HASH_BYTES:
        raise PeerError(f"{where} of {len(told)} bytes, which are no hash of {HASH_BYTES} bytes")
    return told


def _hashes_of(where: str, told: bytes) -> tuple[bytes, ...]:
    if len(told) % HASH_BYTES:
        text = f"{where} of {len(told)} bytes, which are no hashes of {HASH_BYTES} bytes each"
        raise PeerError(text)
    return tuple([told[at : at + HASH_BYTES] for at in range(0, len(told), HASH_BYTES)])


def _cut(width: int, where: str, told: Sequence[Any]) -> tuple[tuple[Any, ...], ...]:
    if len(told) % width:
        raise PeerError(f"{where} of {len(told)} numbers, which are no rows of {width}")
    ones = iter(told)
    return tuple(zip(*[ones] * width, strict=True))
