"""A chat, whatever API it came by: messages, the tools that the model may call, and how. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from kvrelay.types import value


class ToolUse(StrEnum):
    """`required`: at least one call, of any tool."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


@value
class Tool:
    """`parameters` is the JSON schema of its arguments. `strict`: the arguments must match it."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    strict: bool = False


@value
class ToolChoice:
    """`only` names the tools that may be called; empty: all."""

    use: ToolUse = ToolUse.AUTO
    only: tuple[str, ...] = ()
    parallel: bool = True


@value
class ChatForm:
    """`messages` are as chat templates take them, OpenAI's: `role`, `content` (text), and where
    there are such, `name`, `reasoning_content`, `tool_call_id`, and `tool_calls` of
    `{"id", "type": "function", "function": {"name", "arguments"}}`, whose arguments are JSON text.

    `prompt_ids`, unless empty, are the prompt: its template was rendered elsewhere.
    `grammar`, unless empty, is what the answer's content must match, as llguidance writes it.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice()
    grammar: str = ""
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    template_kwargs: Mapping[str, Any] | None = None
    prompt_ids: tuple[int, ...] = ()

    def callable_tools(self) -> tuple[Tool, ...]:
        """Those that the answer may call."""
        if self.choice.use is ToolUse.NONE:
            return ()
        only = self.choice.only
        return tuple(tool for tool in self.tools if not only or tool.name in only)
