"""Real HTTP and gRPC servers over the in-memory dispatcher."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import openai
import uvloop

from router.server import RouterServers, ServerOptions
from router.text.tokenizer import TextTokenizer
from tests.access import ACCESS, HEADERS
from tests.unit.fake_dispatcher import FakeDispatcher

MODEL = "tiny"
LIMIT_S = 30.0


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs an async test in a loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def bounded() -> None:
            await asyncio.wait_for(test(*args, **kwargs), LIMIT_S)

        uvloop.run(bounded())

    return run


def server_options(**changes: Any) -> ServerOptions:
    plain = ServerOptions(
        host="127.0.0.1",
        http_port=0,
        grpc_port=0,
        max_body_bytes=2**20,
        cluster="test",
        access=ACCESS,
    )
    return replace(plain, **changes)


@dataclass
class Served:
    servers: RouterServers
    dispatcher: FakeDispatcher
    url: str
    http_port: int
    grpc_address: str
    internal_url: str
    internal_grpc: str

    @asynccontextmanager
    async def http(self) -> AsyncIterator[httpx.AsyncClient]:
        async with httpx.AsyncClient(base_url=self.url, timeout=LIMIT_S, trust_env=False) as client:
            yield client

    async def get_internal(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient(
            base_url=self.internal_url, headers=HEADERS, timeout=LIMIT_S
        ) as client:
            return await client.get(path)

    @asynccontextmanager
    async def openai(self) -> AsyncIterator[openai.AsyncOpenAI]:
        async with openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0
        ) as client:
            yield client


def servers_over(dispatcher: FakeDispatcher, folder: Path, **options: Any) -> RouterServers:
    tokenizer = TextTokenizer.load(folder)
    return RouterServers(dispatcher, folder, tokenizer, MODEL, server_options(**options))


@asynccontextmanager
async def served(
    folder: Path, dispatcher: FakeDispatcher | None = None, **options: Any
) -> AsyncIterator[Served]:
    dispatcher = dispatcher or FakeDispatcher()
    servers = servers_over(dispatcher, folder, **options)
    public, internal = await servers.start()
    url = f"http://127.0.0.1:{public.http}"
    internal_url = f"http://127.0.0.1:{internal.http}"
    try:
        yield Served(
            servers,
            dispatcher,
            url,
            public.http,
            f"127.0.0.1:{public.grpc}",
            internal_url,
            f"127.0.0.1:{internal.grpc}",
        )
    finally:
        await servers.stop(grace_s=1.0)
        assert not dispatcher.running, "a request is still running after the server stopped"
