"""[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...], and since the tokenizer of version 11
[TOOL_CALLS]name[ARGS]{...} for each call, of Mistral. Pure.

After https://github.com/mistralai/mistral-common and the chat templates of Mistral.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from router.chat.formats.format import ToolFormat, arguments_of, named_objects
from router.chat.machines.json_calls import JsonCallMachine
from router.chat.machines.json_scan import JsonValue, State
from router.chat.machines.lark import Lark, either, quoted
from router.chat.machines.machine import Machine
from router.chat.values.form import Tool

OPEN = "[TOOL_CALLS]"
HEAD = re.compile(r"\s*(?P<name>[\w.:/-]+)(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\])?\s*")
HEAD_SO_FAR = re.compile(r"\s*[\w.:/-]*(?:\[[A-Z_]*\]?[\w-]*)*\s*")
LONGEST_HEAD = 512


class MistralMachine(JsonCallMachine):
    """The model's own id of a call is not used: it need not be unique."""

    def _begin(self) -> bool:
        return self._content()

    def _content(self) -> bool:
        before, self._raw = self._until((OPEN,))
        self._say(before)
        self._state = self._opened if self._raw else self._content
        return bool(self._raw)

    def _opened(self) -> bool:
        head = self._text.lstrip()
        if not head:
            return False
        if head[0] == "{":
            self._open_call(self._raw)
        elif head[0] == "[":
            self._open_call(self._raw + self._take(self._text.index("[") + 1))
        else:
            self._state = self._head
        return True

    def _after_call(self) -> bool:
        """Behind an element of the list."""
        if not self._skip_space():
            return False
        if self._starts((",",)):
            self._open_call("")
            return True
        self._starts(("]",))
        self._state = self._content
        return True

    def _head(self) -> bool:
        """The name, and all before the arguments. It waits whole, because it may be content."""
        head, brace, _ = self._text.partition("{")
        found = HEAD.fullmatch(head) if brace else None
        if found is not None:
            self._take(len(head))
            self._raw = ""
            self._call_begins(found["name"])
            self._value = JsonValue()
            self._state = self._arguments
            return True
        if not brace and len(head) <= LONGEST_HEAD and HEAD_SO_FAR.fullmatch(head):
            return False
        self._say_raw()
        self._state = self._content
        return True

    def _arguments(self) -> bool:
        self._take(self._value.feed(self._text))
        self._argue(self._value.take())
        if self._value.state is State.OPEN:
            return False
        self._state = self._content
        return True


class Mistral(ToolFormat):
    """The newer of the two, with a marker for each call."""

    name = "mistral"
    markers = (OPEN, "[ARGS]", "[CALL_ID]")
    trigger = OPEN
    call_id_length = 9
    call_id_prefix = ""

    def machine(self, new_id: Callable[[], str], tools: Sequence[Tool]) -> Machine:
        return MistralMachine(new_id, [tool.name for tool in tools])

    def unit(self, lark: Lark, tools: Sequence[Tool], *, many: bool) -> str:
        heads = [
            f"{quoted(tool.name)} {lark.words('[ARGS]')} {arguments}"
            for tool, arguments in arguments_of(lark, tools)
        ]
        return either(heads)

    def required(self, lark: Lark, tools: Sequence[Tool], *, many: bool) -> str:
        unit = super().required(lark, tools, many=many)
        return f"{unit}+" if many else unit


class MistralList(Mistral):
    """The older one: a marker, and the list of all calls."""

    name = "mistral-list"

    def unit(self, lark: Lark, tools: Sequence[Tool], *, many: bool) -> str:
        call = lark.rule("call", named_objects(lark, tools, before="", key="arguments", behind=""))
        more = f'(", " {call})*' if many else ""
        return f'" [" {call} {more} "]"'

    def required(self, lark: Lark, tools: Sequence[Tool], *, many: bool) -> str:
        return ToolFormat.required(self, lark, tools, many=many)
