"""Every field that OpenAI or vLLM documents is accepted, ignored, or refused with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai.types.chat.chat_completion_stream_options_param import ChatCompletionStreamOptionsParam

from kvrelay import AsyncClient, ChatMessage, InvalidRequest
from router.http.bodies import StreamOptions
from router.http.neutral_fields import ANYTHING
from tests.integration.faces_kit import MODEL, Served, in_loop, served
from tests.integration.http_kit import CHAT, TEXT, events
from tests.integration.http_kit import checkpoint_folder as checkpoint_folder
from tests.request_fields import BODIES, NEUTRAL, PATHS, VLLM, is_known, theirs
from tests.tokenizer_fixture import byte_level

REQUIRED = {"prompt", "messages"}
ODD: Any = {"an": ["odd", "value"]}
"""No field's neutral value."""


def body_of(kind: str, **fields: Any) -> dict[str, Any]:
    prompt = {"prompt": TEXT} if kind == "completions" else {"messages": CHAT}
    return {"model": MODEL, **prompt, **fields}


@pytest.mark.parametrize("kind", PATHS)
def test_every_field_is_known(kind: str) -> None:
    assert not {name for name in theirs(kind) if not is_known(kind, name)} - _of_the_other(kind)
    stream_options = {*VLLM["stream_options"], *ChatCompletionStreamOptionsParam.__annotations__}
    assert stream_options == set(StreamOptions.model_fields)


def _of_the_other(kind: str) -> set[str]:
    """vLLM's earlier names are listed once for both paths."""
    return {*VLLM["earlier"]} - {*NEUTRAL[kind]}


def test_no_field_is_both_accepted_and_neutral() -> None:
    for kind in PATHS:
        assert not NEUTRAL[kind].keys() & BODIES[kind].model_fields.keys()


@pytest.mark.parametrize("kind", PATHS)
@in_loop
async def test_null_is_accepted_for_every_field(kind: str, folder: Path) -> None:
    nulls = dict.fromkeys(theirs(kind) - REQUIRED)
    async with served(folder) as s, s.http() as client:
        for fields in (*({name: None} for name in sorted(nulls)), nulls):
            answer = await client.post(PATHS[kind], json=body_of(kind, **fields))
            assert answer.status_code == 200, (fields, answer.text)


@pytest.mark.parametrize("kind", PATHS)
@in_loop
async def test_neutral_values_are_accepted_and_others_refused_with_a_reason(
    kind: str, folder: Path
) -> None:
    async with served(folder) as s, s.http() as client:
        for name, neutral in NEUTRAL[kind].items():
            for value in neutral.values:
                answer = await client.post(PATHS[kind], json=body_of(kind, **{name: value}))
                assert answer.status_code == 200, (name, value, answer.text)
            answer = await client.post(PATHS[kind], json=body_of(kind, **{name: ODD}))
            if neutral is ANYTHING:
                assert answer.status_code == 200, name
                continue
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, "unsupported_parameter"), name
            assert error["param"] == name
            assert neutral.instead
            assert neutral.instead in error["message"]


def test_true_is_not_one() -> None:
    assert not NEUTRAL["chat"]["use_beam_search"].accepts(0)
    assert not NEUTRAL["chat"]["priority"].accepts(False)


# --- what guidellm 0.8 sends ----------------------------------------------------------------------

GUIDELLM = {
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "stop": None,
    "ignore_eos": True,
}


@in_loop
async def test_guidellms_requests_are_answered_with_the_usage_so_far(folder: Path) -> None:
    async with served(folder) as s:
        await _assert_counts(s, "completions", "text", {**GUIDELLM, "max_tokens": 5})
        await _assert_counts(s, "chat", "delta", {**GUIDELLM, "max_completion_tokens": 5})


async def _assert_counts(s: Served, kind: str, content: str, fields: dict[str, Any]) -> None:
    async with s.http() as client:
        answer = await client.post(PATHS[kind], json=body_of(kind, **fields))
        *chunks, last, done = events(answer.text)
        assert (answer.status_code, done) == (200, "[DONE]")
        prompt = len(s.dispatcher.requests[-1].prompt_ids)
        assert all(content in chunk["choices"][0] for chunk in chunks)
        assert [chunk["usage"] for chunk in chunks] == [
            {"prompt_tokens": prompt, "completion_tokens": i, "total_tokens": prompt + i}
            for i in range(1, 6)
        ]
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 5)


