"""Structured output as clients ask for it: over HTTP, over gRPC, and by kvrelay's client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvrelay import AsyncClient, ChatMessage, InvalidRequest
from router.text.grammar.grammars import (
    JSON_OBJECT,
    grammar_of_choices,
    grammar_of_lark,
    grammar_of_regex,
    grammar_of_schema,
)
from tests.integration.faces_kit import MODEL, Served, in_loop, served
from tests.integration.http_kit import CHAT, TEXT, assert_error
from tests.integration.http_kit import checkpoint_folder as checkpoint_folder

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
UNKNOWN = {"type": "array", "uniqueItems": True}
LARK = 'start: "a"+'


def formatted(schema: Any, **more: Any) -> dict[str, Any]:
    asked = {"name": "n", "schema": schema, **more}
    return {"response_format": {"type": "json_schema", "json_schema": asked}}


def structured(**fields: Any) -> dict[str, Any]:
    return {"structured_outputs": fields}


GOOD: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "text"}}, ""),
    ({"response_format": {"type": "json_object"}}, JSON_OBJECT),
    (formatted(SCHEMA), grammar_of_schema(SCHEMA)),
    (formatted(SCHEMA, strict=True, description="d"), grammar_of_schema(SCHEMA)),
    (formatted(UNKNOWN, strict=False), grammar_of_schema(UNKNOWN, lenient=True)),
    (structured(json=SCHEMA), grammar_of_schema(SCHEMA)),
    (structured(json=json.dumps(SCHEMA)), grammar_of_schema(SCHEMA)),
    (structured(json_object=True), JSON_OBJECT),
    (structured(json=SCHEMA, disable_any_whitespace=True), grammar_of_schema(SCHEMA, compact=True)),
    (structured(json=SCHEMA, whitespace_pattern="\t"), grammar_of_schema(SCHEMA, whitespace="\t")),
    (structured(regex="[a-z]+/"), grammar_of_regex("[a-z]+/")),
    (structured(choice=["a", "b"]), grammar_of_choices(["a", "b"])),
    (structured(grammar=LARK), grammar_of_lark(LARK)),
    ({**structured(regex="a"), "response_format": {"type": "text"}}, grammar_of_regex("a")),
]
BAD: list[tuple[dict[str, Any], str, str | None, str]] = [
    (formatted(UNKNOWN), "invalid_grammar", None, "uniqueItems"),
    (formatted({"type": "nonsense"}), "invalid_grammar", None, "nonsense"),
    (formatted(None), "missing_parameter", "response_format.json_schema", "must have a schema"),
    ({"response_format": {"type": "json_schema"}}, "missing_parameter", None, "must have a schema"),
    (structured(regex="("), "invalid_grammar", None, "regex"),
    (structured(grammar="start: x"), "invalid_grammar", None, "x"),
    (structured(), "invalid_value", "structured_outputs", "not none"),
    (structured(regex="a", choice=["b"]), "invalid_value", None, "not regex and choice"),
    (structured(choice=[]), "invalid_value", "structured_outputs.choice", "list of texts"),
    (structured(json="{"), "invalid_value", "structured_outputs.json", "not valid JSON"),
    (structured(json="[]"), "invalid_value", "structured_outputs.json", "must be a JSON schema"),
    (structured(regex="a" * 70_000), "grammar_too_large", None, "at most 65536"),
    (structured(structural_tag="{}"), "unsupported_parameter", None, "send a Lark grammar"),
    ({**structured(regex="a"), **formatted(SCHEMA)}, "invalid_value", None, "send one of them"),
]


def grammar_seen(s: Served) -> str:
    return s.dispatcher.requests[-1].sampling.grammar


@in_loop
async def test_what_is_asked_for_reaches_the_workers_as_a_grammar(folder: Path) -> None:
    async with served(folder) as s, s.http() as client:
        for fields, grammar in GOOD:
            for path, prompt in (
                ("/v1/completions", {"prompt": TEXT}),
                ("/v1/chat/completions", {"messages": CHAT}),
            ):
                answer = await client.post(path, json={"model": MODEL, **prompt, **fields})
                assert answer.status_code == 200, (fields, answer.text)
                assert grammar_seen(s) == grammar, fields


@in_loop
async def test_what_can_not_be_used_is_refused_with_a_reason(folder: Path) -> None:
    async with served(folder) as s, s.http() as client:
        for fields, code, param, words in BAD:
            answer = await client.post("/v1/completions", json={"prompt": TEXT, **fields})
            assert_error(answer, 400, code, param, words)
        assert not s.dispatcher.requests


@in_loop
async def test_openais_client_parses_what_it_asked_for(folder: Path) -> None:
    async with served(folder) as s, s.openai() as client:
        await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hello"}],
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
            },
        )
        assert grammar_seen(s) == grammar_of_schema(SCHEMA)


@in_loop
async def test_the_client_asks_over_grpc(folder: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"json_schema": SCHEMA}, grammar_of_schema(SCHEMA)),
        ({"json_schema": json.dumps(SCHEMA)}, grammar_of_schema(SCHEMA)),
        ({"json_object": True}, JSON_OBJECT),
        ({"json_object": False}, ""),
        ({"regex": "a|b"}, grammar_of_regex("a|b")),
        ({"choice": ["x", "y"]}, grammar_of_choices(["x", "y"])),
        ({"grammar": LARK}, grammar_of_lark(LARK)),
    ]
    async with served(folder) as s:
        client = AsyncClient(s.grpc_address)
        for options, grammar in cases:
            for prompt in (TEXT, [ChatMessage("user", "hello")]):
                await client.generate(prompt, **options)
                assert grammar_seen(s) == grammar
        for options, words in (
            ({"regex": "("}, "regex"),
            ({"json_schema": "{"}, "not valid JSON"),
            ({"regex": "a", "choice": ["b"]}, "send one of them"),
            ({"choice": "abc"}, "list of texts"),
        ):
            with pytest.raises(InvalidRequest, match=words):
                await client.generate(TEXT, **options)  # type: ignore[arg-type]
        await client.close()
