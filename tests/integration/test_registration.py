"""A plain worker's registration: it lasts while nothing is said, and comes back to a new router."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest

from cluster.cli.plain import joins
from cluster.cli.plain.joins import registrations, stay_registered
from cluster.process import net
from kvrelay.v1.worker_pb2 import RegisterRequest
from tests.access import ACCESS
from tests.integration.split_kit import RouterThread, wait_until

NOWHERE = "127.0.0.1:9"
"""The address of a worker that is not there."""


class Network:
    """Forwards connections to `port`, until the host behind them vanishes."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.connections = 0
        self._hole = 0  # connections up to this one lead nowhere
        self._writers: list[asyncio.StreamWriter] = []

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[int]:
        """The port to connect to."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            for writer in self._writers:
                writer.close()
            await asyncio.gather(*(w.wait_closed() for w in self._writers), return_exceptions=True)

    def host_vanishes(self) -> None:
        """Open connections stay open, and nothing comes through."""
        self._hole = self.connections

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number = self.connections
        theirs, ours = await asyncio.open_connection("127.0.0.1", self.port)
        self._writers += [writer, ours]
        with suppress(OSError):
            pumps = (self._pump(number, reader, ours), self._pump(number, theirs, writer))
            await asyncio.gather(*pumps)

    async def _pump(
        self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(65536):
            if number > self._hole:
                writer.write(data)
        if number > self._hole:
            writer.close()


@contextmanager
def registered(network: Network) -> Iterator[None]:
    """A worker that joins through the network, in a thread of its own."""
    ends = threading.Event()

    async def join() -> None:
        async with network.serving() as port:
            request = RegisterRequest(address=NOWHERE)
            joining = asyncio.create_task(stay_registered(f"127.0.0.1:{port}", request, ACCESS))
            await asyncio.to_thread(ends.wait)
            joining.cancel()
            await asyncio.gather(joining, return_exceptions=True)

    thread = threading.Thread(target=asyncio.run, args=(join(),))
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def knows(router: RouterThread) -> Callable[[], bool]:
    return lambda: NOWHERE in router.process.dispatcher._links


def test_a_worker_comes_back_to_a_router_whose_host_was_switched_off(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(net, "REGISTERED_PING_MS", 1_100)
    monkeypatch.setattr(net, "REGISTERED_PATIENCE_MS", 1_000)
    before, after = RouterThread(llama), RouterThread(llama)
    network = Network(before.address.internal.grpc)
    try:
        with registered(network):
            wait_until(knows(before), "the worker has joined")
            time.sleep(8.0)
            assert knows(before)() and network.connections == 1, "pings are allowed"
            network.port = after.address.internal.grpc
            network.host_vanishes()
            vanished_s = time.monotonic()
            wait_until(knows(after), "it has joined the new router", 15.0)
            print(f"back after {time.monotonic() - vanished_s:.1f} s")
    finally:
        before.close()
        after.close()


@contextmanager
def following(name: str) -> Iterator[None]:
    """A worker that joins all routers of a name, in a thread of its own."""
    ends = threading.Event()

    async def join() -> None:
        request = RegisterRequest(address=NOWHERE)
        (joining,) = map(asyncio.ensure_future, registrations([f"dns:{name}"], request, ACCESS))
        await asyncio.to_thread(ends.wait)
        joining.cancel()
        await asyncio.gather(joining, return_exceptions=True)

    thread = threading.Thread(target=asyncio.run, args=(join(),))
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def test_a_worker_joins_every_router_that_a_name_has_now_and_later(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    routers = [RouterThread(llama) for _ in range(3)]
    named: list[int] = []
    looked_up = socket.getaddrinfo

    def answer(host: str, *rest: object, **more: object) -> list[object]:
        if host != "routers.example":
            return looked_up(host, *rest, **more)  # type: ignore[arg-type,return-value]
        if not named:
            raise socket.gaierror(socket.EAI_NONAME, "not known")
        ports = [routers[number].address.internal.grpc for number in named]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", p)) for p in ports]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    monkeypatch.setattr(joins, "LOOK_UP_S", 0.05)
    first, second, third = routers
    try:
        with following("routers.example:50951"):
            named[:] = [0, 1]
            wait_until(lambda: knows(first)() and knows(second)(), "it has joined both")
            named[:] = [1, 2]
            wait_until(knows(third), "it has joined the new one")
            assert knows(first)(), "one that stops still serves"
            named.clear()
            first.close()
            time.sleep(0.3)
            assert knows(second)() and knows(third)(), "a name server that is away changes nothing"
        wait_until(lambda: not knows(second)() and not knows(third)(), "it has left")
    finally:
        for router in (second, third):
            router.close()
