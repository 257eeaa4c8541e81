"""A client goes on with its stream at another router: over HTTP, and by kvrelay's own clients."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvrelay import AsyncClient
from router.core.state.generation import GenerationRequest
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
