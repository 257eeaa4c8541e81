"""Structured output as OpenAI and vLLM ask for it: `response_format` and `structured_outputs`."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from kvrelay.errors import InvalidRequest
from router.text.grammar.grammars import (
    JSON_OBJECT,
    grammar_of_choices,
    grammar_of_lark,
    grammar_of_regex,
    grammar_of_schema,
    schema_of_text,
)

Schema = dict[str, Any] | bool


class JsonSchemaFormat(BaseModel):
    """OpenAI's. `name` and `description` change nothing. `strict` false: keywords that are not
    supported are ignored."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str | None = None
    description: str | None = None
    schema_: Schema | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """OpenAI's. `type`: text, json_object or json_schema."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(BaseModel):
    """vLLM's. One of the first five, and how JSON is written."""

    model_config = ConfigDict(extra="forbid", strict=True)

    json_: str | Schema | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    disable_additional_properties: bool | None = None
    structural_tag: Any = None


def grammar_of(formatted: ResponseFormat | None, structured: StructuredOutputs | None) -> str:
    """Empty: the output is free. Raises InvalidRequest."""
    by_format = "" if formatted is None else _of_format(formatted)
    by_structure = "" if structured is None else _of_structure(structured)
    if by_format and by_structure:
        raise InvalidRequest(
            "response_format and structured_outputs both constrain the output: send one of them",
            param="structured_outputs",
        )
    return by_format or by_structure


def _of_format(asked: ResponseFormat) -> str:
    match asked.type:
        case "text":
            return ""
        case "json_object":
            return JSON_OBJECT
        case "json_schema":
            return _of_json_schema(asked.json_schema)
        case other:
            param = "response_format.type"
            told = f"{param} must be text, json_object or json_schema, not {other!r}"
            raise InvalidRequest(told, param=param)


def _of_json_schema(asked: JsonSchemaFormat | None) -> str:
    param = "response_format.json_schema"
    if asked is None or asked.schema_ is None:
        told = f'{param} must have a schema: {{"name": ..., "schema": {{...}}}}'
        raise InvalidRequest(told, code="missing_parameter", param=param)
    return grammar_of_schema(asked.schema_, lenient=asked.strict is False, param=f"{param}.schema")


def _of_structure(asked: StructuredOutputs) -> str:
    _check_supported(asked)
    given = [
        name
        for name, value in (
            ("json", asked.json_),
            ("regex", asked.regex),
            ("choice", asked.choice),
            ("grammar", asked.grammar),
            ("json_object", asked.json_object or None),
        )
        if value is not None
    ]
    if len(given) != 1:
        has = " and ".join(given) or "none"
        told = "structured_outputs must have one of json, regex, choice, grammar and json_object"
        raise InvalidRequest(f"{told}, not {has}", param="structured_outputs")
    return _only(asked, f"structured_outputs.{given[0]}")


def _only(asked: StructuredOutputs, param: str) -> str:
    if asked.regex is not None:
        return grammar_of_regex(asked.regex, param=param)
    if asked.choice is not None:
        return grammar_of_choices(asked.choice, param=param)
    if asked.grammar is not None:
        return grammar_of_lark(asked.grammar, param=param)
    schema = {"type": "object"} if asked.json_ is None else asked.json_
    return grammar_of_schema(
        schema_of_text(schema, param) if isinstance(schema, str) else schema,
        compact=bool(asked.disable_any_whitespace),
        whitespace=asked.whitespace_pattern,
        param=param,
    )


def _check_supported(asked: StructuredOutputs) -> None:
    if asked.structural_tag is not None:
        _refuse("structural_tag", "send a Lark grammar that has the tags, in grammar")
    if asked.disable_additional_properties:
        _refuse("disable_additional_properties", 'send "additionalProperties": false in the schema')


def _refuse(name: str, instead: str) -> None:
    param = f"structured_outputs.{name}"
    told = f"{param} is not supported: {instead}"
    raise InvalidRequest(told, code="unsupported_parameter", param=param)
