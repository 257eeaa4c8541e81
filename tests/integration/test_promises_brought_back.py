"""What a refusal promises, its client brings back: by itself, or in a header, to any router."""

from __future__ import annotations

import asyncio
from base64 import b64decode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from kvrelay import AsyncClient, Client, Refused
from router.core.promises.work import Promised, ToldPromise
from router.core.state.generation import RefusedUntil
from tests.integration.faces_kit import Served, in_loop, served
from tests.integration.http_kit import TEXT, completion
from tests.integration.http_kit import checkpoint_folder as checkpoint_folder
from tests.unit.fake_dispatcher import FakeDispatcher

TOLD = ToldPromise(promise_id=7, due_in_s=0.2, work=Promised(prefill_s=1, sequences=1))
HEADER = "x-kvrelay-promise"


def refusing(times: int) -> FakeDispatcher:
    refusal = RefusedUntil("slots_exhausted", "not now", told=TOLD)
    return FakeDispatcher(refusal=refusal, refusals_left=times)


@asynccontextmanager
async def two(folder: Path, *keys: str) -> AsyncIterator[tuple[Served, Served]]:
    """The first one refuses."""
    one, other = keys
    async with (
        served(folder, refusing(-1), cluster_key=one.encode()) as first,
        served(folder, cluster_key=other.encode()) as second,
    ):
        yield first, second


async def refused(router: Served) -> httpx.Response:
    async with router.http() as client:
        answer = await completion(client)
    assert answer.status_code == 429
    return answer


@in_loop
async def test_clients_bring_it_back_by_themselves(folder: Path) -> None:
    async with served(folder, refusing(1)) as s:
        async with AsyncClient(s.grpc_address) as client:
            await client.generate(TEXT, retries=1)
        s.dispatcher.refusals_left = 1
        with Client(s.grpc_address) as threads:
            await asyncio.to_thread(threads.generate, TEXT, retries=1)
        brought = [request.promise for request in s.dispatcher.requests]
    assert brought[0] is None and brought[2] is None
    for promise in (brought[1], brought[3]):
        assert promise is not None
        assert (promise.promise_id, promise.work) == (TOLD.promise_id, TOLD.work)
        assert -1 < promise.due_in_s < 0.05, "it is due"


@in_loop
async def test_a_refusal_without_one_leaves_the_one_before(folder: Path) -> None:
    """A router that stops promises nothing: another one may honour what the first did."""
    async with served(folder, refusing(1)) as s, AsyncClient(s.grpc_address) as client:
        running = asyncio.ensure_future(client.generate(TEXT, retries=2))
        while not s.dispatcher.requests:
            await asyncio.sleep(0.01)
        s.dispatcher.refusal = Refused("draining", "not now", retry_after_s=0.01)
        s.dispatcher.refusals_left = 1
        await running
        told = [request.promise is not None for request in s.dispatcher.requests]
    assert told == [False, True, True]


@in_loop
async def test_over_http_any_router_with_the_same_key_takes_it(folder: Path) -> None:
    async with two(folder, "a", "a") as (one, other), other.http() as client:
        answer = await refused(one)
        token = answer.headers[HEADER]
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "code", "param", "promise"}
        assert error["promise"] == token and b64decode(token)
        assert answer.headers["retry-after-ms"] == "200"
        body = {"prompt": TEXT}
        for changes in ({}, {"prompt": "else"}, {"max_tokens": 3}):
            sent = {HEADER: token}
            answer = await client.post("/v1/completions", json=body | changes, headers=sent)
            assert answer.status_code == 200
        brought = [request.promise for request in other.dispatcher.requests]
    assert brought[0] is not None and brought[0].promise_id == TOLD.promise_id
    assert brought[1:] == [None, None], "it was made to another request"


@pytest.mark.parametrize("token", ["", "?", "aGVsbG8=", None])
@in_loop
async def test_what_no_router_of_the_cluster_has_made_is_ignored(
    folder: Path, token: str | None
) -> None:
    async with two(folder, "a", "b") as (one, other), other.http() as client:
        token = (await refused(one)).headers[HEADER] if token is None else token
        answer = await client.post(
            "/v1/completions", json={"prompt": TEXT}, headers={HEADER: token}
        )
        assert answer.status_code == 200
        assert other.dispatcher.requests[-1].promise is None
