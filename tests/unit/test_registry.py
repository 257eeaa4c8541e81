"""Workers that were started with --join, as the router's registry sees them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from cluster.router import RegistryService
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

    def __init__(self, service: RegistryService, address: str) -> None:
        self._over = asyncio.Event()
        self.said = asyncio.Event()
        self._task = asyncio.ensure_future(service.Register(self._requests(address), None))  # type: ignore[arg-type]

    async def _requests(self, address: str) -> AsyncIterator[pb.RegisterRequest]:
        yield pb.RegisterRequest(address=address)
        self.said.set()
        await self._over.wait()

    async def end(self) -> None:
        self._over.set()
        await self._task


def test_a_worker_is_there_while_any_of_its_calls_is_open() -> None:
    async def scene() -> None:
        dispatcher = Recorder()
        service = RegistryService(dispatcher)  # type: ignore[arg-type]
        old = RegisterCall(service, "host:1")
        await old.said.wait()
        new = RegisterCall(service, "host:1")  # its connection broke; the router has not noticed
        await new.said.wait()
        await old.end()
        assert dispatcher.addresses == {"host:1"}
        await new.end()
        assert not dispatcher.addresses
        assert not service._calls

    asyncio.run(scene())
