"""What a format is: how it is read, and the grammar of its calls. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from router.chat.machines.lark import ANY_TEXT, Lark, either, json_rule, quoted
from router.chat.machines.machine import Machine
from router.chat.values.form import Tool

ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}


class ToolFormat(ABC):
    """`markers` may be special tokens of the tokenizer, which the reader must see as text.
    `trigger` begins each unit of calls; `between` stands between units that follow each other."""

    name: ClassVar[str]
    markers: ClassVar[tuple[str, ...]] = ()
    trigger: ClassVar[str] = ""
    between: ClassVar[str] = ""
    reads_all: ClassVar[bool] = False
    """Answers without tools are in this format too."""
    call_id_length: ClassVar[int] = 24
    call_id_prefix: ClassVar[str] = "call_"

    @abstractmethod
    def machine(self, new_id: Callable[[], str], tools: Sequence[Tool]) -> Machine: ...

    @abstractmethod
    def unit(self, lark: Lark, tools: Sequence[Tool], *, many: bool) -> str:
        """A Lark expression for what follows the trigger; `many` calls, if one unit can have
        several."""

    def required(self, lark: Lark, tools: Sequence[Tool], *, many: bool) -> str:
        """One call or more, and nothing else."""
        unit = lark.rule("unit", f"{lark.words(self.trigger)} {self.unit(lark, tools, many=many)}")
        return f"{unit} ({quoted(self.between)} {unit})*" if many and self.between else unit

    def allowed(self, lark: Lark, tools: Sequence[Tool], *, many: bool) -> str:
        """Any text. What begins as a call is one, of these tools."""
        unit = self.unit(lark, tools, many=many)
        head = lark.until("head", self.trigger)
        if not many:
            return f"({ANY_TEXT} | {head} {unit})"
        return f"({head} {unit})* {lark.rule('tail', ANY_TEXT)}"


def schema_of(tool: Tool, *, strict: bool) -> Mapping[str, Any]:
    """Of its arguments: always an object."""
    if not strict or not tool.parameters:
        return ANY_ARGUMENTS
    return {"type": "object", **tool.parameters}


def arguments_of(lark: Lark, tools: Sequence[Tool]) -> list[tuple[Tool, str]]:
    """Each tool with the rule of its arguments."""
    return [
        (tool, lark.rule(f"arguments_{n}", json_rule(schema_of(tool, strict=tool.strict))))
        for n, tool in enumerate(tools)
    ]


def named_objects(lark: Lark, tools: Sequence[Tool], *, before: str, key: str, behind: str) -> str:
    """{"name": ..., key: {...}} of one of the tools, spaced as templates show it to models."""
    return either(
        [
            f"{quoted(before + _head(tool, key))} {arguments} {quoted('}' + behind)}"
            for tool, arguments in arguments_of(lark, tools)
        ]
    )


def _head(tool: Tool, key: str) -> str:
    return f'{{"name": {quoted(tool.name)}, "{key}": '
