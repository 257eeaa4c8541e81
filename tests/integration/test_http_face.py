"""The OpenAI HTTP face: what clients get, in words and in shape."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvrelay.errors import ConfigError, Refused, RequestFailedError
from router.server import FaceOptions, Faces
from tests.integration.faces_kit import MODEL, in_loop, served
from tests.tokenizer_fixture import byte_level
from tests.unit.fake_dispatcher import FakeDispatcher

TEXT = "the earth 😀 and the heaven"
CHAT = [{"role": "user", "content": "the earth"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = byte_level(tmp_path_factory.mktemp("checkpoint"))
    (folder / "generation_config.json").write_text('{"eos_token_id": 0, "temperature": 0.5}')
    return folder


def events(body: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def completion(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={"model": MODEL, "prompt": TEXT, **body})


# --- the stock client -------------------------------------------------------------------------


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
        prompt = s.faces.service.tokenizer.decode(
            s.dispatcher.requests[1].prompt_ids, skip_special_tokens=False
        )
        assert "<|user|>the earth<|end|>" in prompt
        assert "<|user|>and<|end|>" in prompt


# --- kvrelay's and vLLM's own -----------------------------------------------------------------


@in_loop
async def test_prompts_of_token_ids_in_a_batch(folder: Path) -> None:
    async with served(folder) as s, s.http() as client:
        body = {"prompt": [[1, 7, 8], [1, 9]], "n": 2, "return_token_ids": True}
        answer = (await completion(client, **body)).json()
        got = [(c["index"], c["token_ids"], c["prompt_token_ids"]) for c in answer["choices"]]
        assert got == [
            *((0, [7, 8], [1, 7, 8]), (1, [7, 8], [1, 7, 8])),
            *((2, [9], [1, 9]), (3, [9], [1, 9])),
        ]
        assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}
        streamed = events((await completion(client, **body, stream=True)).text)
        assert sorted(c["choices"][0]["index"] for c in streamed[:-1]) == [0, 0, 1, 1, 2, 3]
        assert streamed[-1] == "[DONE]"
        assert streamed[0]["choices"][0]["prompt_token_ids"] in ([1, 7, 8], [1, 9])


@in_loop
async def test_chat_gives_token_ids(folder: Path) -> None:
    async with served(folder) as s, s.http() as client:
        body = {"model": MODEL, "messages": CHAT, "return_token_ids": True}
        answer = (await client.post("/v1/chat/completions", json=body)).json()
        ids = list(s.dispatcher.requests[0].prompt_ids)
        said = ids[1 : ids.index(0) + 1]
        assert (answer["prompt_token_ids"], answer["choices"][0]["token_ids"]) == (ids, said)
        body["stream"] = True
        chunks = events((await client.post("/v1/chat/completions", json=body)).text)
        assert chunks[0]["prompt_token_ids"] == ids
        assert [i for c in chunks[:-1] for i in c["choices"][0]["token_ids"]] == said


@in_loop
async def test_every_extra_reaches_the_workers(folder: Path) -> None:
    extras = {
        "top_k": 4,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [77],
        "frequency_penalty": 0.25,
        "presence_penalty": -0.25,
        "logit_bias": {"5": -3},
        "top_p": 0.5,
        "seed": -1,
    }
    async with served(folder) as s, s.http() as client:
        assert (await completion(client, **extras)).status_code == 200
        sampling = s.dispatcher.requests[0].sampling
        expected = {
            **extras,
            "stop_token_ids": (77,),
            "logit_bias": ((5, -3.0),),
            "seed": 2**64 - 1,
        }
        del expected["ignore_eos"]
        assert {name: getattr(sampling, name) for name in expected} == expected


@in_loop
async def test_end_of_sequence_is_counted_but_not_said(folder: Path) -> None:
    dispatcher = FakeDispatcher(script=lambda request, choice: [7, 8, 0, 9])
    async with served(folder, dispatcher) as s, s.http() as client:
        answer = (await completion(client, skip_special_tokens=False, return_token_ids=True)).json()
        choice = answer["choices"][0]
        assert choice["text"] == s.faces.service.tokenizer.decode([7, 8])
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
        assert (choice["token_ids"], answer["usage"]["completion_tokens"]) == ([7, 8, 0], 3)
        own = (await completion(client, stop_token_ids=[8], include_stop_str_in_output=True)).json()
        assert own["choices"][0]["stop_reason"] == 8
        assert own["choices"][0]["text"] == s.faces.service.tokenizer.decode([7, 8])


@in_loop
async def test_stop_string_is_cut_or_kept(folder: Path) -> None:
    async with served(folder) as s, s.http() as client:
        cut = (await completion(client, stop=["th and", " 😀 a"])).json()["choices"][0]
        assert (cut["text"], cut["stop_reason"]) == ("the earth", " 😀 a")
        kept = await completion(client, stop=" 😀 a", include_stop_str_in_output=True, stream=True)
        chunks = [c["choices"][0] for c in events(kept.text)[:-1]]
        assert "".join(c["text"] for c in chunks) == "the earth 😀 a"
        assert chunks[-1]["stop_reason"] == " 😀 a"
        assert s.dispatcher.yielded_tokens < 2 * len(s.dispatcher.requests[0].prompt_ids) - 4


@in_loop
async def test_ledger_on_demand(folder: Path) -> None:
    async with served(folder) as s, s.http() as client:
        asked = {"x-kvrelay-ledger": "1"}
        body = {"model": MODEL, "prompt": TEXT}
        whole = (await client.post("/v1/completions", json=body, headers=asked)).json()
        names = ["receive", "tokenize", "prefill", "decode", "respond"]
        assert list(whole["kvrelay"]["ledger_ms"]) == names
        stream = await client.post("/v1/completions", json={**body, "stream": True}, headers=asked)
        *_, last, done = events(stream.text)
        assert (list(last["kvrelay"]["ledger_ms"]), done) == (names, "[DONE]")
        assert "kvrelay" not in (await completion(client)).json()


@in_loop
async def test_answers_are_not_held_back_by_the_network_stack(folder: Path) -> None:
    """Nagle's algorithm and a delayed acknowledgement together cost 40 ms for each answer."""
    async with served(folder) as s, s.http() as client:
        times_s = []
        for _ in range(11):
            began_s = time.perf_counter()
            await completion(client, max_tokens=1)
            times_s.append(time.perf_counter() - began_s)
        assert sorted(times_s)[5] < 0.03


