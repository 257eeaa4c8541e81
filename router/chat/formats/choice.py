"""Which formats a model writes: named by the configuration, or found in its chat template. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from kvrelay.errors import ModelError
from kvrelay.types import value
from router.chat.formats.format import ToolFormat
from router.chat.formats.harmony import Harmony
from router.chat.formats.hermes import Hermes
from router.chat.formats.llama3 import Llama3
from router.chat.formats.mistral import Mistral, MistralList
from router.chat.formats.qwen3_coder import Qwen3Coder
from router.chat.formats.thinking import MISTRAL_THINK, THINK, Thinking

Format = TypeVar("Format")

AUTO = "auto"
NONE = "none"

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    one.name: one for one in (Hermes(), Llama3(), Mistral(), MistralList(), Qwen3Coder(), Harmony())
}
REASONING_FORMATS: Mapping[str, Thinking] = {one.name: one for one in (THINK, MISTRAL_THINK)}

OTHER_CALLS = ("<arg_key>", "<|tool_call>", "<tool_call_begin>")
"""Marks of calls that no format here reads, though they resemble some."""

SIGNS = (
    ("<|channel|>", "harmony"),
    ("<function=", "qwen3-coder"),
    ("<tool_call>", "hermes"),
    ("[ARGS]", "mistral"),
    ("[TOOL_CALLS]", "mistral-list"),
    ("<|python_tag|>", "llama3"),
    ('{"name": function name, "parameters": dictionary', "llama3"),
)
"""Texts of chat templates, and the format that the first of them shows."""

THINKING_SIGNS = (("[/THINK]", "mistral"), ("</think>", "think"))


@value
class ChatFormats:
    """`tools` None: the model calls none. `reasoning` None: what it says is all content, unless its
    tool format tells reasoning apart."""

    tools: ToolFormat | None = None
    reasoning: Thinking | None = None


PLAIN = ChatFormats()


def formats_of(template: str, tool_format: str = AUTO, reasoning_format: str = AUTO) -> ChatFormats:
    """`template` is the source of the chat template; empty: there is none. Raises ModelError for
    the name of no format."""
    tools = _tools_in(template) if tool_format == AUTO else tool_format
    reasoning = _reasoning_in(template) if reasoning_format == AUTO else reasoning_format
    if tools == "harmony" and reasoning_format == AUTO:
        reasoning = NONE
    return ChatFormats(
        tools=_named("tool_format", tools, TOOL_FORMATS),
        reasoning=_named("reasoning_format", reasoning, REASONING_FORMATS),
    )


def _tools_in(template: str) -> str:
    if "tools" not in template or any(sign in template for sign in OTHER_CALLS):
        return "harmony" if "<|channel|>" in template else NONE
    return next((name for sign, name in SIGNS if sign in template), NONE)


def _reasoning_in(template: str) -> str:
    return next((name for sign, name in THINKING_SIGNS if sign in template), NONE)


def _named(key: str, name: str, known: Mapping[str, Format]) -> Format | None:
    if name == NONE:
        return None
    if name not in known:
        names = ", ".join((AUTO, *known, NONE))
        raise ModelError(f"model.{key} must be one of {names}, not {name}")
    return known[name]
