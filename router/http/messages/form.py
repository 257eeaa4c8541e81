"""Messages of Anthropic's API become a chat form. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from kvrelay.errors import InvalidRequest
from router.chat.messages import MessageList
from router.chat.values.form import ChatForm, Tool, ToolChoice, ToolUse
from router.http.messages.bodies import (
    AnyChoice,
    AutoChoice,
    Block,
    CustomTool,
    Message,
    NoChoice,
    PromptFields,
    RedactedThinking,
    TextBlock,
    TextBlocks,
    ThinkingBlock,
    ThinkingDisabled,
    ToolChoiceBody,
    ToolResult,
    ToolUseBlock,
)
from router.text.grammar.grammars import grammar_of_schema

BILLING_NOTE = "x-anthropic-billing-header:"
"""Begins a system block of Claude Code that differs in each request. It is no part of the prompt,
or no two requests would share their KV."""
FAILED = "Error: "
"""Begins the result of a tool that failed: chat templates have no other word for it."""


def form_of(body: PromptFields) -> ChatForm:
    """Raises InvalidRequest."""
    return ChatForm(
        messages=_messages(body),
        tools=tuple(_tool(tool) for tool in body.tools or ()),
        choice=_choice(body),
        grammar=_grammar(body),
        template_kwargs=_template_kwargs(body),
    )


def check_last(body: PromptFields) -> None:
    """Raises InvalidRequest where the model would have to go on with its own words."""
    if body.messages and body.messages[-1].role == "assistant":
        raise InvalidRequest(
            "the last message is the assistant's: kvrelay can't go on with it, "
            "end with a user message",
            code="unsupported_parameter",
            param="messages",
        )


def _messages(body: PromptFields) -> tuple[Mapping[str, Any], ...]:
    messages = MessageList()
    for text in _texts(body.system):
        if not text.startswith(BILLING_NOTE):
            messages.system(text)
    for position, message in enumerate(body.messages):
        _add(messages, message, f"messages[{position}]")
    return messages.all()


def _add(messages: MessageList, message: Message, path: str) -> None:
    if isinstance(message.content, str):
        _add_text(messages, message.role, message.content)
    elif message.role == "assistant":
        _add_said(messages, message.content, path)
    else:
        _add_given(messages, message.role, message.content, path)


def _add_text(messages: MessageList, role: str, text: str) -> None:
    match role:
        case "user":
            messages.user(text)
        case "assistant":
            messages.said(text)
        case _:
            messages.system(text)


def _add_said(messages: MessageList, blocks: Iterable[Block], path: str) -> None:
    """The blocks of one message are one turn; its texts are joined by newlines."""
    said: list[str] = []
    calls: list[ToolUseBlock] = []
    for position, block in enumerate(blocks):
        match block:
            case ThinkingBlock():
                messages.reasoning(block.thinking)
            case TextBlock():
                said.append(block.text)
            case ToolUseBlock():
                calls.append(block)
            case RedactedThinking():
                pass
            case ToolResult():
                raise _misplaced(block, f"{path}.content[{position}]", "user")
    if said:
        messages.said("\n".join(said))
    for call in calls:
        messages.called(call.id, call.name, json.dumps(call.input, ensure_ascii=False))


def _add_given(messages: MessageList, role: str, blocks: Iterable[Block], path: str) -> None:
    """Results of tools are messages of their own, in the order of the blocks."""
    texts: list[str] = []

    def flush() -> None:
        if texts:
            _add_text(messages, role, "\n".join(texts))
            texts.clear()

    for position, block in enumerate(blocks):
        match block:
            case TextBlock():
                texts.append(block.text)
            case ToolResult() if role == "user":
                flush()
                messages.tool_result(block.tool_use_id, _result(block))
            case _:
                raise _misplaced(block, f"{path}.content[{position}]", "assistant")
    flush()


def _result(block: ToolResult) -> str:
    text = "\n".join(_texts(block.content))
    return FAILED + text if block.is_error else text


def _misplaced(block: Block, path: str, role: str) -> InvalidRequest:
    return InvalidRequest(
        f"{path}: a block of type {block.type} must be in a message of role {role}", param=path
    )


def _texts(given: TextBlocks | None) -> list[str]:
    match given:
        case None:
            return []
        case str():
            return [given] if given else []
        case blocks:
            return [block.text for block in blocks]


def _tool(tool: CustomTool) -> Tool:
    return Tool(
        name=tool.name,
        description=tool.description or "",
        parameters=tool.input_schema,
        strict=bool(tool.strict),
    )


def _choice(body: PromptFields) -> ToolChoice:
    match body.tool_choice:
        case None:
            return ToolChoice()
        case NoChoice():
            return ToolChoice(use=ToolUse.NONE)
        case AutoChoice() as auto:
            return ToolChoice(parallel=not auto.disable_parallel_tool_use)
        case AnyChoice() as some:
            return ToolChoice(use=ToolUse.REQUIRED, parallel=not some.disable_parallel_tool_use)
        case ToolChoiceBody() as one:
            return ToolChoice(
                use=ToolUse.REQUIRED,
                only=(one.name,),
                parallel=not one.disable_parallel_tool_use,
            )


def _grammar(body: PromptFields) -> str:
    config = body.output_config
    asked, param = (config.format if config is not None else None), "output_config.format"
    if asked is None:
        asked, param = body.output_format, "output_format"
    return grammar_of_schema(asked.schema_, param=param) if asked is not None else ""


def _template_kwargs(body: PromptFields) -> dict[str, Any]:
    """Without `thinking` the chat template decides."""
    kwargs: dict[str, Any] = {}
    if body.thinking is not None:
        kwargs["enable_thinking"] = not isinstance(body.thinking, ThinkingDisabled)
    if body.output_config is not None and body.output_config.effort is not None:
        kwargs["reasoning_effort"] = body.output_config.effort
    return {**kwargs, **(body.chat_template_kwargs or {})}
