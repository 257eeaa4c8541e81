"""Clients that know several routers: one that is gone costs them nothing but a try."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvrelay import AsyncClient, Client, Refused, RequestFailedError
from tests.integration.faces_kit import Served, in_loop, served
from tests.tokenizer_fixture import byte_level
from tests.unit.fake_dispatcher import FakeDispatcher

TEXT = "the earth and the heaven"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level(tmp_path_factory.mktemp("checkpoint"))


def nobody() -> str:
    """An address where no one listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@asynccontextmanager
async def two(folder: Path) -> AsyncIterator[tuple[Served, Served]]:
    async with served(folder) as one, served(folder) as other:
        yield one, other


@in_loop
async def test_the_first_router_is_used_while_it_is_there(folder: Path) -> None:
    async with two(folder) as (one, other):
        async with AsyncClient([one.grpc_address, other.grpc_address]) as client:
            for _ in range(3):
                assert (await client.generate(TEXT)).text == TEXT
        assert (len(one.dispatcher.requests), len(other.dispatcher.requests)) == (3, 0)


@in_loop
async def test_the_next_is_tried_when_one_is_gone_and_then_kept(folder: Path) -> None:
    async with served(folder) as other:
        async with served(folder) as one:
            client = AsyncClient([one.grpc_address, nobody(), other.grpc_address])
            await client.generate(TEXT)
        assert (await client.generate(TEXT, retries=1)).text == TEXT
        assert client._routers.current == 2
        assert (await client.server_info()).ready
        await client.close()
        assert (len(one.dispatcher.requests), len(other.dispatcher.requests)) == (1, 1)


@in_loop
async def test_threads_go_on_too(folder: Path) -> None:
    async with served(folder) as alive:
        with Client([nobody(), alive.grpc_address]) as client:
            info = await asyncio.to_thread(client.server_info)
            assert info.ready
        with Client([nobody(), alive.grpc_address]) as client:
            assert (await asyncio.to_thread(client.generate, TEXT)).text == TEXT
        with Client([nobody(), nobody()]) as client:
            with pytest.raises(RequestFailedError) as caught:
                await asyncio.to_thread(client.generate, TEXT)
            assert caught.value.reason == "unavailable"


@in_loop
async def test_a_refusal_is_no_reason_to_ask_another(folder: Path) -> None:
    full = FakeDispatcher(refusal=Refused("no_capacity", "not now", retry_after_s=0.05))
    async with served(folder, full) as one, served(folder) as other:
        async with AsyncClient([one.grpc_address, other.grpc_address]) as client:
            with pytest.raises(Refused, match="not now"):
                await client.generate(TEXT, retries=1)
        assert (len(full.requests), len(other.dispatcher.requests)) == (2, 0)


@in_loop
async def test_an_abort_finds_its_request_wherever_it_runs(folder: Path) -> None:
    held = FakeDispatcher(gates={"first_token"})
    async with served(folder) as one, served(folder, held) as other:
        addresses = [one.grpc_address, other.grpc_address]
        async with AsyncClient(addresses) as client, AsyncClient(addresses[1]) as second:
            running = asyncio.ensure_future(second.generate(TEXT, request_id="mine"))
            assert await held.reached.get() == "first_token"
            await client.abort("mine")
            with pytest.raises(RequestFailedError, match="abort"):
                await running
