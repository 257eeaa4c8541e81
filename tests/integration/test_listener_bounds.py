"""What a client may send beside a body, and how slowly: over sockets, to a real listener."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import pytest

from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc
from router.grpc_api.server import METADATA_BYTES
from router.http import json_body
from router.live.http_protocol import HttpBounds
from tests.integration.faces_kit import Served, in_loop, served
from tests.unit.fake_dispatcher import FakeDispatcher

from .http_kit import checkpoint_folder  # noqa: F401

QUICK = HttpBounds(header_s=0.3, unread_s=0.3)
GET = b"GET /health HTTP/1.1\r\nhost: a\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n"


@asynccontextmanager
async def connected(
    server: Served, keeps: int = 1 << 20
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """The system keeps so many bytes that the client hasn't read."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, keeps)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", server.http_port))
    reader, writer = await asyncio.open_connection(sock=client)
    try:
        yield reader, writer
    finally:
        writer.close()


async def said(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """The status and the error of an answer after which the connection is closed."""
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


async def answer_to(server: Served, *sent: bytes) -> tuple[int, dict[str, str]]:
    async with connected(server) as (reader, writer):
        for part in sent:
            writer.write(part)
            try:
                await writer.drain()
            except ConnectionError:
                break
        return await said(reader)


@in_loop
async def test_a_header_block_over_its_bound_is_refused(folder: Path) -> None:
    async with served(folder) as server:
        for sent in (
            [GET, b"x-a: " + b"a" * 70_000 + b"\r\n\r\n"],
            [GET, *[b"x-%d: %s\r\n" % (i, b"a" * 700) for i in range(100)], b"\r\n"],
            [b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n"],
            [GET, b"x-a: ", *[b"a" * 10_000] * 7],
        ):
            status, error = await answer_to(server, *sent)
            assert (status, error["code"]) == (431, "header_too_large")
            assert "65536 bytes" in error["message"]
        many = b"".join(b"x-%d: 1\r\n" % i for i in range(130))
        status, error = await answer_to(server, GET + many + b"\r\n")
        assert (status, error["message"]) == (431, "131 headers exceed the limit of 128")


@in_loop
async def test_the_headers_behind_a_body_count_too(folder: Path) -> None:
    """Its client still sends, so the refusal may get lost with the connection."""
    async with served(folder) as server, connected(server) as (reader, writer):
        writer.write(POST + b"transfer-encoding: chunked\r\n\r\n0\r\nx-a: ")
        with suppress(ConnectionError):
            for _ in range(60):
                writer.write(b"a" * 10_000)
                await writer.drain()
            assert (await said(reader))[0] == 431


@in_loop
async def test_a_header_block_just_within_its_bound_is_served(folder: Path) -> None:
    async with served(folder) as server, server.http() as client:
        answer = await client.get("/health", headers={"x-a": "a" * 64_000})
        assert answer.status_code == 200


@in_loop
async def test_what_is_no_http_has_the_shape_of_every_error(folder: Path) -> None:
    async with served(folder) as server:
        status, error = await answer_to(server, b"HELLO\r\n\r\n")
        assert (status, error["type"]) == (400, "invalid_request_error")


@in_loop
async def test_pipelined_requests_have_a_bound(folder: Path) -> None:
    """Those within it are answered in turn; more of them cost the connection."""
    async with served(folder) as server:
        async with connected(server) as (reader, writer):
            last = GET + b"connection: close\r\n\r\n"
            writer.write((GET + b"\r\n") * 15 + last)
            assert (await reader.read()).count(b"200 OK") == 16
        async with connected(server) as (reader, writer):
            writer.write((GET + b"\r\n") * 5_000)
            with suppress(ConnectionError):
                await writer.drain()
                assert (await reader.read()).count(b"200 OK") <= 17
        async with server.http() as client:
            assert (await client.get("/health")).status_code == 200


@in_loop
async def test_half_open_connections_go_away_after_the_header_time(folder: Path) -> None:
    """Silent ones, those within a header block, and those that have been answered before."""
    async with served(folder, bounds=QUICK) as server:
        opened = [await asyncio.open_connection("127.0.0.1", server.http_port) for _ in range(200)]
        for position, (_, writer) in enumerate(opened):
            writer.write((b"", b"G", GET, GET + b"\r\n")[position % 4])
        ends = [await reader.read() for reader, _ in opened]
        assert {end[9:12] for end in ends[0::4]} == {b""}
        assert {end[9:12] for end in ends[1::4] + ends[2::4]} == {b"408"}
        assert {end[9:12] for end in ends[3::4]} == {b"200"}
        for _, writer in opened:
            writer.close()


@in_loop
async def test_a_client_whose_requests_come_in_time_stays_connected(folder: Path) -> None:
    async with (
        served(folder, bounds=HttpBounds(header_s=1.0)) as server,
        connected(server) as (reader, writer),
    ):
        for _ in range(4):
            await asyncio.sleep(0.4)
            writer.write(GET + b"\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            await reader.readexactly(len(b'{"status":"ok"}'))


@in_loop
async def test_connections_over_the_bound_are_refused(folder: Path) -> None:
    async with served(folder, bounds=HttpBounds(connections=2)) as server:
        async with connected(server) as (_, first), connected(server):
            status, error = await answer_to(server)
            assert (status, error["code"]) == (503, "too_many_connections")
            first.close()
            await first.wait_closed()
        async with server.http() as client:
            assert (await client.get("/health")).status_code == 200


@in_loop
async def test_a_body_that_does_not_come_is_given_up(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_body, "BODY_S", 0.2)
        async with served(folder) as server, connected(server) as (reader, writer):
            writer.write(POST + b'content-length: 100\r\n\r\n{"prompt"')
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 408")
            assert b"has not come within 0.2 s" in await reader.read(1000)


@in_loop
async def test_a_client_that_reads_nothing_is_dropped(folder: Path) -> None:
    """The answer is larger than what the system keeps for a connection."""
    dispatcher = FakeDispatcher(script=lambda request, choice: [300] * 500)
    body = json.dumps({"prompt": "the", "n": 100, "stream": True, "logprobs": 20}).encode()
    async with served(folder, dispatcher, bounds=QUICK) as server:
        async with connected(server, keeps=4096) as (_, writer):
            transport = writer.transport
            transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(POST + b"content-length: %d\r\n\r\n" % len(body) + body)
            await dispatcher.aborted.get()
        assert not dispatcher.running


@in_loop
async def test_grpc_metadata_over_its_bound_is_refused(folder: Path) -> None:
    async with served(folder) as server:
        options = [("grpc.max_metadata_size", 1 << 20)]
        async with grpc.aio.insecure_channel(server.grpc_address, options=options) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            big = (("x-a", "a" * (METADATA_BYTES + 100)),)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=big)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            await stub.GetModelInfo(pb.GetModelInfoRequest())
