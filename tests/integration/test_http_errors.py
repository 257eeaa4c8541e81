"""Every HTTP error, in its words, shape and status."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest

from kvrelay import AsyncClient
from kvrelay.errors import ConfigError, Refused, RequestFailedError
from kvrelay.qos import QosTier, QosTiers
from kvrelay.types import Objectives
from router.text.request_fields import TierMatch, TierRules
from tests.integration.faces_kit import MODEL, in_loop, served, servers_over
from tests.integration.http_kit import (
    CHAT,
    TEXT,
    assert_error,
    completion,
    cut_off,
    events,
    full,
)
from tests.integration.http_kit import checkpoint_folder as checkpoint_folder
from tests.unit.fake_dispatcher import FakeDispatcher

TIERS = TierRules(
    tiers=QosTiers(tiers=(QosTier(name="premium"), QosTier(name="free")), default="free"),
    match=TierMatch(values={"gold": "premium"}),
)

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
    (
        "/v1/chat/completions",
        {"messages": CHAT, "echo": True},
        400,
        "unsupported_parameter",
        "echo",
        "only completions have it",
    ),
    ("/v1/completions", {"max_tokens": 0}, 400, "invalid_value", "max_tokens", "at least 1"),
    (
        "/v1/chat/completions",
        {"messages": CHAT, "chat_template_kwargs": {"messages": []}},
        400,
        "invalid_value",
        "chat_template_kwargs",
        "must not hold messages",
    ),
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
        {"messages": CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]},
        400,
        "unsupported_parameter",
        "tools",
        "this model calls no tools",
    ),
    (
        "/v1/chat/completions",
        {"messages": CHAT, "response_format": {"type": "xml"}},
        400,
        "invalid_value",
        "response_format.type",
        "must be text, json_object or json_schema, not 'xml'",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
        400,
        "missing_parameter",
        "messages[0].tool_calls[0].id",
        "is missing",
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
            *chunks, error = events(await cut_off(client, prompt=TEXT, stream=True))
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
        said = await cut_off(client, prompt=TEXT, stream=True)
        assert events(said)[-1]["error"]["code"] == "internal"
        assert "secret" not in answer.text + said


async def answer_bytes(port: int, body: dict[str, Any]) -> bytes:
    """All that the server sends until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    payload = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n\r\n"
    writer.write(head.encode() + payload)
    said = b""
    while not said.endswith(b"0\r\n\r\n") and (piece := await reader.read(65536)):
        said += piece
    writer.close()
    return said


