"""Turns a client's wish for structured output into a grammar as llguidance's matcher takes it.

These functions are cheap: they build text and bound it. Whether llguidance takes the grammar is
found by `router.text.grammar.check`, outside the router's process. Runs in the router.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher

from kvrelay.errors import InvalidRequest
from router.text.grammar.number_bounds import with_inclusive_bounds

MAX_GRAMMAR_BYTES = 64 << 10
"""Of a grammar as the workers get it."""
MAX_CHOICES = 1024
MAX_SCHEMA_DEPTH = 64
"""Objects and lists within each other. llguidance's JSON parser ends at 128."""

WHITESPACE = r" |\n[ \t]{0,32}"
"""Between the tokens of JSON: a space, or a new line with its indentation. llguidance's own default
is any white space at all, in which small models go on for ever."""


def grammar_of_schema(
    schema: Mapping[str, Any] | bool,
    *,
    lenient: bool = False,
    compact: bool = False,
    whitespace: str | None = None,
    param: str = "response_format",
) -> str:
    """The output is JSON that is valid for the schema.

    `lenient`: keywords that llguidance does not know are ignored, instead of refused. `compact`: no
    white space between JSON's tokens; `whitespace`: the pattern of what may be there. Raises
    InvalidRequest for `param` if it is too large.
    """
    _check_size(schema, param)
    options: dict[str, Any] = {"lenient": True} if lenient else {}
    if whitespace is not None:
        options |= {"whitespace_pattern": whitespace}
    if compact:
        options |= {"whitespace_flexible": False}
    return bounded(_json_grammar(schema, options), param)


def schema_of_text(text: str, param: str) -> dict[str, Any] | bool:
    """Raises InvalidRequest for `param`."""
    try:
        schema = json.loads(bounded(text, param))
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param} is not valid JSON: {error}", param=param) from None
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(f"{param} must be a JSON schema: an object", param=param)
    return schema


def grammar_of_regex(pattern: str, *, param: str = "structured_outputs") -> str:
    """The whole output matches the pattern, in the syntax of Rust's regex crate, without
    look-around and back references. Raises InvalidRequest for `param` if it is too large."""
    if not pattern:
        raise InvalidRequest(f"{param} must not be empty", param=param)
    return bounded(LLMatcher.grammar_from_regex(bounded(pattern, param)), param)


def grammar_of_choices(choices: Sequence[str], *, param: str = "structured_outputs") -> str:
    """The output is one of these texts. Raises InvalidRequest for `param`."""
    if not choices or "" in choices:
        raise InvalidRequest(f"{param} must be a list of texts that are not empty", param=param)
    if len(choices) > MAX_CHOICES:
        told = f"{param} must have at most {MAX_CHOICES} texts, not {len(choices)}"
        raise InvalidRequest(told, param=param)
    texts = dict.fromkeys(choices)
    lark = "start: " + " | ".join(json.dumps(one, ensure_ascii=False) for one in texts)
    return bounded(json.dumps({"grammars": [{"lark_grammar": lark}]}), param)


def grammar_of_lark(text: str, *, param: str = "structured_outputs") -> str:
    """A grammar in llguidance's Lark syntax, whose first rule is `start`. Raises InvalidRequest for
    `param` if it is empty or too large."""
    if not text.strip():
        raise InvalidRequest(f"{param} must not be empty", param=param)
    if text.lstrip().startswith("{"):
        raise InvalidRequest(f"{param} must be Lark, whose first rule is start", param=param)
    return bounded(text, param)


def bounded(grammar: str, param: str) -> str:
    """Raises InvalidRequest if the grammar is larger than workers take, or is no text."""
    try:
        size = len(grammar.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(f"{param} has half of a surrogate pair", param=param) from None
    if size > MAX_GRAMMAR_BYTES:
        raise _too_large(param)
    return grammar


def _too_large(param: str) -> InvalidRequest:
    told = f"{param} makes a grammar that is too large: at most {MAX_GRAMMAR_BYTES} bytes are taken"
    return InvalidRequest(told, code="grammar_too_large", param=param)


def _json_grammar(schema: Mapping[str, Any] | bool, options: dict[str, Any]) -> str:
    """Our options win over the schema's own `x-guidance`, and that one over our default."""
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    own = schema.get("x-guidance")
    options = {"whitespace_pattern": WHITESPACE} | (own if isinstance(own, dict) else {}) | options
    if options.get("whitespace_flexible") is False:
        del options["whitespace_pattern"]
    whole = {**with_inclusive_bounds(schema), "x-guidance": options}
    grammars = {"grammars": [{"json_schema": whole}]}
    return json.dumps(grammars, ensure_ascii=False, separators=(",", ":"))


def _check_size(schema: object, param: str) -> None:
    """Looks at no more values than a grammar has bytes, so that it never holds the event loop."""
    left, level = MAX_GRAMMAR_BYTES, [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        inner: list[object] = []
        for one in level:
            left -= len(one) if isinstance(one, str | list | dict) else 1
            if left < 0:
                raise _too_large(param)
            inner += _inner(one)
        if not inner:
            return
        level = inner
    told = f"{param} has a schema with more than {MAX_SCHEMA_DEPTH} levels: make it flatter"
    raise InvalidRequest(told, code="grammar_too_large", param=param)


def _inner(one: object) -> list[object]:
    match one:
        case dict():
            return [*one.keys(), *one.values()]
        case list():
            return one
        case _:
            return []


JSON_OBJECT = grammar_of_schema({"type": "object"})
"""Any JSON object."""
