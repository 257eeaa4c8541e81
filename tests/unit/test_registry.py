"""Workers that were started with --join, as the router's registry sees them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc

from cluster.router.process import RegistryService
from kvrelay.v1 import worker_pb2 as pb


class Recorder:
    """Only what the registry asks of a dispatcher."""

    def __init__(self) -> None:
        self.addresses: set[str] = set()

    def add_worker(self, address: str) -> None:
        self.addresses.add(address)

    async def remove_worker(self, address: str) -> None:
        self.addresses.discard(address)


class RegisterCall:
    """One Register call, open until `end`."""

    def __init__(
        self, service: RegistryService, address: str, *, routers: tuple[str, ...] = ()
    ) -> None:
        self._over = asyncio.Event()
        self.said = asyncio.Event()
        self.refused = ""
        request = pb.RegisterRequest(address=address, routers=routers)
        self._task = asyncio.ensure_future(service.Register(self._requests(request), self))  # type: ignore[arg-type]

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        """As the context of a call."""
        self.refused = details
        self.said.set()

    async def _requests(self, request: pb.RegisterRequest) -> AsyncIterator[pb.RegisterRequest]:
        yield request
        self.said.set()
        await self._over.wait()

    async def end(self) -> None:
        self._over.set()
        await self._task


def test_a_worker_is_there_while_any_of_its_calls_is_open() -> None:
    async def scene() -> None:
        dispatcher = Recorder()
        service = RegistryService(dispatcher)  # type: ignore[arg-type]
        old = RegisterCall(service, "host:1", routers=("a:1", "b:1"))
        await old.said.wait()
        new = RegisterCall(service, "host:1")  # its connection broke; the router has not noticed
        await new.said.wait()
        await old.end()
        assert dispatcher.addresses == {"host:1"}
        await new.end()
        assert not dispatcher.addresses
        assert not service._calls

    asyncio.run(scene())


def test_a_router_that_must_be_the_only_one_takes_no_worker_that_joins_others() -> None:
    async def scene() -> None:
        dispatcher = Recorder()
        service = RegistryService(dispatcher, only_router=True)  # type: ignore[arg-type]
        of_two = RegisterCall(service, "host:1", routers=("a:1", "b:1"))
        await of_two.end()
        assert of_two.refused == (
            "router.dispatch: shared_queue is for one router, and the worker at host:1 joins a:1, "
            "b:1: give it one --join, or set router.dispatch: direct"
        )
        assert not dispatcher.addresses
        of_one = RegisterCall(service, "host:1", routers=("a:1", "a:1"))
        await of_one.said.wait()
        assert dispatcher.addresses == {"host:1"}
        await of_one.end()
        assert not of_one.refused

    asyncio.run(scene())
