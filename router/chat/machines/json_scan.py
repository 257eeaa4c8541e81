"""Scans JSON as it arrives, in pieces cut anywhere: where a value ends, and the parts of a call
that is an object with a name and arguments. Pure.

It finds ends and does not judge: arguments are handed on as the model wrote them.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto

SPACE = frozenset(" \t\r\n")
SCALAR = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")


class State(Enum):
    OPEN = auto()
    DONE = auto()
    BROKEN = auto()


class JsonValue:
    """One value, without the space before it. `first` is its first character, empty until then."""

    def __init__(self) -> None:
        self.state = State.OPEN
        self.first = ""
        self._untaken: list[str] = []
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> int:
        """How many characters were part of it or before it. The others are not."""
        begin = position = 0 if self.first else len(text) - len(text.lstrip())
        while position < len(text):
            if self._in_string and not self._escaped:
                position = _string_mark(text, position)
                if position == len(text):
                    break
            if not self._takes(text[position]):
                return self._taken(text, begin, position)
            position += 1
            if self.state is State.DONE:
                break
        return self._taken(text, begin, position)

    def take(self) -> str:
        """Its text since the last call."""
        text = "".join(self._untaken)
        self._untaken.clear()
        return text

    def _taken(self, text: str, begin: int, end: int) -> int:
        self._untaken.append(text[begin:end])
        return end

    def _takes(self, character: str) -> bool:
        """False, and a state, where the character is behind its end or can't be in it."""
        if self._in_string:
            self._string(character)
            return True
        if not self.first:
            return self._begins(character)
        if not self._depth:
            return self._scalar(character)
        return self._nested(character)

    def _begins(self, character: str) -> bool:
        self.first = character
        self._in_string = character == '"'
        self._depth = int(character in "{[")
        if not (self._in_string or self._depth or character in SCALAR):
            self.state = State.BROKEN
        return self.state is State.OPEN

    def _string(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
            self._done_at(0)

    def _scalar(self, character: str) -> bool:
        if character not in SCALAR:
            self.state = State.DONE
        return self.state is State.OPEN

    def _nested(self, character: str) -> bool:
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self._done_at(0)
        elif not (character in SPACE or character in SCALAR or character in ",:"):
            self.state = State.BROKEN
            return False
        return True

    def _done_at(self, depth: int) -> None:
        if self._depth == depth:
            self.state = State.DONE


STRING_MARK = re.compile(r'["\\]')


def _string_mark(text: str, position: int) -> int:
    """Where the next quote or backslash is; the end of the text without one."""
    found = STRING_MARK.search(text, position)
    return len(text) if found is None else found.start()


class Next(Enum):
    """What an object goes on with."""

    BRACE = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA = auto()


NAME_KEYS = ("name", "function")
ARGUMENT_KEYS = ("arguments", "parameters")
KNOWN_KEYS = frozenset({*NAME_KEYS, *ARGUMENT_KEYS, "type", "id"})


class JsonCall:
    """{"name": ..., "arguments": {...}} in any order, or with `parameters` for `arguments`.

    `name` is None until it is known; `strange` once it has a key that calls don't have.
    """

    def __init__(self) -> None:
        self.state = State.OPEN
        self.name: str | None = None
        self.strange = False
        self._next = Next.BRACE
        self._key = ""
        self._value = JsonValue()
        self._arguments: JsonValue | None = None

    @property
    def has_arguments(self) -> bool:
        """Their first character is known."""
        return self._arguments is not None and self._arguments.first != ""

    def feed(self, text: str) -> int:
        """How many characters are part of it. The others are behind its end, or break it."""
        at = 0
        while at < len(text) and self.state is State.OPEN:
            if self._next is Next.VALUE or self._in_key(text[at]):
                at += self._feed_value(text[at:])
            else:
                at += self._mark(text[at])
        return at

    def take_arguments(self) -> str:
        """Their text since the last call. What isn't an object is taken whole."""
        value = self._arguments
        if value is None:
            return ""
        if value.first == "{":
            return value.take()
        return _unpacked(value.take()) if value.state is State.DONE else ""

    def _in_key(self, character: str) -> bool:
        return self._next is Next.KEY and (self._value.first == '"' or character == '"')

    def _feed_value(self, text: str) -> int:
        taken = self._value.feed(text)
        match self._value.state:
            case State.DONE if self._next is Next.KEY:
                self._key_ends()
            case State.DONE:
                self._value_ends()
            case State.BROKEN:
                self.state = State.BROKEN
            case State.OPEN:
                pass
        return taken

    def _key_ends(self) -> None:
        self._key = _string(self._value.take()) or ""
        self.strange |= self._key not in KNOWN_KEYS
        self._next = Next.COLON

    def _value_begins(self) -> None:
        self._value = JsonValue()
        self._next = Next.VALUE
        if self._key in ARGUMENT_KEYS and self._arguments is None:
            self._arguments = self._value

    def _value_ends(self) -> None:
        if self._key in NAME_KEYS and self.name is None:
            self.name = _string(self._value.take())
        self._next = Next.COMMA

    def _mark(self, character: str) -> int:
        """Of the characters between keys and values."""
        if character in SPACE:
            return 1
        match self._next, character:
            case Next.BRACE, "{":
                self._expect_key()
            case Next.COLON, ":":
                self._value_begins()
            case Next.COMMA, ",":
                self._expect_key()
            case ((Next.COMMA | Next.KEY), "}"):
                self.state = State.DONE
            case _:
                self.state = State.BROKEN
                return 0
        return 1

    def _expect_key(self) -> None:
        self._next = Next.KEY
        self._value = JsonValue()


def _string(text: str) -> str | None:
    """None for what isn't a JSON string."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None


def _unpacked(arguments: str) -> str:
    """Some models write the arguments as a string that holds the object; some null for none."""
    if arguments == "null":
        return "{}"
    inner = _string(arguments)
    return inner if inner is not None and inner.lstrip().startswith("{") else arguments