@in_loop
async def test_tokenize_and_detokenize(folder: Path) -> None:
    async with served(folder) as s, s.http() as client:
        body = {"model": MODEL, "prompt": TEXT, "return_token_strs": True}
        got = (await client.post("/tokenize", json=body)).json()
        ids = list(s.faces.service.tokenizer.encode(TEXT))
        assert (got["tokens"], got["count"], got["max_model_len"]) == (ids, len(ids), 512)
        assert "".join(got["token_strs"]).startswith("<|begin|>theĠearth")
        plain = {"prompt": TEXT, "add_special_tokens": False}
        assert (await client.post("/tokenize", json=plain)).json()["tokens"] == ids[1:]
        chat = (await client.post("/tokenize", json={"messages": CHAT})).json()["tokens"]
        assert chat[-1] == s.faces.service.tokenizer.backend.token_to_id("<|assistant|>")
        back = (await client.post("/detokenize", json={"tokens": ids})).json()
        assert back == {"prompt": f"<|begin|>{TEXT}"}


@in_loop
async def test_request_id_is_echoed(folder: Path) -> None:
    async with served(folder) as s, s.http() as client:
        given = await client.get("/health", headers={"x-request-id": "abc-1"})
        assert given.headers["x-request-id"] == "abc-1"
        wrong = await client.get("/nowhere", headers={"x-request-id": "a b"})
        assert wrong.status_code == 404
        assert len(wrong.headers["x-request-id"]) == 32


# --- state ------------------------------------------------------------------------------------


