"""Builds the messages of a chat form from parts that other APIs send apart. Pure.

Chat templates want one message for what the assistant said between two messages of others: its
reasoning, its text and its calls. They want system messages in front, as one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Message = Mapping[str, Any]


class MessageList:
    """Parts are added in the order of the conversation."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._system: list[str] = []
        self._turn: dict[str, Any] | None = None

    def system(self, text: str) -> None:
        """Before any other message it joins the system message."""
        if self._messages or self._turn is not None:
            self._add("system", text)
        else:
            self._system.append(text)

    def user(self, text: str) -> None:
        self._add("user", text)

    def tool_result(self, call_id: str, text: str) -> None:
        self._add("tool", text, tool_call_id=call_id)

    def reasoning(self, text: str) -> None:
        turn = self._assistant(begins_anew=("content", "tool_calls"))
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text

    def said(self, text: str) -> None:
        """A whole text of the assistant."""
        self._assistant(begins_anew=("content", "tool_calls"))["content"] = text

    def called(self, call_id: str, name: str, arguments: str) -> None:
        """`arguments` is JSON text."""
        calls = self._assistant().setdefault("tool_calls", [])
        function = {"name": name, "arguments": arguments}
        calls.append({"id": call_id, "type": "function", "function": function})

    def end_turn(self) -> None:
        if self._turn is not None:
            self._messages.append({"role": "assistant", "content": "", **self._turn})
            self._turn = None

    def all(self) -> tuple[Message, ...]:
        self.end_turn()
        system = [{"role": "system", "content": "\n\n".join(self._system)}] if self._system else []
        return (*system, *self._messages)

    def _add(self, role: str, text: str, **more: str) -> None:
        self.end_turn()
        self._messages.append({"role": role, "content": text, **more})

    def _assistant(self, begins_anew: tuple[str, ...] = ()) -> dict[str, Any]:
        if self._turn is not None and any(part in self._turn for part in begins_anew):
            self.end_turn()
        if self._turn is None:
            self._turn = {}
        return self._turn