@in_loop
async def test_a_stream_that_fails_has_no_end(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither [DONE] nor the last chunk of a body: behind the error the connection is closed."""
    body = {"model": MODEL, "prompt": TEXT, "stream": True}
    lost = RequestFailedError("worker_lost", "the worker decode-0 is gone")
    async with served(folder) as s:
        whole = await answer_bytes(s.http_port, body)
        assert whole.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        s.dispatcher.failure, s.dispatcher.fail_after_tokens = lost, 2
        said = await answer_bytes(s.http_port, body)
    assert b"Transfer-Encoding: chunked" in said or b"transfer-encoding: chunked" in said
    assert b'"code":"worker_lost"' in said
    assert b"[DONE]" not in said and b"0\r\n\r\n" not in said
    assert "ASGI" not in caplog.text, "it is cut on purpose"


@in_loop
async def test_openais_client_sees_the_error_of_a_stream(folder: Path) -> None:
    lost = RequestFailedError("worker_lost", "the worker decode-0 is gone")
    dispatcher = FakeDispatcher(failure=lost, fail_after_tokens=2)
    async with served(folder, dispatcher) as s, s.openai() as client:
        stream = await client.completions.create(model=MODEL, prompt=TEXT, stream=True)
        with pytest.raises(openai.APIError, match="decode-0 is gone"):
            async for _ in stream:
                pass


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@in_loop
async def test_objectives_and_tiers_reach_the_dispatcher(folder: Path, path: str) -> None:
    async with served(folder, tiers=TIERS) as s, s.http() as client:
        body = full(path, {"messages": CHAT} if "chat" in path else {})
        headers = {"x-slo-ttft-ms": "200", "x-deadline-ms": "3000", "x-customer-tier": "gold"}
        assert (await client.post(path, json=body, headers=headers)).status_code == 200
        assert (await client.post(path, json=body | {"tier": "free"})).status_code == 200
        objectives = [request.objectives for request in s.dispatcher.requests]
        assert objectives == [Objectives(ttft_s=0.2, deadline_s=3.0), Objectives()]
        assert [request.qos_tier for request in s.dispatcher.requests] == ["premium", "free"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@in_loop
async def test_objectives_and_tiers_that_make_no_sense_are_refused(folder: Path, path: str) -> None:
    async with served(folder, tiers=TIERS) as s, s.http() as client:
        body = full(path, {"messages": CHAT} if "chat" in path else {})
        for header in ("x-slo-ttft-ms", "x-slo-tpot-ms", "x-deadline-ms"):
            answer = await client.post(path, json=body, headers={header: "-1"})
            assert_error(answer, 400, "invalid_value", header, f"{header} must be milliseconds")
        answer = await client.post(path, json=body | {"tier": "gold"})
        assert_error(answer, 400, "invalid_value", "tier", "one of premium, free, not gold")
        assert not s.dispatcher.requests


@in_loop
async def test_objectives_that_can_never_be_kept_are_refused_without_a_retry_time(
    folder: Path,
) -> None:
    hopeless = Refused("ttft_unreachable", "9 ms without a queue", retry_after_s=None)
    async with served(folder, FakeDispatcher(refusal=hopeless)) as s, s.http() as client:
        answer = await completion(client)
        assert_error(answer, 429, "ttft_unreachable", None, "9 ms without a queue")
        assert not {"retry-after", "retry-after-ms"} & set(answer.headers)
        assert answer.headers["x-should-retry"] == "false"
        assert answer.headers["x-kvrelay-tier"] == "default"
        async with s.openai() as peer:
            asked = len(s.dispatcher.requests)
            patient = peer.with_options(max_retries=2)
            with pytest.raises(openai.RateLimitError):
                await patient.completions.create(model=MODEL, prompt="hello")
            assert len(s.dispatcher.requests) == asked + 1, "it did not try again"
        async with AsyncClient(s.grpc_address) as typed:
            with pytest.raises(Refused) as refused:
                await typed.generate("hello")
        assert refused.value.retry_after_s is None


@in_loop
async def test_a_deadline_that_passes_is_a_timeout(folder: Path) -> None:
    failure = RequestFailedError("deadline_exceeded", "its deadline has passed")
    dispatcher = FakeDispatcher(failure=failure, fail_after_tokens=2)
    async with served(folder, dispatcher) as s, s.http() as client:
        answer = await completion(client)
        assert_error(answer, 504, "deadline_exceeded", None, "its deadline has passed")
        said = await cut_off(client, prompt=TEXT, stream=True)
        assert events(said)[-1]["error"]["code"] == "deadline_exceeded"


@in_loop
async def test_busy_ports_are_errors_that_name_them(folder: Path) -> None:
    async with served(folder) as s:
        grpc_port = int(s.grpc_address.split(":")[1])
        for http, grpc, busy in ((s.http_port, 0, s.http_port), (0, grpc_port, grpc_port)):
            servers = servers_over(FakeDispatcher(), folder, http_port=http, grpc_port=grpc)
            with pytest.raises(ConfigError, match=f"127.0.0.1:{busy} is in use"):
                await servers.start()


@in_loop
async def test_other_bind_errors_give_the_systems_reason(folder: Path) -> None:
    servers = servers_over(FakeDispatcher(), folder, host="203.0.113.7")
    with pytest.raises(ConfigError, match=r"203\.0\.113\.7:0: Cannot assign requested address"):
        await servers.start()


@in_loop
async def test_ipv6_literals(folder: Path) -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
    servers = servers_over(FakeDispatcher(), folder, host="::1")
    public, _ = await servers.start()
    try:
        async with grpc.aio.insecure_channel(f"[::1]:{public.grpc}") as channel:
            await asyncio.wait_for(channel.channel_ready(), 10)
    finally:
        await servers.stop(grace_s=1.0)
