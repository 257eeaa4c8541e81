"""{"name": ..., "parameters": {...}} as the whole answer, or behind <|python_tag|>, of Llama 3.1 to
3.3. Pure.

After https://github.com/meta-llama/llama-models, models/llama3_1/prompt_format.md and
models/llama3_2/text_prompt_format.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from router.chat.formats.format import ToolFormat, named_objects
from router.chat.machines.json_calls import JsonCallMachine
from router.chat.machines.lark import Lark
from router.chat.machines.machine import Machine
from router.chat.values.form import Tool

TAG = "<|python_tag|>"


class Llama3Machine(JsonCallMachine):
    """Without the tag an answer that is JSON is a call only if it names a tool on offer."""

    def _begin(self) -> bool:
        """An answer begins, or what follows a call."""
        self._say(self._take(len(self._text) - len(self._text.lstrip())))
        begins = self._starts((TAG, "{")) if self._text else None
        match begins:
            case None:
                return False
            case "{":
                self._text = "{" + self._text
                self._open_call("", offered_only=True)
            case "":
                self._state = self._content
            case _:
                self._open_call(TAG)
        return True

    def _content(self) -> bool:
        before, marker = self._until((TAG,))
        self._say(before)
        if marker:
            self._open_call(marker)
        return bool(marker)

    def _after_call(self) -> bool:
        """Several calls have semicolons between them."""
        if not self._skip_space():
            return False
        self._starts((";",))
        self._state = self._begin
        return True


class Llama3(ToolFormat):
    """These models make one call at a time."""

    name = "llama3"
    markers = (TAG,)

    def machine(self, new_id: Callable[[], str], tools: Sequence[Tool]) -> Machine:
        return Llama3Machine(new_id, [tool.name for tool in tools])

    def unit(self, lark: Lark, tools: Sequence[Tool], *, many: bool) -> str:
        return named_objects(lark, tools, before="", key="parameters", behind="")

    def allowed(self, lark: Lark, tools: Sequence[Tool], *, many: bool) -> str:
        """Text that doesn't begin as JSON, or a call."""
        unit = lark.rule("unit", self.unit(lark, tools, many=many))
        tagged = f"{lark.words(TAG)} {unit} | " if lark.is_special(TAG) else ""
        other = lark.rule("OTHER", r"/[^\{\s](?s:.*)/")
        return f"({tagged}{unit} | {other})"
