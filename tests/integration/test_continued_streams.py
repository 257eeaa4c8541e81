"""A client goes on with its stream at another router: over HTTP, and by kvrelay's own clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvrelay import AsyncClient, Client, RequestFailedError
from kvrelay.client.aio import AsyncStream
from router.core.state.generation import GenerationRequest
from router.server import HEARD_S
from tests.integration.faces_kit import Served, in_loop, served
from tests.tokenizer_fixture import byte_level
from tests.unit.fake_dispatcher import FakeDispatcher

TEXT = "the earth é 🌍 STOP and the heaven"
BODY = {"prompt": TEXT, "stream": True, "return_token_ids": True, "max_tokens": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level(tmp_path_factory.mktemp("checkpoint"))


def rest(request: GenerationRequest, choice: int) -> Sequence[int]:
    """The prompt again, without what was delivered of it."""
    done = len(request.delivered[choice]) if request.delivered else 0
    return request.prompt_ids[1 + done :]


async def events(http: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    async with http.stream("POST", "/v1/completions", json=BODY | fields) as response:
        assert response.status_code == 200, await response.aread()
        lines = [line async for line in response.aiter_lines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def text_of(told: Sequence[dict[str, Any]]) -> str:
    return "".join(one["choices"][0]["text"] for one in told)


def ids_of(told: Sequence[dict[str, Any]]) -> list[int]:
    return [i for one in told for i in one["choices"][0]["token_ids"]]


def continuation(told: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"choices": [{"token_ids": ids_of(told)}], "ticket": told[0]["ticket"]}


@pytest.mark.parametrize("stop", [None, "STOP a"])
@in_loop
async def test_wherever_it_was_cut_the_text_is_that_of_the_whole(
    folder: Path, stop: str | None
) -> None:
    """Characters of several tokens, and what may begin a stop string, are held back across it."""
    dispatcher = FakeDispatcher(script=rest)
    async with served(folder, dispatcher) as here, here.http() as http:
        whole = await events(http, stop=stop)
        for cut in range(1, len(whole)):
            before = whole[:cut]
            after = await events(http, stop=stop, continuation=continuation(before))
            assert text_of(before) + text_of(after) == text_of(whole), cut
            assert ids_of(before) + ids_of(after) == ids_of(whole)
            assert dispatcher.requests[-1].delivered == (tuple(ids_of(before)),)
            assert dispatcher.requests[-1].admitted
        first, last = dispatcher.requests[0], dispatcher.requests[-1]
        assert first.request_id == last.request_id, "that of the ticket"


@in_loop
async def test_only_routers_with_the_same_key_take_each_others_tickets(folder: Path) -> None:
    one, other = FakeDispatcher(script=rest), FakeDispatcher(script=rest)
    async with (
        served(folder, one, cluster_key=b"a") as first,
        served(folder, other, cluster_key=b"b") as second,
        first.http() as http,
        second.http() as elsewhere,
    ):
        told = (await events(http))[:3]
        await events(elsewhere, continuation=continuation(told))
        await events(http, continuation=continuation(told))
    assert not other.requests[-1].admitted
    assert one.requests[-1].admitted


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"choices": [{"token_ids": [1]}] * 2}, "n is 1"),
        ({"choices": [{"token_ids": [99_999]}]}, "vocabulary"),
        ({"choices": [{"token_ids": [1]}], "ticket": "?"}, "Base64"),
        ({"choices": [{"token_ids": [1], "finished": True}]}, "finished"),
    ],
)
@in_loop
async def test_a_bad_continuation_is_refused(folder: Path, given: dict[str, Any], why: str) -> None:
    async with served(folder) as here, here.http() as http:
        answer = await http.post("/v1/completions", json=BODY | {"continuation": given})
    assert answer.status_code == 400 and why in answer.json()["error"]["message"], answer.text


async def _stop(server: Served) -> None:
    """At once, with all that it runs."""
    await server.servers.stop(grace_s=0.0)


@in_loop
async def test_a_client_whose_router_is_silent_goes_on_elsewhere(folder: Path) -> None:
    """The first router stands still after its first token."""
    stuck = FakeDispatcher(script=rest, gates={"second_token"})
    async with served(folder, stuck) as one, served(folder, FakeDispatcher(script=rest)) as other:
        async with AsyncClient([one.grpc_address, other.grpc_address]) as client:
            stream = client.stream(TEXT, max_tokens=64)
            told = [await anext(stream)]
            assert await stuck.reached.get() == "second_token"
            await _stop(one)
            told += [chunk async for chunk in stream]
        assert "".join(chunk.text for chunk in told) == TEXT
        assert [chunk.completion_tokens for chunk in told] == list(range(1, len(told) + 1))
        (asked,) = other.dispatcher.requests
        assert asked.admitted and asked.delivered == (told[0].token_ids,)
        assert asked.sampling.seed == told[0].seed


def stuck_at(moment: str, others: int = 1) -> FakeDispatcher:
    """With so many routers beside its own that stay."""
    return FakeDispatcher(script=rest, gates={moment}, others=others)


async def text_after(first: str, stream: AsyncStream) -> str:
    return first + "".join([chunk.text async for chunk in stream])


@in_loop
async def test_a_router_that_leaves_ends_streams_that_can_go_on_and_no_others(folder: Path) -> None:
    """Its other stream ends by itself."""
    async with (
        served(folder, stuck_at("second_token")) as one,
        served(folder, FakeDispatcher(script=rest)) as other,
        AsyncClient([one.grpc_address, other.grpc_address]) as with_both,
        AsyncClient(one.grpc_address) as with_one,
    ):
        moves, stays = with_both.stream(TEXT, max_tokens=64), with_one.stream(TEXT, max_tokens=64)
        first = [(await anext(stream)).text for stream in (moves, stays)]
        assert [await one.dispatcher.reached.get() for _ in first] == ["second_token"] * 2
        leaving = asyncio.ensure_future(one.servers.stop(grace_s=600.0))
        assert await text_after(first[0], moves) == TEXT
        (asked,) = other.dispatcher.requests
        assert asked.admitted and len(asked.delivered[0]) == 1
        (running,) = one.dispatcher.running.values()
        assert not leaving.done()
        running.go_on.set()
        assert await text_after(first[1], stays) == TEXT
        await leaving


@in_loop
async def test_what_has_not_begun_is_asked_again_elsewhere(folder: Path) -> None:
    """Also a prompt that came in parts."""
    async with (
        served(folder, stuck_at("first_token")) as one,
        served(folder, FakeDispatcher(script=rest)) as other,
        AsyncClient([one.grpc_address, other.grpc_address]) as client,
    ):
        streams = [client.stream(TEXT, max_tokens=64), client.stream_input([TEXT], max_tokens=64)]
        told = [asyncio.ensure_future(text_after("", stream)) for stream in streams]
        assert [await one.dispatcher.reached.get() for _ in told] == ["first_token"] * 2
        await one.servers.stop(grace_s=600.0)
        assert [await one for one in told] == [TEXT, TEXT]
        assert [asked.delivered for asked in other.dispatcher.requests] == [(), ()]


@in_loop
async def test_threads_are_sent_on_too(folder: Path) -> None:
    async with (
        served(folder, stuck_at("second_token")) as one,
        served(folder, FakeDispatcher(script=rest)) as other,
    ):
        with Client([one.grpc_address, other.grpc_address]) as client:
            told = asyncio.ensure_future(asyncio.to_thread(client.generate, TEXT, max_tokens=64))
            assert await one.dispatcher.reached.get() == "second_token"
            await one.servers.stop(grace_s=600.0)
            assert (await told).text == TEXT
        assert other.dispatcher.requests[0].admitted


@in_loop
async def test_where_all_routers_leave_streams_stay(folder: Path) -> None:
    async with (
        served(folder, stuck_at("second_token", others=0)) as one,
        served(folder, FakeDispatcher(script=rest)) as other,
        AsyncClient([one.grpc_address, other.grpc_address]) as client,
    ):
        stream = client.stream(TEXT, max_tokens=64)
        first = (await anext(stream)).text
        assert await one.dispatcher.reached.get() == "second_token"
        leaving = asyncio.ensure_future(one.servers.stop(grace_s=600.0))
        while one.dispatcher.asked_for_others < 3:
            await asyncio.sleep(0.01)
        (running,) = one.dispatcher.running.values()
        running.go_on.set()
        assert await text_after(first, stream) == TEXT
        await leaving
        assert one.dispatcher.has_left and not other.dispatcher.requests


@in_loop
async def test_what_can_not_go_on_is_cut_at_the_end(folder: Path) -> None:
    async with (
        served(folder, stuck_at("second_token")) as one,
        AsyncClient(one.grpc_address) as client,
    ):
        stream = client.stream(TEXT, max_tokens=64)
        await anext(stream)
        assert await one.dispatcher.reached.get() == "second_token"
        await one.servers.stop(grace_s=HEARD_S + 0.3)
        with pytest.raises(RequestFailedError) as cut:
            await text_after("", stream)
        assert cut.value.reason == "unavailable"
