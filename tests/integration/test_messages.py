"""/v1/messages with the stock Anthropic client, unmodified."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.types import RawMessageStreamEvent
from pydantic import BaseModel, TypeAdapter

from kvrelay.errors import FailureReason, RefusalReason, Refused, RequestFailedError
from tests.integration.agents_kit import CALLS, PARAMETERS, THOUGHT, agent, anthropic_client
from tests.integration.agents_kit import agent_folder as agent_folder
from tests.integration.faces_kit import MODEL, in_loop
from tests.unit.fake_dispatcher import FACTS

WEATHER: Any = {"name": "weather", "description": "Tells it.", "input_schema": PARAMETERS}
HELLO: Any = [{"role": "user", "content": "Hello"}]
ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 500, "messages": HELLO}
CITIES = [{"city": "Rome"}, {"city": "Oslo", "days": 2}]
BLOCK = ["content_block_start", "content_block_delta", "content_block_stop"]


class City(BaseModel):
    city: str


STREAMED: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def kinds(events: list[Any]) -> list[str]:
    """Their types in order, many deltas in a row as one. Each has the fields of its type."""
    for event in events:
        STREAMED.validate_python(event.to_dict())
    names = [event.type for event in events]
    return [name for i, name in enumerate(names) if names[i - 1 : i] != [name]]


@in_loop
async def test_text_whole_and_streamed(folder: Path) -> None:
    async with agent(folder, "Good morning") as (s, prompt), anthropic_client(s) as client:
        s.dispatcher.cached_tokens = 3
        system: Any = [
            {"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
            {"type": "text", "text": "Be brief", "cache_control": {"type": "ephemeral"}},
        ]
        whole = await client.messages.create(**ASKED, system=system, metadata={"user_id": "me"})
        assert prompt(0) == "<|system|>Be brief<|end|><|user|>Hello<|end|><|assistant|>"
        [block] = whole.content
        assert block.type == "text"
        assert block.text == "Good morning"
        assert (whole.stop_reason, whole.stop_sequence) == ("end_turn", None)
        asked = len(s.dispatcher.requests[0].prompt_ids)
        assert (whole.usage.input_tokens, whole.usage.cache_read_input_tokens) == (asked - 3, 3)
        events = [
            e async for e in await client.messages.create(**ASKED, system=system, stream=True)
        ]
        assert kinds(events) == ["message_start", *BLOCK, "message_delta", "message_stop"]
        start, last = events[0], events[-2]
        assert start.type == "message_start"
        assert start.message.usage.input_tokens == asked - 3
        assert last.type == "message_delta"
        assert last.delta.stop_reason == "end_turn"
        assert last.usage.output_tokens == whole.usage.output_tokens
        counted = await client.messages.count_tokens(model=MODEL, messages=HELLO, system=system)
        assert counted.input_tokens == asked


@in_loop
async def test_thinking_and_parallel_calls(folder: Path) -> None:
    said = f"<think>{THOUGHT}</think>Let me look.{CALLS}"
    async with agent(folder, said) as (s, _), anthropic_client(s) as client:
        asked: dict[str, Any] = {**ASKED, "tools": [WEATHER]}
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            events: list[Any] = [event async for event in stream]
            streamed = await stream.get_final_message()
        for message in (whole, streamed):
            content: list[Any] = list(message.content)
            assert [b.type for b in content] == ["thinking", "text", "tool_use", "tool_use"]
            assert content[0].thinking == THOUGHT
            assert content[0].signature
            assert content[1].text == "Let me look."
            assert [block.input for block in content[2:]] == CITIES
            assert len({block.id for block in content[2:]}) == 2
            assert message.stop_reason == "tool_use"
            details = message.usage.output_tokens_details
            assert details is not None
            assert 0 < details.thinking_tokens < message.usage.output_tokens
        named = kinds([e async for e in await client.messages.create(**asked, stream=True)])
        assert named == ["message_start", *BLOCK * 4, "message_delta", "message_stop"]
        raw = [e for e in events if e.type.startswith("content_block")]
        starts = [e.index for e in raw if e.type == "content_block_start"]
        assert starts == [0, 1, 2, 3]
        assert {e.delta.type for e in raw if e.type == "content_block_delta"} == {
            "thinking_delta",
            "signature_delta",
            "text_delta",
            "input_json_delta",
        }


@in_loop
async def test_results_of_tools_go_back(folder: Path) -> None:
    said = f"<think>{THOUGHT}</think>Let me look.{CALLS}"
    async with agent(folder, said, "Warm.") as (s, prompt), anthropic_client(s) as client:
        first = await client.messages.create(**ASKED, tools=[WEATHER])
        calls = [block.id for block in first.content if block.type == "tool_use"]
        results: Any = [
            {"type": "tool_result", "tool_use_id": calls[0], "content": "warm"},
            {
                "type": "tool_result",
                "tool_use_id": calls[1],
                "content": [{"type": "text", "text": "no such city"}],
                "is_error": True,
            },
            {"type": "text", "text": "And?"},
        ]
        messages: Any = [
            *HELLO,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": results},
        ]
        second = await client.messages.create(
            model=MODEL, max_tokens=50, messages=messages, tools=[WEATHER]
        )
        assert second.content[0].type == "text"
        given = prompt(1)
        assert f"<|assistant|><think>{THOUGHT}</think>Let me look.<tool_call>" in given
        assert given.count("<tool_call>") == 2
        assert f"<|tool|>warm{calls[0]}<|end|>" in given
        assert f"<|tool|>Error: no such city{calls[1]}<|end|><|user|>And?<|end|>" in given
        counted = await client.messages.count_tokens(
            model=MODEL, messages=messages, tools=[WEATHER]
        )
        assert counted.input_tokens == len(s.dispatcher.requests[1].prompt_ids)


@in_loop
async def test_choices_and_effort_reach_the_model(folder: Path) -> None:
    async with agent(folder, "Hi") as (s, prompt), anthropic_client(s) as client:
        choices: list[Any] = [
            {"type": "any", "disable_parallel_tool_use": True},
            {"type": "tool", "name": "weather"},
            {"type": "none"},
            {"type": "auto"},
        ]
        for choice in choices:
            await client.messages.create(**ASKED, tools=[WEATHER], tool_choice=choice)
        masked = [bool(request.sampling.grammar) for request in s.dispatcher.requests]
        assert masked[:3] == [True, True, False]
        assert ["weather" in prompt(i) for i in range(4)] == [True, True, False, True]
        await client.messages.create(**ASKED, thinking={"type": "disabled"})
        await client.messages.create(
            **ASKED,
            thinking={"type": "enabled", "budget_tokens": 1024},
            output_config={"effort": "high"},
        )
        assert prompt(4).endswith("<think></think>")
        assert prompt(5).endswith("<|assistant|>high")


@in_loop
async def test_structured_output(folder: Path) -> None:
    async with agent(folder, '{"city": "Rome"}') as (s, _), anthropic_client(s) as client:
        parsed = await client.messages.parse(**ASKED, output_format=City)
        assert parsed.parsed_output == City(city="Rome")
        async with client.messages.stream(**ASKED, output_format=City) as stream:
            final = await stream.get_final_message()
        assert final.parsed_output == City(city="Rome")
        assert all(request.sampling.grammar for request in s.dispatcher.requests)


@in_loop
async def test_reasons_to_stop(folder: Path) -> None:
    async with agent(folder, "Good morning to all") as (s, _), anthropic_client(s) as client:
        short = await client.messages.create(**{**ASKED, "max_tokens": 2})
        assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 2)
        cut = await client.messages.create(**ASKED, stop_sequences=["ning", "never"])
        assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", "ning")
        assert cut.content[0].type == "text"
        assert cut.content[0].text == "Good mor"
        asked = len(s.dispatcher.requests[0].prompt_ids)
        s.dispatcher.facts = replace(FACTS, max_model_len=asked + 3)
        full = await client.messages.create(**{**ASKED, "max_tokens": 9000})
        assert (full.stop_reason, full.usage.output_tokens) == ("model_context_window_exceeded", 3)


@in_loop
async def test_thinking_that_is_not_to_be_shown(folder: Path) -> None:
    said = f"<think>{THOUGHT}</think>Good"
    async with agent(folder, said) as (s, _), anthropic_client(s) as client:
        thinking: Any = {"type": "adaptive", "display": "omitted"}
        whole = await client.messages.create(**ASKED, thinking=thinking)
        async with client.messages.stream(**ASKED, thinking=thinking) as stream:
            streamed = await stream.get_final_message()
        for message in (whole, streamed):
            content: list[Any] = list(message.content)
            assert [block.type for block in content] == ["thinking", "text"]
            assert content[0].thinking == ""


@in_loop
async def test_errors_have_anthropics_shape(folder: Path) -> None:
    async with agent(folder, "Good") as (s, _), anthropic_client(s) as client:
        with pytest.raises(anthropic.NotFoundError) as missing:
            await client.messages.create(**{**ASKED, "model": "other"})
        assert missing.value.request_id
        s.dispatcher.refusal = Refused(
            RefusalReason.TTFT_UNREACHABLE, "all are busy", retry_after_s=1.5
        )
        with pytest.raises(anthropic.APIStatusError, match="all are busy") as refused:
            await client.messages.create(**ASKED)
        error = refused.value
        assert (error.status_code, error.response.headers["retry-after"]) == (529, "2")
        assert isinstance(error.body, dict)
        assert error.body["error"]["type"] == "overloaded_error"
        s.dispatcher.refusal = Refused(RefusalReason.KEY_TOKENS, "too much", retry_after_s=1.0)
        with pytest.raises(anthropic.RateLimitError, match="rate_limit_error"):
            await client.messages.create(**ASKED)
        s.dispatcher.refusal = Refused(RefusalReason.NO_CAPACITY, "none", retry_after_s=1.0)
        with pytest.raises(anthropic.InternalServerError) as nobody:
            await client.messages.create(**ASKED)
        assert nobody.value.status_code == 503
    async with agent(folder, "Good") as (s, _), s.http() as http:
        for answer in (
            await http.get("/v1/messages"),
            await http.post("/v1/messages", content=b"{"),
            await http.post("/v1/messages", json={}, headers={"content-type": "text/plain"}),
        ):
            body = answer.json()
            assert body["type"] == "error"
            assert body["error"]["type"] == "invalid_request_error"
            assert body["request_id"] == answer.headers["request-id"]


@in_loop
async def test_a_refusal_is_tried_again_by_the_client(folder: Path) -> None:
    async with agent(folder, "Good") as (s, _):
        s.dispatcher.refusal = Refused(RefusalReason.SLOTS_EXHAUSTED, "full", retry_after_s=0.01)
        s.dispatcher.refusals_left = 1
        async with anthropic.AsyncAnthropic(base_url=s.url, api_key="none") as client:
            assert await client.messages.create(**ASKED)
        assert len(s.dispatcher.requests) == 2


@in_loop
async def test_a_failure_ends_the_stream_with_its_event(folder: Path) -> None:
    async with agent(folder, "Good morning to all") as (s, _), anthropic_client(s) as client:
        s.dispatcher.failure = RequestFailedError(FailureReason.WORKER_LOST, "the worker is gone")
        s.dispatcher.fail_after_tokens = 4
        seen: list[str] = []

        async def read() -> None:
            async with client.messages.stream(**ASKED) as stream:
                async for event in stream:
                    seen.append(event.type)

        with pytest.raises(anthropic.APIStatusError, match="the worker is gone"):
            await read()
        assert seen[0] == "message_start"
        assert "message_stop" not in seen


@in_loop
async def test_pings_keep_the_stream_and_leaving_ends_the_work(folder: Path) -> None:
    async with agent(folder, "Good", keep_alive_s=0.05) as (s, _), s.http() as http:
        s.dispatcher.gates.add("first_token")
        body = {**ASKED, "stream": True}
        headers = {"x-api-key": "none", "anthropic-version": "2023-06-01"}
        async with http.stream("POST", "/v1/messages", json=body, headers=headers) as answer:
            lines = answer.aiter_lines()
            assert [await anext(lines) for _ in range(2)] == [
                "event: ping",
                'data: {"type":"ping"}',
            ]
        await asyncio.wait_for(s.dispatcher.aborted.get(), 5)


@in_loop
async def test_headers_and_ledger(folder: Path) -> None:
    async with agent(folder, "Hi") as (s, _), s.http() as http:
        headers = {"x-kvrelay-ledger": "1", "x-request-id": "mine", "x-slo-tpot-ms": "50"}
        answer = await http.post("/v1/messages", json=ASKED, headers=headers)
        assert answer.headers["x-request-id"] == answer.headers["request-id"] == "mine"
        assert answer.headers["x-kvrelay-tier"] == "default"
        assert answer.json()["kvrelay"]["ledger_ms"]["decode"] > 0
        assert s.dispatcher.requests[0].objectives.tpot_s == 0.05
        streamed = await http.post("/v1/messages", json={**ASKED, "stream": True}, headers=headers)
        [delta] = [line for line in streamed.text.splitlines() if '"message_delta"' in line]
        assert json.loads(delta.removeprefix("data: "))["kvrelay"]["ledger_ms"]["decode"] > 0


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
USE = {"type": "tool_use", "id": "a", "name": "b", "input": {}}
RESULT: dict[str, Any] = {"type": "tool_result", "tool_use_id": "a"}


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*blocks]}]}


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (user(IMAGE), "messages[0].content[0]", "only text"),
    (user({**RESULT, "content": [IMAGE]}), "messages[0].content[0].content[0]", "only text"),
    (user(USE), "messages[0].content[0]", "role assistant"),
    (
        {"messages": [{"role": "assistant", "content": [RESULT]}, *HELLO]},
        "messages[0].content[0]",
        "role user",
    ),
    ({"messages": [*HELLO, {"role": "assistant", "content": "I"}]}, "messages", "can't go on"),
    ({"messages": []}, "messages", "at least one"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "'user'"),
    ({"max_tokens": None}, "max_tokens", "valid integer"),
    ({"tools": [{"type": "web_search_20250305", "name": "x"}]}, "tools[0]", "input_schema"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers", "runs no tools itself"),
    ({"container": "x"}, "container", "no containers"),
    ({"thinking": {"type": "between_tools"}}, "thinking", "adaptive"),
    (
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        "context_management.edits[0]",
        "shorten the messages",
    ),
    ({"speed": "fast"}, "speed", "send tier"),
    ({"unknown": 1}, "unknown", "unknown field"),
]


@in_loop
async def test_refusals_name_the_field(folder: Path) -> None:
    async with agent(folder, "Hi") as (s, _), s.http() as http:
        for fields, param, words in REFUSED:
            answer = await http.post("/v1/messages", json={**ASKED, **fields})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), (fields, error)
            assert words in error["message"], error["message"]
        assert s.dispatcher.requests == []


@in_loop
async def test_what_claude_code_sends_is_served(folder: Path) -> None:
    cached = {"type": "ephemeral", "ttl": "1h"}
    body = {
        **ASKED,
        "max_tokens": 32000,
        "system": [{"type": "text", "text": "You are an agent.", "cache_control": cached}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": cached}]}
        ],
        "tools": [{**WEATHER, "eager_input_streaming": True}],
        "metadata": {"user_id": "user_1_account__session_2"},
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "temperature": 1,
        "stream": True,
    }
    headers = {
        "x-api-key": "none",
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "interleaved-thinking-2025-05-14,context-management-2025-06-27",
    }
    async with agent(folder, "Hi") as (s, _), s.http() as http:
        answer = await http.post("/v1/messages?beta=true", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        assert answer.text.rstrip().endswith('data: {"type":"message_stop"}')
