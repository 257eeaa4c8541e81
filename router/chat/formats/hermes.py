"""<tool_call>{"name": ..., "arguments": {...}}</tool_call>, of Hermes 2 Pro, Qwen 2.5 and 3. Pure.

After https://github.com/NousResearch/Hermes-Function-Calling and the chat templates of Qwen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from router.chat.formats.format import ToolFormat, named_objects
from router.chat.machines.json_calls import JsonCallMachine
from router.chat.machines.lark import Lark
from router.chat.machines.machine import Machine
from router.chat.values.form import Tool

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class HermesMachine(JsonCallMachine):
    def _begin(self) -> bool:
        return self._content()

    def _content(self) -> bool:
        before, marker = self._until((OPEN,))
        self._say(before)
        if marker:
            self._open_call(marker)
        else:
            self._state = self._content
        return bool(marker)

    def _after_call(self) -> bool:
        """Models forget the end, or write a brace too many before it."""
        self._text = self._text.lstrip(" \t\r\n}]")
        if self._ended and CLOSE.startswith(self._text):
            self._text = ""
        if not self._text or self._starts((CLOSE,)) is None:
            return False
        self._state = self._content
        return True


class Hermes(ToolFormat):
    name = "hermes"
    markers = (OPEN, CLOSE)
    trigger = OPEN
    between = "\n"

    def machine(self, new_id: Callable[[], str], tools: Sequence[Tool]) -> Machine:
        return HermesMachine(new_id, [tool.name for tool in tools])

    def unit(self, lark: Lark, tools: Sequence[Tool], *, many: bool) -> str:
        body = named_objects(lark, tools, before="\n", key="arguments", behind="\n")
        return f"{body} {lark.words(CLOSE)}"
