"""/v1/responses with the stock OpenAI client, unmodified."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from kvrelay.errors import FailureReason, RequestFailedError
from router.access.caller import KeySources
from router.access.key_file import changing
from router.access.keys import ApiKey, key_digest
from router.chat.conversations import KeptBounds
from tests.integration.agents_kit import CALLS, PARAMETERS, THOUGHT, agent
from tests.integration.agents_kit import agent_folder as agent_folder
from tests.integration.faces_kit import MODEL, in_loop

WEATHER: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
CITIES = [{"city": "Rome"}, {"city": "Oslo", "days": 2}]
ORDER = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


class City(BaseModel):
    city: str


STREAMED: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def kinds(events: list[Any]) -> list[str]:
    """Their types in order, many deltas in a row as one. Each has the fields of its type."""
    for event in events:
        STREAMED.validate_python(event.to_dict())
    names = [event.type for event in events]
    return [name for i, name in enumerate(names) if names[i - 1 : i] != [name]]


@in_loop
async def test_text_whole_and_streamed(folder: Path) -> None:
    async with agent(folder, "Good morning") as (s, prompt), s.openai() as client:
        asked: dict[str, Any] = {"model": MODEL, "input": "Hello", "instructions": "Be brief"}
        whole = await client.responses.create(**asked, metadata={"a": "b"}, temperature=0.25)
        assert whole.output_text == "Good morning"
        assert (whole.status, whole.metadata, whole.temperature) == ("completed", {"a": "b"}, 0.25)
        assert whole.usage is not None
        assert whole.usage.input_tokens == len(s.dispatcher.requests[0].prompt_ids)
        assert whole.usage.output_tokens > 2
        assert prompt(0) == "<|system|>Be brief<|end|><|user|>Hello<|end|><|assistant|>"
        events = [e async for e in await client.responses.create(**asked, stream=True)]
        assert kinds(events) == ORDER
        assert [e.sequence_number for e in events] == list(range(len(events)))
        deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
        assert "".join(deltas) == "Good morning"
        assert len(deltas) > 1
        last = events[-1]
        assert last.type == "response.completed"
        assert last.response.output_text == "Good morning"
        assert last.response.usage == whole.usage
        done = [e.item for e in events if e.type == "response.output_item.done"]
        assert done == last.response.output


@in_loop
async def test_reasoning_and_parallel_calls(folder: Path) -> None:
    said = f"<think>{THOUGHT}</think>Let me look.{CALLS}"
    async with agent(folder, said) as (s, _), s.openai() as client:
        asked: dict[str, Any] = {"model": MODEL, "input": "Rome or Oslo?", "tools": [WEATHER]}
        whole = await client.responses.create(**asked)
        events = [event async for event in await client.responses.create(**asked, stream=True)]
        async with client.responses.stream(**asked) as stream:
            streamed = await stream.get_final_response()
        for response in (whole, streamed, events[-1].response):
            kind = [item.type for item in response.output]
            assert kind == ["reasoning", "message", "function_call", "function_call"]
            reasoning, message, *calls = response.output
            assert reasoning.content[0].text == THOUGHT
            assert message.content[0].text == "Let me look."
            assert [json.loads(call.arguments) for call in calls] == CITIES
            assert len({call.call_id for call in calls}) == 2
            assert response.usage is not None
            details = response.usage.output_tokens_details
            assert 0 < details.reasoning_tokens < response.usage.output_tokens
            assert {item.status for item in response.output} == {"completed"}
        names = kinds(events)
        assert [n for n in names if "reasoning" in n] == [
            "response.reasoning_text.delta",
            "response.reasoning_text.done",
        ]
        assert names.count("response.function_call_arguments.done") == 2
        arguments = [e for e in events if e.type == "response.function_call_arguments.delta"]
        assert {e.output_index for e in arguments} == {2, 3}
        assert len(arguments) > 2


@in_loop
async def test_a_conversation_by_its_id_is_the_same_as_sent_whole(folder: Path) -> None:
    first = f"<think>{THOUGHT}</think>Let me look.{CALLS}"
    async with agent(folder, first, "Rome is warm.") as (s, prompt), s.openai() as client:
        fixed: dict[str, Any] = {"model": MODEL, "tools": [WEATHER], "instructions": "Be brief"}
        question: Any = [{"role": "user", "content": "Rome or Oslo?"}]
        one = await client.responses.create(**fixed, input=question)
        results: Any = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "warm"}
            for call in one.output
            if call.type == "function_call"
        ]
        two = await client.responses.create(**fixed, input=results, previous_response_id=one.id)
        three = await client.responses.create(
            **fixed, input="And you?", previous_response_id=two.id, stream=True
        )
        assert [e async for e in three][-1].type == "response.completed"
        whole: Any = [*question, *one.output, *results, *two.output]
        whole.append({"role": "user", "content": "And you?"})
        await client.responses.create(**fixed, input=whole)
        by_id, sent = s.dispatcher.requests[2].prompt_ids, s.dispatcher.requests[3].prompt_ids
        assert by_id == sent, (prompt(2), prompt(3))
        assert f"<think>{THOUGHT}</think>Let me look.<tool_call>" in prompt(2)
        assert prompt(2).count("<|tool|>warm") == 2
        counted = await client.responses.input_tokens.count(
            model=MODEL,
            input="And you?",
            previous_response_id=two.id,
            tools=[WEATHER],
            instructions="Be brief",
        )
        assert counted.input_tokens == len(by_id)


@in_loop
async def test_kept_responses_are_read_and_deleted(folder: Path) -> None:
    async with agent(folder, "Good morning") as (s, _), s.openai() as client:
        given = await client.responses.create(model=MODEL, input="Hello")
        assert await client.responses.retrieve(given.id) == given
        await client.responses.delete(given.id)
        for ask in (client.responses.retrieve, client.responses.delete):
            with pytest.raises(openai.NotFoundError, match="not found"):
                await ask(given.id)  # type: ignore[operator]
        unkept = await client.responses.create(model=MODEL, input="Hello", store=False)
        with pytest.raises(openai.NotFoundError, match="send the whole conversation") as caught:
            await client.responses.create(model=MODEL, input="more", previous_response_id=unkept.id)
        assert caught.value.code == "previous_response_not_found"
        assert caught.value.param == "previous_response_id"


@in_loop
async def test_another_tenant_does_not_know_the_id(folder: Path) -> None:
    async with agent(folder, "Good morning") as (s, _), s.openai() as client:
        mine: dict[str, Any] = {"extra_body": {"cache_salt": "mine"}}
        given = await client.responses.create(model=MODEL, input="Hello", **mine)
        goes_on: dict[str, Any] = {"input": "more", "previous_response_id": given.id}
        assert await client.responses.create(model=MODEL, **goes_on, **mine)
        for other in ({}, {"extra_body": {"cache_salt": "other"}}):
            with pytest.raises(openai.NotFoundError):
                await client.responses.create(model=MODEL, **goes_on, **other)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(given.id)


@in_loop
async def test_another_key_s_tenant_does_not_know_the_id(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    with changing(path) as listed:
        for tenant in ("acme", "other"):
            listed.append(ApiKey(id=tenant, digest=key_digest(f"of-{tenant}"), tenant=tenant))
    options: dict[str, Any] = {"keys": KeySources(file=str(path)), "cluster_key": b"cluster"}
    async with (
        agent(folder, "Good morning", **options) as (s, _),
        s.openai() as nobody,
        nobody.with_options(api_key="of-acme") as acme,
        nobody.with_options(api_key="of-other") as other,
    ):
        given = await acme.responses.create(model=MODEL, input="Hello")
        assert await acme.responses.retrieve(given.id) == given
        for stranger in (nobody, other):
            wrong = openai.AuthenticationError if stranger is nobody else openai.NotFoundError
            with pytest.raises(wrong):
                await stranger.responses.retrieve(given.id)
            with pytest.raises(wrong):
                await stranger.responses.delete(given.id)
            with pytest.raises(wrong):
                await stranger.responses.create(
                    model=MODEL, input="Hi", previous_response_id=given.id
                )
        assert await acme.responses.create(model=MODEL, input="Hi", previous_response_id=given.id)


@in_loop
async def test_only_so_many_are_kept(folder: Path) -> None:
    bounds = KeptBounds(answers=1)
    async with agent(folder, "Hi", conversations=bounds) as (s, _), s.openai() as client:
        one, two = [await client.responses.create(model=MODEL, input="Hello") for _ in range(2)]
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(one.id)
        assert await client.responses.retrieve(two.id) == two


@in_loop
async def test_structured_output(folder: Path) -> None:
    async with agent(folder, '{"city": "Rome"}') as (s, _), s.openai() as client:
        parsed = await client.responses.parse(model=MODEL, input="Where?", text_format=City)
        assert parsed.output_parsed == City(city="Rome")
        async with client.responses.stream(model=MODEL, input="Where?", text_format=City) as stream:
            final = await stream.get_final_response()
        assert final.output_parsed == City(city="Rome")
        await client.responses.create(
            model=MODEL, input="Where?", text={"format": {"type": "json_object"}}
        )
        await client.responses.create(model=MODEL, input="Where?")
        grammars = [bool(request.sampling.grammar) for request in s.dispatcher.requests]
        assert grammars == [True, True, True, False]


@in_loop
async def test_choices_and_effort_reach_the_model(folder: Path) -> None:
    async with agent(folder, "Hi") as (s, prompt), s.openai() as client:
        asked: dict[str, Any] = {"model": MODEL, "input": "Hello", "tools": [WEATHER]}
        allowed: Any = {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "weather"}],
        }
        named: Any = {"type": "function", "name": "weather"}
        for choice in ("required", named, allowed, "none", "auto"):
            await client.responses.create(**asked, tool_choice=choice)
        masked = [bool(request.sampling.grammar) for request in s.dispatcher.requests]
        assert masked[:4] == [True, True, True, False]
        assert ["weather" in prompt(i) for i in range(5)] == [True, True, True, False, True]
        await client.responses.create(model=MODEL, input="Hello", reasoning={"effort": "none"})
        await client.responses.create(model=MODEL, input="Hello", reasoning={"effort": "high"})
        assert prompt(5).endswith("<think></think>")
        assert prompt(6).endswith("<|assistant|>high")


@in_loop
async def test_the_length_limit(folder: Path) -> None:
    async with agent(folder, "Good morning to all of you") as (s, _), s.openai() as client:
        limited: dict[str, Any] = {"model": MODEL, "input": "Hello", "max_output_tokens": 3}
        whole = await client.responses.create(**limited)
        events = [e async for e in await client.responses.create(**limited, stream=True)]
        last = events[-1]
        assert last.type == "response.incomplete"
        for response in (whole, last.response):
            assert response.status == "incomplete"
            assert response.incomplete_details is not None
            assert response.incomplete_details.reason == "max_output_tokens"
            assert [item.status for item in response.output] == ["incomplete"]
        kept = await client.responses.retrieve(whole.id)
        assert kept.status == "incomplete"


@in_loop
async def test_a_failure_ends_the_stream_with_its_event(folder: Path) -> None:
    async with agent(folder, "Good morning to all of you") as (s, _), s.openai() as client:
        s.dispatcher.failure = RequestFailedError(FailureReason.WORKER_LOST, "the worker is gone")
        s.dispatcher.fail_after_tokens = 4
        events = [
            e async for e in await client.responses.create(model=MODEL, input="Hi", stream=True)
        ]
        last = events[-1]
        assert last.type == "response.failed"
        assert last.response.error is not None
        assert last.response.error.message == "the worker is gone"
        assert [item.status for item in last.response.output] == ["incomplete"]
        assert events[-2].type == "response.output_item.done"
        with pytest.raises(openai.InternalServerError, match="the worker is gone"):
            await client.responses.create(model=MODEL, input="Hi")
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(last.response.id)


@in_loop
async def test_a_failure_behind_a_comment_has_the_beginning_too(folder: Path) -> None:
    async with agent(folder, "Good", keep_alive_s=0.05) as (s, _), s.http() as client:
        s.dispatcher.gates.add("first_token")
        s.dispatcher.failure = RequestFailedError(FailureReason.WORKER_LOST, "the worker is gone")
        s.dispatcher.fail_after_tokens = 0
        body = {"input": "Hi", "stream": True}
        async with client.stream("POST", "/v1/responses", json=body) as answer:
            lines = answer.aiter_lines()
            assert await anext(lines) == ": keep-alive"
            s.dispatcher.generations[0].go_on.set()
            named = [line async for line in lines if line.startswith("event: ")]
        assert named == [f"event: response.{n}" for n in ("created", "in_progress", "failed")]


@in_loop
async def test_headers_and_ledger(folder: Path) -> None:
    async with agent(folder, "Hi") as (s, _), s.http() as client:
        headers = {
            "x-kvrelay-ledger": "1",
            "x-request-id": "mine",
            "x-slo-ttft-ms": "250",
            "x-deadline-ms": "9000",
        }
        answer = await client.post("/v1/responses", json={"input": "Hi"}, headers=headers)
        assert answer.headers["x-request-id"] == "mine"
        assert answer.headers["x-kvrelay-tier"] == "default"
        assert answer.json()["id"].startswith("resp-mine-")
        assert answer.json()["kvrelay"]["ledger_ms"]["decode"] > 0
        assert s.dispatcher.requests[0].objectives.ttft_s == 0.25
        streamed = await client.post(
            "/v1/responses", json={"input": "Hi", "stream": True}, headers=headers
        )
        last = json.loads(streamed.text.split("data: ")[-1])
        assert last["response"]["kvrelay"]["ledger_ms"]["decode"] > 0
        kept = await client.get(f"/v1/responses/{answer.json()['id']}")
        assert "kvrelay" not in kept.json()


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"background": True}, "background", "keep the stream open"),
    ({"conversation": "conv_1"}, "conversation", "send previous_response_id"),
    ({"prompt": {"id": "p"}}, "prompt", "send instructions and input"),
    ({"top_logprobs": 2}, "top_logprobs", "/v1/chat/completions"),
    ({"include": ["message.output_text.logprobs"]}, "include", "/v1/chat/completions"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]", "runs no tools itself"),
    ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0]", "runs no tools itself"),
    ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice", "of type function"),
    ({"tool_choice": "any"}, "tool_choice", "'auto'"),
    ({"text": {"verbosity": "low"}}, "text.verbosity", "in the instructions"),
    ({"reasoning": {"context": "all_turns"}}, "reasoning.context", "chat template"),
    ({"input": []}, "input", "at least one item"),
    ({"input": 3}, "input", "a string or a list of items"),
    ({"input": [{"type": "mcp_call"}]}, "input[0]", "function_call_output"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input[0].content[0]",
        "only text",
    ),
    ({"input": [{"role": "user", "content": "x", "size": 1}]}, "input[0].size", "unknown"),
    ({"input": [{"role": "user"}]}, "input[0].content", "missing"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format", "json_schema"),
    ({"unknown": 1}, "unknown", "unknown field"),
    ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
]


def nested(levels: int) -> dict[str, Any]:
    return {"a": nested(levels - 1)} if levels else {}


@in_loop
async def test_json_that_no_prompt_can_hold(folder: Path) -> None:
    half = {"description": "\ud800"}
    deep_call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "[" * 3000}
    async with agent(folder, "Hi") as (s, _), s.http() as client:
        for parameters, words in ((nested(65), "64 levels deep"), (half, "surrogate")):
            tool = {**WEATHER, "parameters": parameters}
            text = json.dumps({"input": "Hi", "tools": [tool]})
            headers = {"content-type": "application/json"}
            answer = await client.post("/v1/responses", content=text, headers=headers)
            assert answer.status_code == 400
            assert words in answer.json()["error"]["message"]
            assert answer.json()["error"]["param"] == "tools[0].parameters"
        answer = await client.post("/v1/responses", json={"input": [deep_call]})
        assert answer.status_code == 200


@in_loop
async def test_refusals_name_the_field(folder: Path) -> None:
    async with agent(folder, "Hi") as (s, _), s.http() as client:
        for fields, param, words in REFUSED:
            answer = await client.post("/v1/responses", json={"input": "Hi", **fields})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), (fields, error)
            assert words in error["message"], error["message"]
        assert s.dispatcher.requests == []
