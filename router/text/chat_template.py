"""A checkpoint's chat template, rendered as transformers renders it, in a sandbox.

Runs in the router. Documents are always absent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvrelay.errors import InvalidRequest, ModelError


class GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's text for training; here its content passes
    unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes HTML, which no model was trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[GenerationBlock, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


REFUSALS = (
    *(TemplateError, TypeError, ValueError, LookupError),
    *(AttributeError, ArithmeticError, RecursionError, MemoryError),
)
"""What a template raises for messages and variables that it was not written for."""

OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")


def _check_variables(given: Mapping[str, Any]) -> None:
    taken = next((name for name in OWN_VARIABLES if name in given), None)
    if taken is not None:
        raise InvalidRequest(
            f"chat_template_kwargs must not hold {taken}: it is a field of the request",
            param="chat_template_kwargs",
        )


class ChatTemplate:
    """`source` is that of the template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ModelError when the template doesn't parse."""
        self.source = source
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise ModelError(f"the chat template doesn't parse: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """`template_kwargs` are further variables. Raises InvalidRequest for names of the request's
        own fields, and with the template's own words when it refuses the messages.

        Arguments of tool calls are objects, as in transformers. Templates that take them as text
        get them so."""
        _check_variables(template_kwargs)
        variables = {
            **self._special_tokens,
            **template_kwargs,
            "messages": [_with_objects(message) for message in messages],
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._rendered(variables, messages)
        except REFUSALS as error:
            raise InvalidRequest(
                f"the model's chat template refused the messages: {error}", param="messages"
            ) from error

    def _rendered(self, variables: dict[str, Any], messages: Sequence[Mapping[str, Any]]) -> str:
        try:
            return self._template.render(variables)
        except TypeError:
            if not any(message.get("tool_calls") for message in messages):
                raise
            as_text = {"messages": [dict(message) for message in messages]}
            return self._template.render(variables | as_text)


def _with_objects(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    return {**message, "tool_calls": [_call_with_object(call) for call in calls]}


def _call_with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that aren't JSON stay as they are."""
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return dict(call)
    return {**call, "function": {**function, "arguments": arguments}}