@in_loop
async def test_ready_says_why_not(folder: Path) -> None:
    dispatcher = FakeDispatcher(is_ready=False, statuses=())
    async with served(folder, dispatcher) as s, s.http() as client:
        assert (await client.get("/health")).status_code == 200
        answer = await client.get("/ready")
        assert answer.status_code == 503
        assert answer.json() == {"ready": False, "reason": "no worker has joined yet"}
        dispatcher.is_ready = True
        assert (await client.get("/ready")).json() == {"ready": True}


@in_loop
async def test_metrics_are_valid_and_count(folder: Path) -> None:
    async with served(folder) as s, s.http() as client:
        await completion(client)
        await completion(client, temperature=-1)
        text = (await client.get("/metrics")).text
        samples = {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        model = ("model_name", MODEL)
        tokens = len(s.dispatcher.requests[0].prompt_ids)
        assert samples["kvrelay:prompt_tokens_total", model] == tokens
        assert samples["kvrelay:generation_tokens_total", model] == tokens - 1
        assert samples["kvrelay:time_to_first_token_seconds_count", model] == 1
        assert samples["kvrelay:inter_token_latency_seconds_count", model] == tokens - 2
        assert samples["kvrelay:e2e_request_latency_seconds_count", model] == 1
        assert samples["kvrelay:num_requests_running", model] == 0
        worker = (model, ("role", "both"), ("worker", "both-0"))
        assert samples["kvrelay:kv_cache_usage_perc", *worker] == 0.25
        assert samples["kvrelay:request_success_total", ("finished_reason", "stop"), model] == 1
        rejected = ("kvrelay:request_rejections_total", model, ("reason", "invalid_value"))
        assert samples[rejected] == 1
        phase = ("kvrelay:request_phase_seconds_count", model, ("phase", "tokenize"))
        assert samples[phase] == 1


@in_loop
async def test_debug_and_version(folder: Path) -> None:
    async with served(folder) as s, s.http() as client:
        kv = (await client.get("/debug/kv")).json()
        assert kv == {"workers": [{"worker": "both-0", "total_blocks": 100}]}
        assert (await client.get("/version")).json() == {"version": "0.1.0"}


# --- errors -----------------------------------------------------------------------------------

BAD_BODIES: list[tuple[str, dict[str, Any], int, str, str | None, str]] = [
    ("/v1/completions", {"prompt": ""}, 400, "invalid_value", "prompt", "the prompt is empty"),
    ("/v1/completions", {"prompt": []}, 400, "invalid_value", "prompt", "empty list"),
    ("/v1/completions", {"prompt": [[]]}, 400, "invalid_value", "prompt", "the prompt is empty"),
    ("/v1/completions", {"prompt": [4000]}, 400, "invalid_value", "prompt", "out of the vocab"),
    ("/v1/completions", {"prompt": [-1]}, 400, "invalid_type", "prompt", "whole numbers from 0"),
    ("/v1/completions", {"prompt": [1] * 600}, 400, "context_length_exceeded", "prompt", "600"),
    ("/v1/completions", {"max_tokens": 600}, 400, "context_length_exceeded", "max_tokens", "512"),
    ("/v1/completions", {"prompt": "a\ud800"}, 400, "invalid_value", None, "not valid Unicode"),
    (
        "/v1/completions",
        {"stop": 3},
        400,
        "invalid_type",
        "stop",
        "stop must be a string or a list",
    ),
    ("/v1/completions", {"temperature": "hot"}, 400, "invalid_type", "temperature", "valid number"),
    ("/v1/completions", {"max_tokens": 1.5}, 400, "invalid_type", "max_tokens", "valid integer"),
    ("/v1/completions", {"logit_bias": {"x": 1}}, 400, "invalid_value", "logit_bias", "token ids"),
    ("/v1/completions", {"n": 0}, 400, "invalid_value", "n", "from 1 to 128"),
    ("/v1/completions", {"magic": 1}, 400, "unknown_parameter", "magic", "unknown field 'magic'"),
    ("/v1/completions", {"suffix": "x"}, 400, "unsupported_parameter", "suffix", "not supported"),
    ("/v1/completions", {"best_of": 2}, 400, "unsupported_parameter", "best_of", "null or 1"),
    ("/v1/completions", {"echo": True}, 400, "unsupported_parameter", "echo", "not supported"),
    (
        "/v1/completions",
        {"stream_options": {"include_usage": True}},
        400,
        "invalid_value",
        "stream_options",
        "needs stream: true",
    ),
    ("/v1/completions", {"model": "gpt"}, 404, "model_not_found", "model", "'gpt' does not exist"),
    ("/v1/chat/completions", {}, 400, "missing_parameter", "messages", "'messages' is missing"),
    ("/v1/chat/completions", {"messages": []}, 400, "invalid_value", "messages", "is empty"),
    (
        "/v1/chat/completions",
        {"messages": CHAT, "tools": [{"type": "function"}]},
        400,
        "unsupported_parameter",
        "tools",
        "tools is not supported: leave it out or send null or []",
    ),
    (
        "/v1/chat/completions",
        {"messages": CHAT, "response_format": {"type": "json_object"}},
        400,
        "unsupported_parameter",
        "response_format",
        "response_format is not supported",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
        400,
        "unsupported_parameter",
        "messages[0].tool_calls",
        "not supported",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        400,
        "invalid_type",
        "messages[0].content",
        "messages[0].content must be a string or a list",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        400,
        "unsupported_parameter",
        "messages[0].content",
        "'input_audio' are not supported",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "tool", "content": "x"}]},
        400,
        "invalid_value",
        "messages",
        "no tools here",
    ),
    (
        "/v1/chat/completions",
        {"messages": CHAT, "top_logprobs": 2},
        400,
        "invalid_value",
        "top_logprobs",
        "needs logprobs: true",
    ),
    ("/tokenize", {}, 400, "invalid_value", "prompt", "either prompt or messages"),
    ("/detokenize", {"tokens": [-1]}, 400, "invalid_type", "tokens[0]", "greater than or equal"),
]


