"""The stock OpenAI client and kvrelay's own, unmodified, against a prefill and a decode worker."""

from __future__ import annotations

from typing import Any

import anthropic
import openai

from kvrelay import AsyncClient, ChatMessage
from kvrelay.types import FinishReason
from tests.integration.faces_kit import in_loop
from tests.integration.split_kit import Cluster

MODEL = "test-model"
TEXT = "the earth and the heaven"
SAID: Any = [{"role": "user", "content": TEXT}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
NO_EOS: dict[str, Any] = {"ignore_eos": True}


def client_of(split: Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{split.http_url}/v1", api_key="none", max_retries=0)


def cut(text: str) -> tuple[str, str]:
    """A stop string from inside a random model's text, and what comes before it."""
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    return stop, text[: text.index(stop)]


def test_openai_completions(split: Cluster) -> None:
    with client_of(split) as client:

        def ask(**fields: Any) -> Any:
            return client.completions.create(
                model=MODEL, prompt=TEXT, extra_body=NO_EOS, **GREEDY, **fields
            )

        one = ask(n=2, logprobs=2)
        text = one.choices[0].text
        assert [(c.index, c.text, c.finish_reason) for c in one.choices] == [
            (0, text, "length"),
            (1, text, "length"),
        ]
        assert one.usage.completion_tokens == 48
        logprobs = one.choices[1].logprobs
        assert len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 24
        # By text, so two tokens of half a character each are one entry.
        assert max(len(top) for top in logprobs.top_logprobs) == 2
        assert max(logprobs.token_logprobs) < 0
        chunks = list(ask(n=2, stream=True))
        for index in (0, 1):
            own = [c.choices[0] for c in chunks if c.choices[0].index == index]
            assert "".join(choice.text for choice in own) == text
            assert own[-1].finish_reason == "length"
        stop, before = cut(text)
        stopped = ask(stop=stop).choices[0]
        assert (stopped.text, stopped.finish_reason) == (before, "stop")


def test_openai_chat(split: Cluster) -> None:
    with client_of(split) as client:

        def ask(**fields: Any) -> Any:
            return client.chat.completions.create(
                model=MODEL, messages=SAID, extra_body=NO_EOS, **GREEDY, **fields
            )

        one = ask(n=2, logprobs=True, top_logprobs=1)
        text = one.choices[0].message.content
        assert [c.message.content for c in one.choices] == [text, text]
        assert [len(c.logprobs.content) for c in one.choices] == [24, 24]
        assert all(entry.top_logprobs[0].token == entry.token for entry in said_by(one))
        chunks = list(ask(n=2, stream=True))
        for index in (0, 1):
            own = [c.choices[0] for c in chunks if c.choices[0].index == index]
            assert "".join(choice.delta.content or "" for choice in own) == text
        stop, before = cut(text)
        streamed = [c.choices[0] for c in ask(stop=stop, stream=True)]
        assert "".join(choice.delta.content or "" for choice in streamed) == before
        assert streamed[-1].finish_reason == "stop"


def said_by(answer: Any) -> list[Any]:
    """Greedy: the token chosen is the likeliest."""
    return [entry for choice in answer.choices for entry in choice.logprobs.content]


@in_loop
async def test_kvrelay_client(split: Cluster) -> None:
    async with AsyncClient(split.grpc_address) as client:
        for prompt in (TEXT, [ChatMessage("user", TEXT)]):
            one = await client.generate(prompt, n=2, logprobs=1, **GREEDY, **NO_EOS)
            assert [choice.text for choice in one.choices] == [one.text, one.text]
            assert {choice.finish_reason for choice in one.choices} == {FinishReason.LENGTH}
            for choice in one.choices:
                assert [entry.token_id for entry in choice.logprobs] == list(choice.token_ids)
                assert all(entry.top[0][0] == entry.token_id for entry in choice.logprobs)
            async with client.stream(prompt, **GREEDY, **NO_EOS) as stream:
                chunks = [chunk async for chunk in stream]
            assert "".join(chunk.text for chunk in chunks) == one.text
            assert sum((chunk.token_ids for chunk in chunks), ()) == one.token_ids
            stop, before = cut(one.text)
            stopped = (await client.generate(prompt, stop=[stop], **GREEDY, **NO_EOS)).choices[0]
            assert (stopped.text, stopped.stop_string) == (before, stop)


def test_both_clients_hear_the_same(split: Cluster) -> None:
    with client_of(split) as client:
        http = client.completions.create(model=MODEL, prompt=TEXT, extra_body=NO_EOS, **GREEDY)

    @in_loop
    async def over_grpc() -> None:
        async with AsyncClient(split.grpc_address) as grpc_client:
            answer = await grpc_client.generate(TEXT, **GREEDY, **NO_EOS)
            assert answer.text == http.choices[0].text

    over_grpc()


def test_openai_responses_and_a_conversation_by_its_id(split: Cluster) -> None:
    with client_of(split) as client:
        fixed: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 16}
        one = client.responses.create(input=SAID, **fixed)
        chat = client.chat.completions.create(
            model=MODEL, messages=SAID, **GREEDY | {"max_tokens": 16}
        )
        assert one.output_text == chat.choices[0].message.content
        with client.responses.stream(input=SAID, **fixed) as stream:
            deltas = [e.delta for e in stream if e.type == "response.output_text.delta"]
        assert "".join(deltas) == one.output_text
        more: Any = {"role": "user", "content": "and the water"}
        by_id = client.responses.create(input=[more], previous_response_id=one.id, **fixed)
        whole = client.responses.create(input=[*SAID, *one.output, more], **fixed)
        assert by_id.output_text == whole.output_text
        assert by_id.usage is not None
        assert whole.usage is not None
        assert by_id.usage.input_tokens == whole.usage.input_tokens > one.usage.total_tokens
    split.assert_clean()


def test_anthropic_messages(split: Cluster) -> None:
    asked: Any = {"model": MODEL, "messages": SAID}
    fixed: Any = {"max_tokens": 16, "extra_body": {"temperature": 0}}
    with anthropic.Anthropic(base_url=split.http_url, api_key="none", max_retries=0) as client:
        whole = client.messages.create(**asked, **fixed)
        assert whole.content[0].type == "text"
        with client.messages.stream(**asked, **fixed) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert text == whole.content[0].text
        assert final.stop_reason == whole.stop_reason == "max_tokens"
        usage = final.usage
        prompt = usage.input_tokens + (usage.cache_read_input_tokens or 0)
        assert client.messages.count_tokens(**asked).input_tokens == prompt
        with client_of(split) as other:
            chat = other.chat.completions.create(
                model=MODEL, messages=SAID, **GREEDY | {"max_tokens": 16}
            )
        assert chat.choices[0].message.content == text
    split.assert_clean()
