"""A checkpoint's chat template, rendered as transformers renders it, in a sandbox.

Runs in the router. Tools and documents are always absent.
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
    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ModelError when the template doesn't parse."""
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
    ) -> str:
        """`template_kwargs` are further variables. Raises InvalidRequest for names of the request's
        own fields, and with the template's own words when it refuses the messages."""
        _check_variables(template_kwargs)
        variables = {
            **self._special_tokens,
            **template_kwargs,
            "messages": [dict(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(variables)
        except REFUSALS as error:
            raise InvalidRequest(
                f"the model's chat template refused the messages: {error}", param="messages"
            ) from error
