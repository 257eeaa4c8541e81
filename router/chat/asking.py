"""A chat's form becomes a request: its prompt, and what its answer must match."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvrelay.errors import InvalidRequest
from router.chat.grammar import answer_grammar
from router.chat.values.form import ChatForm, Tool, ToolUse
from router.text.request import ChatPrompt, PromptInput, TextRequest
from router.text.service import TextService

MOST_TOOLS = 512
TOOL_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


def chat_request(service: TextService, form: ChatForm, asked: TextRequest) -> TextRequest:
    """`asked` with the prompt and the grammar of `form`. Raises InvalidRequest."""
    prompt = chat_prompt(service, form)
    content = form.grammar or asked.sampling.grammar
    sampling = replace(
        asked.sampling,
        grammar=answer_grammar(service, form, content),
        shown_special=_shown_special(service, form),
    )
    return replace(asked, prompt=prompt, sampling=sampling)


def _check(service: TextService, form: ChatForm) -> None:
    if not form.messages and not form.prompt_ids:
        raise InvalidRequest("messages is empty: send at least one", param="messages")
    _check_tools(form.tools)
    _check_choice(form)
    if not form.callable_tools():
        return
    if service.formats.tools is None:
        raise InvalidRequest(
            "this model calls no tools: its chat template shows no format that is known here. "
            "Leave tools out, send tool_choice none, or set model.tool_format of the cluster",
            code="unsupported_parameter",
            param="tools",
        )


def _check_tools(tools: Sequence[Tool]) -> None:
    if len(tools) > MOST_TOOLS:
        raise InvalidRequest(
            f"tools has {len(tools)} tools: send at most {MOST_TOOLS}", param="tools"
        )
    for position, tool in enumerate(tools):
        if not TOOL_NAME.fullmatch(tool.name):
            raise InvalidRequest(
                f"tools[{position}]: the name must be 1 to 128 letters, digits or any of _ . : / -",
                param="tools",
            )
    if len({tool.name for tool in tools}) < len(tools):
        raise InvalidRequest("tools has two of the same name", param="tools")


def _check_choice(form: ChatForm) -> None:
    unknown = [name for name in form.choice.only if name not in {t.name for t in form.tools}]
    if unknown:
        raise InvalidRequest(
            f"tool_choice names {unknown[0]!r}, which is not among the tools", param="tool_choice"
        )
    if form.choice.use is ToolUse.REQUIRED and not form.tools:
        raise InvalidRequest(
            "tool_choice asks for a call, and there are no tools: send some", param="tool_choice"
        )


def chat_prompt(service: TextService, form: ChatForm) -> PromptInput:
    """Raises InvalidRequest."""
    _check(service, form)
    if form.prompt_ids:
        return form.prompt_ids
    template = service.tokenizer.tool_template
    return ChatPrompt(
        [_as_template_takes(message, template) for message in form.messages],
        add_generation_prompt=form.add_generation_prompt,
        template_kwargs=form.template_kwargs or {},
        add_special_tokens=form.add_special_tokens,
        tools=[_shown(tool) for tool in form.callable_tools()],
    )


def _as_template_takes(message: Mapping[str, Any], template: str) -> Mapping[str, Any]:
    """gpt-oss calls the reasoning of earlier answers `thinking`; few templates know developers."""
    if message["role"] == "developer" and "developer" not in template:
        return {**message, "role": "system"}
    reasoning = message.get("reasoning_content")
    if not reasoning or "thinking" not in template:
        return message
    if message.get("tool_calls") and message.get("content"):
        return message
    return {**message, "thinking": reasoning}


def _shown(tool: Tool) -> dict[str, Any]:
    """As transformers gives tools to templates."""
    parameters = tool.parameters or {"type": "object", "properties": {}}
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def _shown_special(service: TextService, form: ChatForm) -> frozenset[int]:
    """Special tokens that the reader must see."""
    formats = service.formats
    marks: list[str] = []
    if formats.tools is not None and (form.callable_tools() or formats.tools.reads_all):
        marks += formats.tools.markers
    if formats.reasoning is not None:
        marks += [formats.reasoning.opens, formats.reasoning.closes]
    ids = (service.tokenizer.special_token_id(mark) for mark in marks)
    return frozenset(token_id for token_id in ids if token_id is not None)
