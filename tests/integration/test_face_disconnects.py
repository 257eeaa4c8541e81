"""A client that goes away at any moment: its request is aborted, and nothing else happens."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest

from kvrelay import AsyncClient, ChatMessage, RequestFailedError
from tests.integration.faces_kit import MODEL, Served, in_loop, served
from tests.tokenizer_fixture import byte_level
from tests.unit.fake_dispatcher import FakeDispatcher

MOMENTS = ["submit", "first_token", "second_token"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level(tmp_path_factory.mktemp("checkpoint"))


def http_request(path: str, body: dict[str, object]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(content) + content


async def aborted_once(s: Served) -> None:
    await s.dispatcher.aborted.get()
    assert s.dispatcher.running == {}
    assert s.dispatcher.yielded_tokens <= 2
    metrics = s.servers.service.metrics.exposition(s.dispatcher.snapshot()).decode()
    assert "kvrelay:num_requests_running" in metrics


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_http_client_leaves(
    folder: Path, moment: str, stream: bool, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    @in_loop
    async def run() -> None:
        async with served(folder, FakeDispatcher(gates={moment})) as s:
            asked = {"messages": [{"role": "user", "content": "a b c"}], "prompt": "a b c"}
            name = "messages" if "chat" in path else "prompt"
            body = {"model": MODEL, name: asked[name], "stream": stream}
            _, writer = await asyncio.open_connection("127.0.0.1", s.http_port)
            writer.write(http_request(path, body))
            assert await s.dispatcher.reached.get() == moment
            assert s.dispatcher.aborted.empty()
            writer.close()
            await aborted_once(s)

    with caplog.at_level(logging.WARNING):
        run()
    assert caplog.records == []


@in_loop
async def test_http_client_leaves_in_a_batch(folder: Path) -> None:
    async with served(folder, FakeDispatcher(gates={"second_token"})) as s:
        body = {"model": MODEL, "prompt": ["a b c", "d e f", "g h i"]}
        _, writer = await asyncio.open_connection("127.0.0.1", s.http_port)
        writer.write(http_request("/v1/completions", body))
        for _ in range(3):
            await s.dispatcher.reached.get()
        writer.close()
        aborted = {await s.dispatcher.aborted.get() for _ in range(3)}
        assert aborted == {request.request_id for request in s.dispatcher.requests}


def test_http_client_leaves_while_it_sends(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    @in_loop
    async def run() -> None:
        async with served(folder) as s:
            _, writer = await asyncio.open_connection("127.0.0.1", s.http_port)
            body: dict[str, object] = {"model": MODEL, "prompt": "a b c"}
            writer.write(http_request("/v1/completions", body)[:-5])
            await writer.drain()
            async with s.http() as client:
                assert (await client.get("/health")).status_code == 200
            writer.close()
            await writer.wait_closed()
            async with s.http() as client:
                assert (await client.get("/health")).status_code == 200
        assert s.dispatcher.requests == []

    with caplog.at_level(logging.WARNING):
        run()
    assert caplog.records == []


@pytest.mark.parametrize("moment", MOMENTS)
@in_loop
async def test_grpc_client_leaves(folder: Path, moment: str) -> None:
    async with (
        served(folder, FakeDispatcher(gates={moment})) as s,
        AsyncClient(s.grpc_address) as client,
    ):
        stream = client.stream([ChatMessage("user", "a b c")])
        reading = asyncio.create_task(anext(stream))
        assert await s.dispatcher.reached.get() == moment
        stream.close()
        await aborted_once(s)
        await asyncio.gather(reading, return_exceptions=True)


@in_loop
async def test_grpc_deadline_aborts(folder: Path) -> None:
    async with (
        served(folder, FakeDispatcher(gates={"first_token"})) as s,
        AsyncClient(s.grpc_address, timeout_s=2.0) as client,
    ):
        await client.server_info()  # it is connected
        with pytest.raises(RequestFailedError) as caught:
            await client.generate("a b c")
        assert caught.value.reason == "deadline_exceeded"
        await aborted_once(s)


@in_loop
async def test_stopping_the_server_ends_what_runs(folder: Path) -> None:
    async with served(folder, FakeDispatcher(gates={"second_token"})) as s:
        reader, writer = await asyncio.open_connection("127.0.0.1", s.http_port)
        body: dict[str, object] = {"model": MODEL, "prompt": "a b c", "stream": True}
        writer.write(http_request("/v1/completions", body))
        await s.dispatcher.reached.get()
        await s.servers.stop(grace_s=0)
        await aborted_once(s)
        await reader.read()
        writer.close()
