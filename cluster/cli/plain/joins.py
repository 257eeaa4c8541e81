"""How a plain worker or pool node stays registered at its routers, for as long as it runs.

`dns:NAME:PORT` stands for every address that the name has, now and later, such as the pods behind a
headless Service of Kubernetes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from functools import partial

import grpc

from cluster.process.admin import NOT_INTERNAL
from cluster.process.net import host_towards, registration_options, split_address
from kvrelay.access.tls import aio_channel
from kvrelay.access.values import Access
from kvrelay.errors import ConfigError
from kvrelay.v1.worker_pb2 import RegisterRequest
from kvrelay.v1.worker_pb2_grpc import RegistryStub

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.2
LAST_RETRY_S = 5.0
LOOK_UP_S = 2.0
DNS = "dns:"


def own_host(given: str | None, join: Sequence[str]) -> str:
    """The address to listen on: `given`, or this machine's on the way to the routers. Raises
    ConfigError."""
    for address in join:
        split_address(address.removeprefix(DNS), "--join")
    return given or host_towards([address.removeprefix(DNS) for address in join])


def registrations(
    join: Sequence[str], request: RegisterRequest, access: Access
) -> list[Coroutine[None, None, None]]:
    """Each runs for ever. Raises ConfigError when no worker can join there."""
    return [
        _follow(address.removeprefix(DNS), request, access)
        if address.startswith(DNS)
        else stay_registered(address, request, access)
        for address in join
    ]


async def _follow(name: str, request: RegisterRequest, access: Access) -> None:
    """Registers at each address that the name has. One that it has no more is let go when its call
    ends, not before: a router that stops still serves its requests."""
    known: set[str] = set()
    joined: dict[str, asyncio.Task[None]] = {}
    try:
        while True:
            if found := await _addresses(name):
                known.intersection_update(found)
                known.update(found)
            for address in sorted(known - joined.keys()):
                named, is_wanted = _naming(request, known), partial(known.__contains__, address)
                joining = stay_registered(address, named, access, is_wanted)
                joined[address] = asyncio.create_task(joining)
            await asyncio.sleep(LOOK_UP_S)
            _forget_done(joined)
    finally:
        for task in joined.values():
            task.cancel()


def _naming(request: RegisterRequest, routers: Iterable[str]) -> RegisterRequest:
    named = RegisterRequest()
    named.CopyFrom(request)
    named.routers[:] = sorted(routers)
    return named


def _forget_done(joined: dict[str, asyncio.Task[None]]) -> None:
    """Raises what one of them has raised."""
    for address in [address for address, task in joined.items() if task.done()]:
        joined.pop(address).result()


def addresses_of(join: Iterable[str]) -> list[str]:
    """HOST:PORT of all routers, now. Raises ConfigError for a name that nobody knows."""
    found: list[str] = []
    for address in join:
        if not address.startswith(DNS):
            found.append(address)
            continue
        host, port = split_address(address.removeprefix(DNS), "--join")
        try:
            known = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ConfigError(f"--join {address}: {error}") from None
        found += sorted({_text(one) for *_, one in known})
    return found


async def _addresses(name: str) -> frozenset[str]:
    """HOST:PORT of each address; none where the name is not known, at present."""
    host, port = split_address(name, "--join")
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        log.debug("%s: %s", name, error)
        return frozenset()
    return frozenset(_text(address) for *_, address in found)


def _text(address: tuple[object, ...]) -> str:
    host, port = str(address[0]), address[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _always() -> bool:
    return True


async def stay_registered(
    join: str,
    request: RegisterRequest,
    access: Access,
    is_wanted: Callable[[], bool] = _always,
) -> None:
    """Keeps the registration call open, and opens it again while it `is_wanted`; the router drops
    the process when the call ends. A router that is silent has ended it too: its host may have been
    started anew. Logs once why a router doesn't accept it, not at each try."""
    retry_s, told = FIRST_RETRY_S, ""
    while is_wanted():
        joined, reason = await _register(join, request, access)
        if reason and is_wanted() and (joined or reason != told):
            log.warning("router %s: %s; trying again until it answers", join, reason)
        told = reason
        retry_s = FIRST_RETRY_S if joined else min(2 * retry_s, LAST_RETRY_S)
        await asyncio.sleep(retry_s)


async def _register(join: str, request: RegisterRequest, access: Access) -> tuple[bool, str]:
    """(whether the router accepted it, why the call has ended). Raises ConfigError when no worker
    can join at this address."""
    joined, ended, reason = asyncio.Event(), asyncio.Event(), ""

    async def registration() -> AsyncIterator[RegisterRequest]:
        yield request
        joined.set()
        await ended.wait()

    async with aio_channel(join, access.dials, registration_options()) as channel:
        try:
            await RegistryStub(channel).Register(registration(), metadata=access.metadata)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise ConfigError(f"--join {join}: {NOT_INTERNAL}") from None
            reason = error.details() or error.code().name
        finally:
            ended.set()
    return joined.is_set(), reason