@in_loop
async def test_usage_comes_with_every_chunk_only_where_it_comes_at_all(folder: Path) -> None:
    """As vLLM has it."""
    async with served(folder) as s, s.http() as client:
        options = {"continuous_usage_stats": True}
        body = body_of("completions", stream=True, stream_options=options)
        *chunks, done = events((await client.post(PATHS["completions"], json=body)).text)
        assert not any("usage" in chunk for chunk in chunks)
        assert done == "[DONE]"


@in_loop
async def test_completions_take_max_completion_tokens(folder: Path) -> None:
    async with served(folder) as s, s.http() as client:
        body = body_of("completions", max_tokens=9, max_completion_tokens=2)
        answer = (await client.post(PATHS["completions"], json=body)).json()
        assert answer["usage"]["completion_tokens"] == 2


@in_loop
async def test_whole_numbers_stay_whole_over_grpc(tmp_path: Path) -> None:
    template = "{{ budget }} {{ limits }} {{ share }}"
    folder = byte_level(tmp_path, chat_template=template)
    variables = {"budget": 5, "limits": {"a": [1, 2]}, "share": 0.5}
    async with served(folder) as s, AsyncClient(s.grpc_address) as client:
        chat = [ChatMessage("user", "the earth")]
        await client.generate(chat, chat_template_kwargs=variables)
        ids = s.dispatcher.requests[-1].prompt_ids
        assert s.servers.service.tokenizer.decode(ids) == "5 {'a': [1, 2]} 0.5"
        for prompt, wrong in ((chat, {"budget": float("inf")}), ("the earth", variables)):
            with pytest.raises(InvalidRequest, match="chat_template_kwargs"):
                await client.generate(prompt, chat_template_kwargs=wrong)


@in_loop
async def test_the_template_gets_its_variables(tmp_path: Path) -> None:
    """Such as the one that switches a model's thinking off."""
    template = "{{ messages[0].content }}{% if enable_thinking is false %} plain{% endif %}"
    folder = byte_level(tmp_path, chat_template=template)
    async with served(folder) as s, s.http() as client:
        for variables, text in (({"enable_thinking": False}, " plain"), ({}, ""), (None, "")):
            fields = {"chat_template_kwargs": variables}
            body = body_of("chat", **fields)
            assert (await client.post(PATHS["chat"], json=body)).status_code == 200
            ids = s.dispatcher.requests[-1].prompt_ids
            tokenizer = s.servers.service.tokenizer
            assert tokenizer.decode(ids) == CHAT[0]["content"] + text
            told = await client.post("/tokenize", json={"messages": CHAT, **fields})
            assert told.json()["tokens"] == list(ids)
        async with AsyncClient(s.grpc_address) as typed:
            chat = [ChatMessage("user", CHAT[0]["content"])]
            await typed.generate(chat, chat_template_kwargs={"enable_thinking": False})
            ids = s.dispatcher.requests[-1].prompt_ids
            assert tokenizer.decode(ids) == CHAT[0]["content"] + " plain"


@in_loop
async def test_a_chat_gets_special_tokens_only_if_it_asks(folder: Path) -> None:
    """Its template has them."""
    async with served(folder) as s, s.http() as client:
        for asked in (None, False, True):
            body = body_of("chat", add_special_tokens=asked)
            await client.post(PATHS["chat"], json=body)
        plain, again, more = (list(one.prompt_ids) for one in s.dispatcher.requests)
        assert plain == again
        assert more[-len(plain) :] == plain
        assert len(more) > len(plain)


# --- vLLM's small paths ---------------------------------------------------------------------------


@in_loop
async def test_ping_and_load(folder: Path) -> None:
    async with served(folder) as s, s.http() as client:
        for answer in (await client.get("/ping"), await client.post("/ping")):
            assert (answer.status_code, answer.content) == (200, b"")
        assert (await client.get("/load")).json() == {"server_load": 0}
        s.dispatcher.gates = {"second_token"}
        body = body_of("completions", stream=True)
        async with client.stream("POST", PATHS["completions"], json=body):
            await s.dispatcher.reached.get()
            assert (await client.get("/load")).json() == {"server_load": 1}
