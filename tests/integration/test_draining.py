"""A router that stops: what runs goes on, what is new is refused in words, then the ports close."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvrelay import AsyncClient
from kvrelay.errors import Refused
from tests.integration.faces_kit import in_loop, served
from tests.integration.http_kit import checkpoint_folder as checkpoint_folder
from tests.unit.fake_dispatcher import FakeDispatcher

BODY = {"prompt": "the earth and the sky", "max_tokens": 4}


async def begin(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher
) -> asyncio.Task[httpx.Response]:
    """One answer that has begun, and goes on until it is aborted."""
    task = asyncio.ensure_future(http.post("/v1/completions", json=BODY))
    assert await dispatcher.reached.get() == "second_token"
    return task


@in_loop
async def test_new_requests_are_refused_while_old_ones_run(folder: Path) -> None:
    dispatcher = FakeDispatcher(gates={"second_token"})
    async with served(folder, dispatcher) as s, s.http() as http:
        running = await begin(http, dispatcher)
        stopping = asyncio.ensure_future(s.servers.stop(grace_s=30.0))
        while not s.servers.service.draining:
            await asyncio.sleep(0)

        async with httpx.AsyncClient(base_url=s.url, trust_env=False) as newcomer:
            refused = await newcomer.post("/v1/completions", json=BODY)
            ready = await newcomer.get("/ready")
        assert refused.status_code == 429, refused.text
        assert refused.json()["error"]["code"] == "draining"
        assert float(refused.headers["retry-after-ms"]) > 0
        assert (ready.status_code, "this router is stopping" in ready.text) == (503, True)
        async with AsyncClient(s.grpc_address) as client:
            with pytest.raises(Refused) as told:
                await client.generate("the earth")
        assert told.value.reason == "draining"
        assert await health(s.grpc_address) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert not running.done()
        assert not stopping.done()

        dispatcher.abort(next(iter(dispatcher.running)))
        await stopping
        await running
        with pytest.raises(httpx.ConnectError):
            await http.get("/health")


@in_loop
async def test_who_watches_its_health_does_not_keep_a_router_from_stopping(folder: Path) -> None:
    grace_s = 300.0
    async with served(folder) as s, grpc.aio.insecure_channel(s.grpc_address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        await s.servers.stop(grace_s)


@in_loop
async def test_what_runs_too_long_is_cut(folder: Path) -> None:
    dispatcher = FakeDispatcher(gates={"second_token"})
    async with served(folder, dispatcher) as s, s.http() as http:
        running = await begin(http, dispatcher)
        await s.servers.stop(grace_s=0.1)
        await asyncio.gather(running, return_exceptions=True)
        assert not dispatcher.running


async def health(address: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        asked = health_pb2.HealthCheckRequest()
        answer = await health_pb2_grpc.HealthStub(channel).Check(asked)
        return int(answer.status)