def full(path: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"model": MODEL, "prompt": TEXT, **body} if path == "/v1/completions" else body


def assert_error(
    answer: httpx.Response, status: int, code: str, param: str | None, words: str
) -> None:
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code), error
    assert words in error["message"]
    assert param is None or error["param"] == param
    assert set(error) == {"message", "type", "code", "param"}


@in_loop
async def test_bad_bodies_are_refused_in_words(folder: Path) -> None:
    async with served(folder) as s, s.http() as client:
        for path, body, status, code, param, words in BAD_BODIES:
            content = json.dumps(full(path, body))
            headers = {"content-type": "application/json"}
            answer = await client.post(path, content=content, headers=headers)
            assert_error(answer, status, code, param, words)
        assert s.dispatcher.requests == []


@in_loop
async def test_neutral_values_are_accepted(folder: Path) -> None:
    neutral: dict[str, Any] = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "audio": None,
        "modalities": ["text"],
        "parallel_tool_calls": True,
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
    }
    async with served(folder) as s, s.http() as client:
        body = {"model": MODEL, "messages": CHAT, **neutral}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        neutral = {"suffix": None, "best_of": 1, "echo": False, "temperature": None}
        assert (await completion(client, **neutral)).status_code == 200


@in_loop
async def test_malformed_bodies(folder: Path) -> None:
    async with served(folder, max_body_bytes=1000) as s, s.http() as client:

        async def send(content: Any, media_type: str = "application/json") -> httpx.Response:
            headers = {"content-type": media_type}
            return await client.post("/v1/completions", content=content, headers=headers)

        for broken in (b"{", b"\xff", b"", b'{"temperature": NaN}', b"[" * 900):
            assert_error(await send(broken), 400, "invalid_json", None, "not valid JSON")
        assert_error(await send(b"[1]"), 400, "invalid_json", None, "must be a JSON object")
        words = "exceeds the limit of 1000 bytes"
        assert_error(await send(b" " * 1001), 413, "body_too_large", None, words)

        async def chunked() -> Any:
            for _ in range(11):
                yield b" " * 100

        assert_error(await send(chunked()), 413, "body_too_large", None, words)
        assert_error(
            await send(b"{}", "text/plain"), 415, "unsupported_media_type", None, "application/json"
        )


