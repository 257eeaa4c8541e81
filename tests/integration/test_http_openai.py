"""The stock OpenAI client, unmodified."""

from __future__ import annotations

from pathlib import Path

from tests.integration.faces_kit import MODEL, in_loop, served
from tests.integration.http_kit import CHAT, TEXT
from tests.integration.http_kit import checkpoint_folder as checkpoint_folder


@in_loop
async def test_openai_completion(folder: Path) -> None:
    async with served(folder) as s, s.openai() as client:
        answer = await client.completions.create(
            model=MODEL, prompt=TEXT, n=2, seed=3, logprobs=2, max_tokens=100, user="me"
        )
        assert [c.index for c in answer.choices] == [0, 1]
        assert {c.text for c in answer.choices} == {TEXT}
        assert answer.choices[0].finish_reason == "stop"
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens is not None
        assert logprobs.text_offset is not None
        assert "".join(logprobs.tokens).startswith("the earth ")
        assert logprobs.text_offset[1] == len(logprobs.tokens[0])
        assert logprobs.top_logprobs is not None
        assert logprobs.top_logprobs[0][logprobs.tokens[0]] == -0.5
        assert answer.usage is not None
        assert answer.usage.total_tokens == 3 * (len(logprobs.tokens)) + 1
        sampling = s.dispatcher.requests[0].sampling
        assert (sampling.n, sampling.seed, sampling.temperature) == (2, 3, 0.5)


@in_loop
async def test_openai_completion_stream(folder: Path) -> None:
    async with served(folder) as s, s.openai() as client:
        stream = await client.completions.create(
            model=MODEL, prompt=TEXT, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].text for c in chunks[:-1]) == TEXT
        assert [c.choices[0].finish_reason for c in chunks[-2:-1]] == ["stop"]
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == len(chunks) - 1


@in_loop
async def test_openai_chat(folder: Path) -> None:
    async with served(folder) as s, s.openai() as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=CHAT, logprobs=True, top_logprobs=1, stop="he e", n=2
        )
        choice = answer.choices[1]
        assert choice.message.role == "assistant"
        assert choice.message.content == "t"
        assert (choice.finish_reason, choice.model_extra) == ("stop", {"stop_reason": "he e"})
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        said = choice.logprobs.content
        text = b"".join(bytes(entry.bytes or ()) for entry in said).decode()
        assert text.startswith("<|user|>the e")
        assert {len(entry.top_logprobs) for entry in said} == {1}
        assert s.dispatcher.generations[0].stopped == {0: len(said), 1: len(said)}


@in_loop
async def test_openai_chat_stream(folder: Path) -> None:
    async with served(folder) as s, s.openai() as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=CHAT, stream=True, n=2, max_completion_tokens=4
        )
        chunks = [chunk async for chunk in stream]
        firsts = [next(c for c in chunks if c.choices[0].index == i) for i in (0, 1)]
        assert [c.choices[0].delta.role for c in firsts] == ["assistant", "assistant"]
        own = [c.choices[0].delta.content or "" for c in chunks if c.choices[0].index == 1]
        assert "the earth".startswith("".join(own))
        assert len("".join(own)) > 3
        assert chunks[-1].choices[0].finish_reason == "length"


@in_loop
async def test_openai_models_and_a_conversation_sent_back(folder: Path) -> None:
    async with served(folder) as s, s.openai() as client:
        assert [m.id async for m in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).owned_by == "kvrelay"
        first = await client.chat.completions.create(model=MODEL, messages=CHAT)
        said = first.choices[0].message.model_dump()
        again = [*CHAT, said, {"role": "user", "content": [{"type": "text", "text": "and"}]}]
        await client.chat.completions.create(model=MODEL, messages=again)
        prompt = s.servers.service.tokenizer.decode(
            s.dispatcher.requests[1].prompt_ids, skip_special_tokens=False
        )
        assert "<|user|>the earth<|end|>" in prompt
        assert "<|user|>and<|end|>" in prompt
