"""A model that never learned to call tools calls them where it must: the grammar alone decides.

Real workers, the bundled model, and OpenAI's own client.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from jsonschema import validate
from pydantic import BaseModel, Field

from engine.bundled import checkpoint_path
from router.chat.formats.choice import TOOL_FORMATS, formats_of
from tests.integration.split_kit import Cluster, WorkerHost, running_cluster, split_workers

BUNDLED = checkpoint_path()
SAID: Any = [{"role": "user", "content": "In the beginning"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "place": {"enum": ["heaven", "earth", "sea"]},
        "day": {"type": "integer", "minimum": 1, "maximum": 7},
        "good": {"type": "boolean"},
        "why": {"type": "string", "maxLength": 30},
    },
    "required": ["place", "day", "good"],
    "additionalProperties": False,
}
CREATE: Any = {
    "type": "function",
    "function": {"name": "create", "parameters": SCHEMA, "strict": True},
}


class Light(BaseModel):
    """Nothing in it can go on without end in any format."""

    day: int = Field(ge=1, le=7)
    good: bool


REST: Any = {
    "type": "function",
    "function": {
        "name": "rest",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
        "strict": True,
    },
}
SHORT: Any = openai.pydantic_function_tool(Light)
SCHEMAS = {
    "create": SCHEMA,
    "rest": REST["function"]["parameters"],
    "Light": Light.model_json_schema(),
}


@pytest.fixture(scope="module", name="cluster")
def cluster_of_bundled(hosts: tuple[WorkerHost, WorkerHost]) -> Iterator[Cluster]:
    workers = split_workers(hosts, BUNDLED, compile="off")
    with running_cluster(BUNDLED, workers, tool_format="hermes") as running:
        yield running


@pytest.fixture(name="client")
def openai_client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.http_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def asked(**fields: Any) -> dict[str, Any]:
    plain = {"model": "test-model", "messages": SAID, "tools": [CREATE, REST], "max_tokens": 600}
    return {**plain, "temperature": 0.8, **fields}


def calls_of(choice: Any) -> list[Any]:
    return choice.message.tool_calls or []


def check(name: str, arguments: str) -> None:
    validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize("seed", range(3))
def test_a_required_call_matches_its_schema(client: openai.OpenAI, seed: int) -> None:
    fields = asked(tool_choice="required", parallel_tool_calls=False, seed=seed)
    whole = client.chat.completions.create(**fields).choices[0]
    assert whole.finish_reason == "tool_calls"
    (call,) = calls_of(whole)
    check(call.function.name, call.function.arguments)
    assert whole.message.content is None
    with client.chat.completions.stream(**fields) as stream:
        streamed = stream.get_final_completion().choices[0]
    (again,) = calls_of(streamed)
    assert again.function.arguments == call.function.arguments


def test_the_named_tool_is_called(client: openai.OpenAI) -> None:
    for name in ("create", "rest"):
        choice = {"type": "function", "function": {"name": name}}
        fields = asked(tool_choice=choice, parallel_tool_calls=False, n=2, logprobs=True)
        for one in client.chat.completions.create(**fields).choices:
            (call,) = calls_of(one)
            assert call.function.name == name
            check(name, call.function.arguments)


def test_the_clients_pydantic_tools_are_parsed(client: openai.OpenAI) -> None:
    fields = asked(tools=[SHORT], tool_choice="required", parallel_tool_calls=False)
    message = client.chat.completions.parse(**fields).choices[0].message
    assert message.tool_calls is not None
    assert isinstance(message.tool_calls[0].function.parsed_arguments, Light)


@pytest.mark.parametrize("name", sorted({*TOOL_FORMATS} - {"harmony"}))
def test_every_format_makes_its_calls(cluster: Cluster, client: openai.OpenAI, name: str) -> None:
    """But harmony, whose channels are special tokens: the bundled model has none of them."""
    service = cluster.router.process._servers.service
    before, service.formats = service.formats, formats_of("", name)
    try:
        fields = asked(tools=[SHORT], tool_choice="required", parallel_tool_calls=False)
        (call,) = calls_of(client.chat.completions.create(**fields).choices[0])
        check(call.function.name, call.function.arguments)
    finally:
        service.formats = before
