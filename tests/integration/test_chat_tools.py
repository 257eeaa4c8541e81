"""Tools and reasoning over HTTP, with OpenAI's own client, and a model that says what the test
scripts."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessage

from router.core.state.generation import GenerationRequest
from router.text.tokenizer import TextTokenizer
from tests.chat_checkpoints import checkpoint_of
from tests.integration.faces_kit import MODEL, Served, in_loop, served
from tests.integration.http_kit import CHAT as MESSAGES
from tests.integration.http_kit import events
from tests.unit.fake_dispatcher import FACTS, FakeDispatcher

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CHAT: Any = MESSAGES
NOW: Any = {"type": "function", "function": {"name": "now"}}
TWO_CALLS = (
    'Two.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich 😀", "days": 3}}\n'
    '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
ARGUMENTS = {"city": "Zürich 😀", "days": 3}


@pytest.fixture(scope="module", name="folders")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = ("hermes", "thinking", "mistral", "r1")
    return {name: checkpoint_of(name, tmp_path_factory.mktemp(name)) for name in names}


@asynccontextmanager
async def saying(folder: Path, *texts: str) -> AsyncIterator[Served]:
    """Choice i says the text of i, behind what was delivered of it."""
    tokenizer = TextTokenizer.load(folder)
    said = [[*tokenizer.encode(text, add_special_tokens=False), 0] for text in texts]

    def script(request: GenerationRequest, choice: int) -> list[int]:
        begun = len(request.delivered[choice]) if request.delivered else 0
        return said[choice % len(said)][begun:]

    facts = type(FACTS)(
        architecture="LlamaForCausalLM", fingerprint="f00d", max_model_len=4096, vocab_size=3072
    )
    async with served(folder, FakeDispatcher(script=script, facts=facts)) as s:
        yield s


def calls_of(message: ChatCompletionMessage) -> list[tuple[str, Any]]:
    return [
        (call.function.name, json.loads(call.function.arguments))
        for call in message.tool_calls or []
        if call.type == "function"
    ]


class Streamed:
    """The chunks of one choice, put together as OpenAI documents it."""

    def __init__(self) -> None:
        self.content = self.reasoning = ""
        self.calls: list[dict[str, str]] = []
        self.finish_reason: str | None = None
        self.pieces = 0

    def add(self, chunk: ChatCompletionChunk) -> None:
        (choice,) = chunk.choices
        self.finish_reason = choice.finish_reason or self.finish_reason
        self.content += choice.delta.content or ""
        self.reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        for piece in choice.delta.tool_calls or []:
            assert piece.function is not None
            if piece.id is not None:
                assert (piece.index, piece.type) == (len(self.calls), "function")
                name = piece.function.name or ""
                self.calls.append({"id": piece.id, "name": name, "arguments": ""})
            else:
                assert piece.function.name is None
            self.calls[piece.index]["arguments"] += piece.function.arguments or ""
            self.pieces += 1


async def streamed(client: openai.AsyncOpenAI, **asked: Any) -> dict[int, Streamed]:
    choices: dict[int, Streamed] = {}
    stream = await client.chat.completions.create(model=MODEL, stream=True, **asked)
    async for chunk in stream:
        for choice in chunk.choices:
            choices.setdefault(choice.index, Streamed()).add(chunk)
    return choices


@in_loop
async def test_calls_whole_and_streamed(folders: dict[str, Path]) -> None:
    asked: Any = {"messages": CHAT, "tools": [WEATHER, NOW]}
    async with saying(folders["hermes"], TWO_CALLS) as s, s.openai() as client:
        whole = (await client.chat.completions.create(model=MODEL, **asked)).choices[0]
        assert whole.finish_reason == "tool_calls"
        assert whole.message.content == "Two."
        assert calls_of(whole.message) == [("get_weather", ARGUMENTS), ("now", {})]
        got = (await streamed(client, **asked))[0]
        assert (got.content, got.finish_reason) == ("Two.", "tool_calls")
        assert [call["name"] for call in got.calls] == ["get_weather", "now"]
        assert json.loads(got.calls[0]["arguments"]) == ARGUMENTS
        assert got.calls[0]["id"] != got.calls[1]["id"]
        assert got.pieces > 5, "the arguments came in one piece"


@in_loop
async def test_the_clients_own_stream_helper_puts_calls_together(folders: dict[str, Path]) -> None:
    async with saying(folders["hermes"], TWO_CALLS) as s, s.openai() as client:
        async with client.chat.completions.stream(
            model=MODEL,
            messages=CHAT,
            tools=[WEATHER, NOW],
        ) as stream:
            final = await stream.get_final_completion()
        assert calls_of(final.choices[0].message) == [("get_weather", ARGUMENTS), ("now", {})]


@in_loop
async def test_each_choice_has_its_own_calls(folders: dict[str, Path]) -> None:
    asked: Any = {"messages": CHAT, "tools": [WEATHER, NOW], "n": 2, "logprobs": True}
    async with saying(folders["hermes"], TWO_CALLS, "None.") as s, s.openai() as client:
        got = await streamed(client, **asked)
        assert [len(got[i].calls) for i in (0, 1)] == [2, 0]
        assert (got[1].content, got[1].finish_reason) == ("None.", "stop")
        whole = (await client.chat.completions.create(model=MODEL, **asked)).choices
        assert [one.finish_reason for one in whole] == ["tool_calls", "stop"]
        assert whole[0].logprobs is not None and whole[0].logprobs.content


@in_loop
async def test_a_result_goes_back_to_the_model(folders: dict[str, Path]) -> None:
    async with saying(folders["hermes"], TWO_CALLS) as s, s.openai() as client:
        asked: Any = {"model": MODEL, "tools": [WEATHER, NOW]}
        messages: list[Any] = [*CHAT]
        said = (await client.chat.completions.create(messages=messages, **asked)).choices[0].message
        assert said.tool_calls
        messages.append(said)
        for call in said.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "It rains."})
        await client.chat.completions.create(messages=messages, **asked)
        prompt = s.servers.service.tokenizer.decode(s.dispatcher.requests[1].prompt_ids)
        assert prompt.count("It rains.") == 2
        assert '{"name": "get_weather", "arguments": {"city": "Zürich 😀", "days": 3}}' in prompt
        assert prompt.index('"name": "now", "arguments"') < prompt.index("It rains.")


@in_loop
async def test_special_tokens_that_mark_calls_are_read_and_not_said(
    folders: dict[str, Path],
) -> None:
    text = 'A<|user|>B[TOOL_CALLS]now[ARGS]{"a": 1}'
    async with saying(folders["mistral"], text) as s, s.openai() as client:
        asked: Any = {"messages": CHAT, "tools": [NOW]}
        got = (await streamed(client, **asked))[0]
        assert got.content == "AB"
        assert [(c["name"], c["arguments"], len(c["id"])) for c in got.calls] == [
            ("now", '{"a": 1}', 9)
        ]
        plain = await client.chat.completions.create(model=MODEL, messages=CHAT)
        assert plain.choices[0].message.content == 'ABnow{"a": 1}'


@in_loop
async def test_tool_choice_none_leaves_text_alone(folders: dict[str, Path]) -> None:
    async with saying(folders["hermes"], TWO_CALLS) as s, s.openai() as client:
        asked: Any = {"messages": CHAT, "tools": [NOW], "tool_choice": "none"}
        whole = (await client.chat.completions.create(model=MODEL, **asked)).choices[0]
        assert (whole.message.content, whole.finish_reason) == (TWO_CALLS, "stop")


@in_loop
async def test_a_choice_constrains_the_request(folders: dict[str, Path]) -> None:
    async with saying(folders["hermes"], TWO_CALLS) as s, s.openai() as client:
        named: Any = {"type": "function", "function": {"name": "now"}}
        allowed: Any = {"mode": "required", "tools": [named]}
        choices: tuple[Any, ...] = (
            *("required", named),
            {"type": "allowed_tools", "allowed_tools": allowed},
        )
        for choice in choices:
            asked: Any = {"messages": CHAT, "tools": [WEATHER, NOW], "tool_choice": choice}
            await client.chat.completions.create(model=MODEL, **asked)
        grammars = [request.sampling.grammar for request in s.dispatcher.requests]
        assert all("now" in grammar for grammar in grammars)
        assert ["get_weather" in grammar for grammar in grammars] == [True, False, False]


@in_loop
async def test_reasoning_is_a_field_of_its_own(folders: dict[str, Path]) -> None:
    async with saying(folders["r1"], "Hm, two.\n</think>\n\nTwo.") as s, s.openai() as client:
        whole = (await client.chat.completions.create(model=MODEL, messages=CHAT)).choices[0]
        assert whole.message.content == "Two."
        extra = whole.message.model_extra or {}
        assert extra == {"reasoning": "Hm, two.", "reasoning_content": "Hm, two."}
        got = (await streamed(client, messages=CHAT))[0]
        assert (got.reasoning, got.content) == ("Hm, two.", "Two.")
        without = await streamed(client, messages=CHAT, extra_body={"include_reasoning": False})
        assert (without[0].reasoning, without[0].content) == ("", "Two.")


@in_loop
async def test_effort_and_template_variables(folders: dict[str, Path]) -> None:
    async with saying(folders["thinking"], "Two.") as s, s.openai() as client:
        efforts: tuple[Any, ...] = (
            {"reasoning_effort": "none"},
            {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
        )
        for fields in efforts:
            await client.chat.completions.create(model=MODEL, messages=CHAT, **fields)
            prompt = s.servers.service.tokenizer.decode(s.dispatcher.requests[-1].prompt_ids)
            assert prompt.rstrip().endswith("</think>"), prompt


@in_loop
async def test_a_prompt_of_token_ids_is_answered_with_calls(folders: dict[str, Path]) -> None:
    async with saying(folders["hermes"], TWO_CALLS) as s, s.http() as client:
        ids = list(s.servers.service.tokenizer.encode("rendered elsewhere"))
        body = {
            "messages": [],
            "prompt_token_ids": ids,
            "tools": [WEATHER, NOW],
            "return_token_ids": True,
        }
        answer = (await client.post("/v1/chat/completions", json=body)).json()
        assert answer["prompt_token_ids"] == ids
        (choice,) = answer["choices"]
        assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == [
            "get_weather",
            "now",
        ]
        assert s.servers.service.tokenizer.decode(choice["token_ids"][:-1]) == TWO_CALLS


@in_loop
async def test_a_continued_stream_goes_on_within_a_call(folders: dict[str, Path]) -> None:
    body = {"messages": CHAT, "tools": [WEATHER, NOW], "stream": True, "return_token_ids": True}
    async with saying(folders["hermes"], TWO_CALLS) as s, s.http() as client:
        *chunks, _ = events((await client.post("/v1/chat/completions", json=body)).text)
        ticket = chunks[0]["ticket"]
        whole = _put_together(chunks)
        for cut in range(1, len(chunks) - 1, 3):
            ids = [i for chunk in chunks[:cut] for i in chunk["choices"][0]["token_ids"]]
            behind = {"choices": [{"token_ids": ids}], "ticket": ticket}
            answer = await client.post("/v1/chat/completions", json=body | {"continuation": behind})
            assert answer.status_code == 200, answer.text
            *more, _ = events(answer.text)
            assert _put_together([*chunks[:cut], *more]) == whole, cut


def _put_together(chunks: list[Any]) -> tuple[str, dict[int, tuple[str, str]], str]:
    """Content, # index of a call |-> name, arguments; and the finish reason."""
    content, calls = "", dict[int, tuple[str, str]]()
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        content += delta.get("content") or ""
        for piece in delta.get("tool_calls", ()):
            name, arguments = calls.get(piece["index"], ("", ""))
            function = piece["function"]
            name, arguments = name + function.get("name", ""), arguments + function["arguments"]
            calls[piece["index"]] = (name, arguments)
    return content, calls, chunks[-1]["choices"][0]["finish_reason"]


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "web_search"}]}, "tools[0]", "'web_search' are not supported"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "is missing"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "is missing"),
    ({"tools": [{**NOW, "when": 1}]}, "tools[0].when", "unknown field"),
    ({"tools": [NOW], "tool_choice": "must"}, "tool_choice", "none, auto, required"),
    ({"tools": [NOW], "tool_choice": 1}, "tool_choice", "none, auto, required"),
    ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
    ({"functions": [{"name": "f"}]}, "functions", "send tools"),
    ({"function_call": {"name": "f"}}, "function_call", "send tool_choice"),
    ({"reasoning_effort": "much"}, "reasoning_effort", "one of none, minimal"),
    ({"messages": [{"role": "assistant"}]}, "messages[0].content", "is missing"),
    (
        {"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": ""}}]},
        "messages[0].function_call",
        "send tool_calls",
    ),
    (
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "1", "type": "custom", "function": {"name": "f"}}],
                }
            ]
        },
        "messages[0].tool_calls",
        "'custom' are not supported",
    ),
]


@in_loop
async def test_what_is_wrong_is_named(folders: dict[str, Path]) -> None:
    async with saying(folders["hermes"], "x") as s, s.http() as client:
        for fields, param, words in BAD:
            body = {"messages": CHAT, **fields}
            answer = await client.post("/v1/chat/completions", json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), error
            assert words in error["message"], error
        assert not s.dispatcher.requests


@in_loop
async def test_tokenize_shows_the_prompt_with_tools(folders: dict[str, Path]) -> None:
    async with saying(folders["hermes"], "x") as s, s.http() as client:
        body = {"messages": CHAT, "tools": [NOW]}
        ids = (await client.post("/tokenize", json=body)).json()["tokens"]
        await client.post("/v1/chat/completions", json=body)
        assert ids == list(s.dispatcher.requests[0].prompt_ids)
