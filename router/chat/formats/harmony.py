"""Channels of gpt-oss: <|channel|>analysis<|message|>..., commentary to=functions.name for calls,
final for the answer. Pure.

After https://cookbook.openai.com/articles/openai-harmony. The prompt ends with <|start|>assistant,
so an answer begins with the header of its first message.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from router.chat.formats.format import ToolFormat, arguments_of
from router.chat.machines.lark import ANY_TEXT, Lark, either, quoted
from router.chat.machines.machine import Machine, ToolMachine
from router.chat.values.form import Tool

START = "<|start|>"
CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
END = "<|end|>"
CALL = "<|call|>"
RETURN = "<|return|>"
CONSTRAIN = "<|constrain|>"
MARKERS = (START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN)
ENDS = (END, CALL, RETURN, START)
RECIPIENT = re.compile(r"to=([^\s<]+)")
PREFIX = "functions."


class HarmonyMachine(ToolMachine):
    """A message to a tool that isn't a function's is reasoning: built-in tools are not offered."""

    def _begin(self) -> bool:
        """Before a header. Text without one is content."""
        begins = self._starts((CHANNEL, START, MESSAGE, " to="))
        match begins:
            case None:
                return False
            case "":
                self._state = self._in_content
            case "<|message|>":
                self._state = self._in_content
            case "<|start|>":
                self._raw = ""
                self._state = self._header
            case _:
                self._raw = begins
                self._state = self._header
        return True

    def _header(self) -> bool:
        """It waits whole: the recipient stands before or behind the channel."""
        text, marker = self._until((MESSAGE, *ENDS))
        self._raw += text
        if not marker:
            return False
        if marker == MESSAGE:
            header, self._raw = self._raw, ""
            self._open(header)
        else:
            self._say_raw()
            self._state = self._header if marker == START else self._begin
        return True

    def _open(self, header: str) -> None:
        recipient = RECIPIENT.search(header)
        to = recipient[1] if recipient else ""
        if to.startswith(PREFIX) or to in self._tools:
            self._call_begins(to.removeprefix(PREFIX))
            self._state = self._in_call
        elif to or "analysis" in header:
            self._state = self._in_reasoning
        else:
            self._state = self._in_content

    def _in_content(self) -> bool:
        text, marker = self._until(ENDS)
        self._say(text)
        return self._closed(marker)

    def _in_reasoning(self) -> bool:
        text, marker = self._until(ENDS)
        self._reason(text)
        return self._closed(marker)

    def _in_call(self) -> bool:
        text, marker = self._until(ENDS)
        self._argue(text)
        return self._closed(marker)

    def _closed(self, marker: str) -> bool:
        if marker:
            self._state = self._header if marker == START else self._begin
        return bool(marker)


class Harmony(ToolFormat):
    """Its reasoning is a channel, so the grammars here have it too."""

    name = "harmony"
    reads_all = True
    markers = MARKERS

    def machine(self, new_id: Callable[[], str], tools: Sequence[Tool]) -> Machine:
        return HarmonyMachine(new_id, [tool.name for tool in tools])

    def unit(self, lark: Lark, tools: Sequence[Tool], *, many: bool) -> str:
        """The end of a call is a stop token."""
        heads = [
            f"{quoted(f'commentary to={PREFIX}{tool.name} ')} "
            f"{lark.words(CONSTRAIN, 'json', MESSAGE)} {arguments}"
            for tool, arguments in arguments_of(lark, tools)
        ]
        return f"{lark.words(CHANNEL)} {either(heads)}"

    def required(self, lark: Lark, tools: Sequence[Tool], *, many: bool) -> str:
        return f"{self.thought(lark)} {self.unit(lark, tools, many=many)}"

    def allowed(self, lark: Lark, tools: Sequence[Tool], *, many: bool) -> str:
        unit = self.unit(lark, tools, many=many)
        return f"{self.thought(lark)} ({unit} | {self.answer(lark, ANY_TEXT)})"

    def thought(self, lark: Lark) -> str:
        """Messages that are read and not called or answered: reasoning, and what is said ahead."""
        kind = either([quoted("analysis"), quoted("commentary")])
        said = f"{lark.words(CHANNEL)} {kind} {lark.words(MESSAGE)} {lark.until('said', END)}"
        return f"({said} {lark.words(START, 'assistant')})*"

    def answer(self, lark: Lark, content: str) -> str:
        return f"{lark.words(CHANNEL, 'final', MESSAGE)} {content}"