@in_loop
async def test_wrong_paths_and_methods(folder: Path) -> None:
    async with served(folder) as s, s.http() as client:
        assert_error(await client.get("/v1/x"), 404, "not_found", None, "GET /v1/x: Not Found")
        answer = await client.get("/v1/completions")
        assert_error(answer, 405, "method_not_allowed", None, "Method Not Allowed")
        answer = await client.get("/v1/models/org/other")
        assert_error(answer, 404, "model_not_found", "model", "'org/other' does not exist")


@in_loop
async def test_refusals_say_when_to_come_back(folder: Path) -> None:
    dispatcher = FakeDispatcher(refusal=Refused("full", "no room now", retry_after_s=1.25))
    async with served(folder, dispatcher) as s, s.http() as client:
        for stream in (False, True):
            answer = await completion(client, stream=stream)
            assert_error(answer, 429, "full", None, "no room now")
            assert answer.headers["retry-after"] == "2"
            assert answer.headers["retry-after-ms"] == "1250"
        dispatcher.refusal = Refused("no_capacity", "no decode worker", retry_after_s=5)
        answer = await completion(client)
        assert_error(answer, 503, "no_capacity", None, "no decode worker")
        assert answer.headers["retry-after"] == "5"
        dispatcher.facts = None
        assert_error(await completion(client), 503, "no_capacity", None, "no worker has joined yet")


@in_loop
async def test_the_second_of_a_batch_refused_aborts_the_first(folder: Path) -> None:
    async with served(folder) as s, s.http() as client:
        answer = await completion(client, prompt=[[1, 2], [1, 4000]])
        assert_error(answer, 400, "invalid_value", "prompt", "token id 4000")
        assert await s.dispatcher.aborted.get() == s.dispatcher.requests[0].request_id


@in_loop
async def test_failures_before_and_in_a_stream(folder: Path) -> None:
    lost = RequestFailedError("worker_lost", "the worker decode-0 is gone")
    for after, expected in ((1, 1), (3, 3)):
        dispatcher = FakeDispatcher(failure=lost, fail_after_tokens=after)
        async with served(folder, dispatcher) as s, s.http() as client:
            whole = await completion(client)
            assert_error(whole, 503, "worker_lost", None, "decode-0 is gone")
            stream = await completion(client, stream=True)
            *chunks, error = events(stream.text)
            assert len(chunks) == expected
            assert error["error"]["code"] == "worker_lost"


@in_loop
async def test_a_failure_before_the_first_token_has_its_own_status(folder: Path) -> None:
    lost = RequestFailedError("worker_lost", "the worker prefill-0 is gone")
    dispatcher = FakeDispatcher(failure=lost, fail_after_tokens=0)
    async with served(folder, dispatcher) as s, s.http() as client:
        answer = await completion(client, stream=True)
        assert_error(answer, 503, "worker_lost", None, "prefill-0 is gone")


@in_loop
async def test_a_bug_is_a_500_without_its_words(folder: Path) -> None:
    dispatcher = FakeDispatcher(failure=KeyError("secret"), fail_after_tokens=1)
    async with served(folder, dispatcher) as s, s.http() as client:
        answer = await completion(client)
        assert_error(answer, 500, "internal", None, "internal error")
        stream = await completion(client, stream=True)
        assert events(stream.text)[-1]["error"]["code"] == "internal"
        assert "secret" not in answer.text + stream.text


@in_loop
async def test_busy_ports_are_errors_that_name_them(folder: Path) -> None:
    async with served(folder) as s:
        grpc_port = int(s.grpc_address.split(":")[1])
        for http, grpc, busy in ((s.http_port, 0, s.http_port), (0, grpc_port, grpc_port)):
            options = FaceOptions(host="127.0.0.1", http_port=http, grpc_port=grpc)
            with pytest.raises(ConfigError, match=f"127.0.0.1:{busy} is in use"):
                await Faces(FakeDispatcher(), folder, MODEL, options).start()
