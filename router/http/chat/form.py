"""The body of a chat becomes the form that all chat APIs share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvrelay.errors import InvalidRequest
from router.chat.thinking import effort_kwargs
from router.chat.values.form import ChatForm, Tool, ToolChoice, ToolUse
from router.http.bodies import ChatBody, MessageBody, TokenizeBody
from router.http.tool_bodies import ToolBody, ToolCallBody, ToolChoiceBody

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def form_of(body: ChatBody) -> ChatForm:
    """Raises InvalidRequest."""
    return ChatForm(
        messages=messages_of(body.messages),
        tools=tools_of(body.tools or ()),
        choice=_choice(body.tool_choice, parallel=body.parallel_tool_calls is not False),
        add_generation_prompt=body.add_generation_prompt is not False,
        add_special_tokens=bool(body.add_special_tokens),
        template_kwargs=_effort(body.reasoning_effort) | (body.chat_template_kwargs or {}),
        prompt_ids=tuple(body.prompt_token_ids or ()),
    )


def form_to_tokenize(body: TokenizeBody) -> ChatForm:
    """Raises InvalidRequest."""
    return ChatForm(
        messages=messages_of(body.messages or ()),
        tools=tools_of(body.tools or ()),
        add_generation_prompt=body.add_generation_prompt is not False,
        add_special_tokens=bool(body.add_special_tokens),
        template_kwargs=body.chat_template_kwargs,
    )


def _effort(effort: str | None) -> dict[str, Any]:
    if effort is not None and effort not in EFFORTS:
        known = ", ".join(EFFORTS)
        raise InvalidRequest(
            f"reasoning_effort must be one of {known}, not {effort}", param="reasoning_effort"
        )
    return effort_kwargs(effort)


def tools_of(tools: Sequence[ToolBody]) -> tuple[Tool, ...]:
    return tuple(_tool(tool, position) for position, tool in enumerate(tools))


def _tool(tool: ToolBody, position: int) -> Tool:
    param = f"tools[{position}]"
    if tool.type != "function":
        raise InvalidRequest(
            f"{param}: tools of type {tool.type!r} are not supported, send functions",
            code="unsupported_parameter",
            param=param,
        )
    unknown = next((name for name, value in (tool.model_extra or {}).items() if value), None)
    if unknown is not None:
        path = f"{param}.{unknown}"
        raise InvalidRequest(f"unknown field {path!r}", code="unknown_parameter", param=path)
    if tool.function is None:
        path = f"{param}.function"
        raise InvalidRequest(f"the field {path!r} is missing", code="missing_parameter", param=path)
    return Tool(
        name=tool.function.name,
        description=tool.function.description or "",
        parameters=tool.function.parameters,
        strict=bool(tool.function.strict),
    )


def _choice(choice: str | ToolChoiceBody | None, *, parallel: bool) -> ToolChoice:
    match choice:
        case None:
            return ToolChoice(parallel=parallel)
        case str() if choice in {use.value for use in ToolUse}:
            return ToolChoice(use=ToolUse(choice), parallel=parallel)
        case ToolChoiceBody(type="function") if choice.function is not None:
            only = (choice.function.name,)
            return ToolChoice(use=ToolUse.REQUIRED, only=only, parallel=parallel)
        case ToolChoiceBody(type="allowed_tools") if choice.allowed_tools is not None:
            allowed = choice.allowed_tools
            names = tuple(tool.function.name for tool in allowed.tools)
            if allowed.mode in ("auto", "required") and names:
                return ToolChoice(use=ToolUse(allowed.mode), only=names, parallel=parallel)
        case _:
            pass
    raise InvalidRequest(
        "tool_choice must be none, auto, required, "
        '{"type": "function", "function": {"name": ...}} or {"type": "allowed_tools", '
        '"allowed_tools": {"mode": "auto" or "required", "tools": [...]}}',
        param="tool_choice",
    )


def messages_of(messages: Sequence[MessageBody]) -> tuple[Mapping[str, Any], ...]:
    """Raises InvalidRequest for content that isn't text."""
    return tuple(_plain(message, position) for position, message in enumerate(messages))


def _plain(message: MessageBody, position: int) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role, "content": _content(message, position)}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    reasoning = message.reasoning or message.reasoning_content
    if reasoning:
        plain["reasoning_content"] = reasoning
    if message.tool_calls:
        plain["tool_calls"] = [_call(call, position) for call in message.tool_calls]
    return plain


def _call(call: ToolCallBody, position: int) -> dict[str, Any]:
    if call.type != "function":
        param = f"messages[{position}].tool_calls"
        raise InvalidRequest(
            f"{param}: calls of type {call.type!r} are not supported, send functions",
            code="unsupported_parameter",
            param=param,
        )
    function = {"name": call.function.name, "arguments": call.function.arguments or "{}"}
    return {"id": call.id, "type": "function", "function": function}


def _content(message: MessageBody, position: int) -> str:
    """Text parts are joined by newlines."""
    param = f"messages[{position}].content"
    match message.content:
        case None if message.tool_calls or message.reasoning or message.reasoning_content:
            return ""
        case None:
            raise InvalidRequest(f"{param} is missing: send text", param=param)
        case str() as text:
            return text
        case parts:
            wrong = [part.type for part in parts if part.type != "text" or part.text is None]
            if wrong:
                raise InvalidRequest(
                    f"{param}: parts of type {wrong[0]!r} are not supported, send text",
                    code="unsupported_parameter",
                    param=param,
                )
            return "\n".join(part.text for part in parts if part.text is not None)
