"""<tool_call><function=name><parameter=key>value</parameter></function></tool_call>, of Qwen3-Coder
and later. Pure.

After the model card and the chat template of https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct.
Values are plain text, so the schema of the tool decides what they are in JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from router.chat.formats.format import ToolFormat, schema_of
from router.chat.machines.lark import Lark, either, json_rule, quoted
from router.chat.machines.machine import Machine, ToolMachine
from router.chat.values.form import Tool

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
FUNCTION = "<function="
FUNCTION_ENDS = "</function>"
PARAMETER = "<parameter="
VALUE_ENDS = ("\n</parameter>", "</parameter>", "\n<parameter=", "\n</function>")
NAME = re.compile(r"[\w.:/-]{1,256}")
LONGEST_NAME = 256


class Qwen3CoderMachine(ToolMachine):
    def __init__(self, new_id: Callable[[], str], tools: Sequence[Tool]) -> None:
        super().__init__(new_id, [tool.name for tool in tools])
        self._schemas = {tool.name: _properties(tool.parameters) for tool in tools}
        self._types: Mapping[str, Any] = {}
        self._keys: set[str] = set()
        self._kinds = ALL_KINDS
        self._value = ""
        self._streams = False
        self._open = False

    def _begin(self) -> bool:
        """Models forget the outer tag at times."""
        before, self._raw = self._until((OPEN, FUNCTION))
        self._say(before)
        match self._raw:
            case "":
                return False
            case "<tool_call>":
                self._state = self._opened
            case _:
                self._state = self._function
        return True

    def _opened(self) -> bool:
        space = len(self._text) - len(self._text.lstrip())
        self._raw += self._take(space)
        function = self._starts((FUNCTION,)) if self._text else None
        if function is None:
            return False
        self._raw += function
        if function:
            self._state = self._function
        else:
            self._say_raw()
            self._state = self._begin
        return True

    def _function(self) -> bool:
        name = self._named()
        if name is None:
            return False
        if not name:
            self._say_raw()
            self._state = self._begin
            return True
        self._raw, self._open = "", True
        self._call_begins(name)
        self._types, self._keys = self._schemas.get(name, {}), set()
        self._argue("{")
        self._state = self._parameters
        return True

    def _named(self) -> str | None:
        """Takes a name and the bracket behind it; empty: there is no such. None: not known yet."""
        name, bracket, _ = self._text.partition(">")
        if not bracket and len(name) <= LONGEST_NAME and not self._ended and "\n" not in name:
            return None
        if not bracket or not NAME.fullmatch(name):
            return ""
        return self._take(len(name) + 1)[:-1]

    def _parameters(self) -> bool:
        """Between parameters. What is neither of the tags is content, and ends the call."""
        if not self._skip_space():
            return False
        tag = self._starts((PARAMETER, FUNCTION_ENDS, CLOSE))
        match tag:
            case None:
                return False
            case "<parameter=":
                self._state = self._key
            case "</function>":
                self._close(self._closing)
            case _:
                self._close(self._begin)
        return True

    def _close(self, state: Callable[[], bool]) -> None:
        self._argue("}")
        self._open = False
        self._state = state

    def _closing(self) -> bool:
        """The outer tag may be missing, or another function of the same tag follows."""
        if self._ended and CLOSE.startswith(self._text.strip()):
            self._text = ""
        if not self._skip_space() or self._starts((CLOSE,)) is None:
            return False
        self._state = self._begin
        return True

    def _key(self) -> bool:
        key = self._named()
        if key is None:
            return False
        if not key:
            self._close(self._begin)
            return True
        if key in self._keys:
            self._state = self._repeated
            return True
        self._argue((", " if self._keys else "") + json.dumps(key, ensure_ascii=False) + ": ")
        self._keys.add(key)
        self._kinds = kinds_of(self._types.get(key))
        self._streams = self._kinds == {"string"}
        self._argue('"' if self._streams else "")
        self._state = self._value_begins
        return True

    def _value_begins(self) -> bool:
        if self._text.startswith("\n") and not self._text.startswith(VALUE_ENDS):
            if any(end.startswith(self._text) for end in VALUE_ENDS) and not self._ended:
                return False
            self._take(1)
        self._state = self._in_value
        return True

    def _in_value(self) -> bool:
        text, end = self._until(VALUE_ENDS)
        if self._streams:
            self._argue(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._value += text
        if end:
            self._value_ends(end)
        return bool(end)

    def _value_ends(self, end: str) -> None:
        self._argue('"' if self._streams else json_of(self._value, self._kinds))
        self._value = ""
        if end not in VALUE_ENDS[:2]:
            self._text = end.lstrip() + self._text
        self._state = self._parameters

    def _repeated(self) -> bool:
        """A key that was there already: JSON has each once."""
        _, end = self._until(VALUE_ENDS)
        if end and end not in VALUE_ENDS[:2]:
            self._text = end.lstrip() + self._text
        if end:
            self._state = self._parameters
        return bool(end)

    def _end(self) -> None:
        """A call that was cut off is told as far as it came; only its end may be missing."""
        if self._open:
            self._text = ""
        if self._open and self._state == self._parameters:
            self._argue("}")
        super()._end()


def _properties(parameters: Mapping[str, Any] | None) -> Mapping[str, Any]:
    properties = (parameters or {}).get("properties")
    return properties if isinstance(properties, Mapping) else {}


ALL_KINDS = frozenset({"string", "integer", "number", "boolean", "object", "array", "null"})


def kinds_of(schema: object) -> frozenset[str]:
    """The JSON types that a schema's own words allow; all if it doesn't say."""
    if not isinstance(schema, Mapping):
        return ALL_KINDS
    match schema.get("type"):
        case str() as kind:
            return frozenset({kind})
        case list() as kinds:
            return frozenset(kind for kind in kinds if isinstance(kind, str))
        case _:
            pass
    if isinstance(schema.get("enum"), list):
        return frozenset(_kind_of(one) for one in schema["enum"])
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            return frozenset().union(*map(kinds_of, schema[key]))
    return ALL_KINDS


def _kind_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def json_of(text: str, kinds: frozenset[str]) -> str:
    """The JSON of a value that the model wrote as text. Text that is nothing else is a string."""
    plain = text.strip()
    plain = {"True": "true", "False": "false", "None": "null"}.get(plain, plain)
    try:
        value = json.loads(plain)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = _kind_of(value)
    fits = kind in kinds or (kind == "integer" and "number" in kinds)
    return plain if fits else json.dumps(text, ensure_ascii=False)


class Qwen3Coder(ToolFormat):
    name = "qwen3-coder"
    markers = (OPEN, CLOSE)
    trigger = OPEN
    between = "\n"

    def machine(self, new_id: Callable[[], str], tools: Sequence[Tool]) -> Machine:
        return Qwen3CoderMachine(new_id, tools)

    def unit(self, lark: Lark, tools: Sequence[Tool], *, many: bool) -> str:
        calls = [lark.rule(f"call_{n}", _call(lark, tool, n)) for n, tool in enumerate(tools)]
        return f"{either(calls)} {lark.words(CLOSE)}"


def _call(lark: Lark, tool: Tool, number: int) -> str:
    """Parameters in the order of the schema, which also names those of a tool that isn't strict."""
    schema = schema_of(tool, strict=tool.strict)
    head, end = quoted(f"\n<function={tool.name}>\n"), quoted("</function>\n")
    properties = _properties(schema)
    if not tool.strict and not properties:
        properties = _properties(tool.parameters)
    needed = schema.get("required") or ()
    parts = []
    for position, (key, one) in enumerate(properties.items()):
        parameter = _parameter(lark, f"value_{number}_{position}", key, one, schema)
        parts.append(parameter if key in needed else f"({parameter})?")
    return " ".join([head, *parts, end])


def _parameter(lark: Lark, name: str, key: str, schema: object, root: Mapping[str, Any]) -> str:
    head = quoted(f"<parameter={key}>\n")
    tail = "\n</parameter>\n"
    if not isinstance(schema, Mapping) or "string" in kinds_of(schema):
        return f"{head} {_plain(lark, name, schema, tail)}"
    definitions = {at: root[at] for at in ("$defs", "definitions") if at in root}
    return f"{head} {lark.rule(name, json_rule({**definitions, **schema}))} {quoted(tail)}"


def _plain(lark: Lark, name: str, schema: object, tail: str) -> str:
    """Text as it is. What else a schema says of strings can't be asked of plain text."""
    choices = schema.get("enum") if isinstance(schema, Mapping) else None
    if isinstance(choices, list) and choices and all(isinstance(one, str) for one in choices):
        return f"{either([quoted(one) for one in choices])} {quoted(tail)}"
    return lark.until(name, tail)
