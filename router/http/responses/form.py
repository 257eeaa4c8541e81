"""Items of a conversation become the messages of a chat form. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvrelay.errors import InvalidRequest
from router.chat.messages import MessageList
from router.chat.thinking import effort_kwargs
from router.chat.values.form import ChatForm, Tool, ToolChoice, ToolUse
from router.http.responses.bodies import (
    AllowedTools,
    FunctionCall,
    FunctionCallOutput,
    FunctionTool,
    Input,
    InputText,
    Item,
    JsonObjectFormat,
    JsonSchemaFormat,
    MessageItem,
    NamedFunction,
    OutputText,
    PromptFields,
    ReasoningItem,
    Refusal,
)
from router.text.grammar.grammars import JSON_OBJECT, grammar_of_schema


def form_of(body: PromptFields, items: Sequence[Item]) -> ChatForm:
    """`items` is the whole conversation. Raises InvalidRequest."""
    return ChatForm(
        messages=_messages(body.instructions, items),
        tools=tuple(_tool(tool) for tool in body.tools or ()),
        choice=_choice(body),
        grammar=_grammar(body),
        template_kwargs=_template_kwargs(body),
    )


def items_of(given: Input) -> list[Item]:
    """Raises InvalidRequest without items."""
    if isinstance(given, str):
        return [MessageItem(role="user", content=given)]
    if not given:
        raise InvalidRequest("input is empty: send a text or at least one item", param="input")
    return given


def _messages(instructions: str | None, items: Sequence[Item]) -> tuple[Mapping[str, Any], ...]:
    messages = MessageList()
    if instructions:
        messages.system(instructions)
    for item in items:
        _add(messages, item)
    return messages.all()


def _add(messages: MessageList, item: Item) -> None:
    match item:
        case MessageItem(role="user"):
            messages.user(_text(item.content))
        case MessageItem(role="assistant"):
            messages.said(_text(item.content))
        case MessageItem():
            messages.system(_text(item.content))
        case FunctionCall():
            messages.called(item.call_id, item.name, item.arguments)
        case FunctionCallOutput():
            messages.tool_result(item.call_id, _text(item.output))
        case ReasoningItem():
            if text := _reasoning(item):
                messages.reasoning(text)


def _text(content: str | Sequence[InputText | OutputText | Refusal]) -> str:
    """Parts are joined by newlines."""
    if isinstance(content, str):
        return content
    return "\n".join(part.refusal if isinstance(part, Refusal) else part.text for part in content)


def _reasoning(item: ReasoningItem) -> str:
    return "\n".join(part.text for part in item.content or item.summary or ())


def _tool(tool: FunctionTool) -> Tool:
    return Tool(
        name=tool.name,
        description=tool.description or "",
        parameters=tool.parameters,
        strict=bool(tool.strict),
    )


def _choice(body: PromptFields) -> ToolChoice:
    parallel = body.parallel_tool_calls is not False
    match body.tool_choice:
        case None:
            return ToolChoice(parallel=parallel)
        case str() as use:
            return ToolChoice(use=ToolUse(use), parallel=parallel)
        case NamedFunction() as one:
            return ToolChoice(use=ToolUse.REQUIRED, only=(one.name,), parallel=parallel)
        case AllowedTools() as some:
            only = tuple(tool.name for tool in some.tools)
            return ToolChoice(use=ToolUse(some.mode), only=only, parallel=parallel)


def _grammar(body: PromptFields) -> str:
    match body.text.format if body.text is not None else None:
        case JsonObjectFormat():
            return JSON_OBJECT
        case JsonSchemaFormat() as asked:
            return grammar_of_schema(asked.schema_, param="text.format")
        case _:
            return ""


def _template_kwargs(body: PromptFields) -> dict[str, Any]:
    """The names that chat templates have for the effort."""
    given = body.chat_template_kwargs or {}
    effort = body.reasoning.effort if body.reasoning is not None else None
    return {**effort_kwargs(effort), **given}
