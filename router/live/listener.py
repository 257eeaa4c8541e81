"""One address where a router listens: HTTP by an embedded uvicorn, and gRPC on a second port.

A router has two of them, the public one and the internal one. Runs in the router's event loop. A
port that can't be opened is an error that says why.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
import uvicorn
from starlette.types import ASGIApp

from kvrelay.access.tls import HttpTls, add_port
from kvrelay.access.values import TlsFiles
from kvrelay.errors import ConfigError
from router.live.http_protocol import HttpBounds, bounded_protocol

BACKLOG = 2048


def listen(kind: str, host: str, port: int) -> socket.socket:
    """`kind` names the port as its key does, such as internal HTTP. Raises ConfigError with the
    system's reason."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's delay off only on sockets that say they are TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _refusal(kind, bracketed(host, port), error) from error
    listener.setblocking(False)
    return listener


def bracketed(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _refusal(kind: str, address: str, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        key = f"router.{kind.lower().replace(' ', '_')}_port"
        return ConfigError(
            f"the {kind} port {address} is in use: set {key} to another, or to 0 for any"
        )
    return ConfigError(f"the {kind} port {address}: {error.strerror}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    http: int
    grpc: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenAt:
    """Port 0: the system chooses. Errors name a port by `kind`."""

    host: str
    ports: Ports
    kind: str = ""
    tls: TlsFiles | None = None
    bounds: HttpBounds = field(default_factory=HttpBounds)


class EmbeddedUvicorn(uvicorn.Server):
    """Leaves signals to the process that embeds it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Listener:
    """`bind` and then `start`, once; `stop` undoes either of them."""

    def __init__(self, at: ListenAt, app: ASGIApp, server: grpc.aio.Server) -> None:
        self._at = at
        self._grpc = server
        self._http = EmbeddedUvicorn(_uvicorn_config(app, at.bounds))
        self._http.config.load()
        self._http.config.ssl = None if at.tls is None else HttpTls(at.tls)
        self._socket: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None

    def bind(self) -> Ports:
        """Raises ConfigError, and binds nothing, when a port is busy."""
        at = self._at
        listener = listen(f"{at.kind}HTTP", at.host, at.ports.http)
        try:
            grpc_port = self._bind_grpc()
        except BaseException:
            listener.close()
            raise
        self._socket = listener
        return Ports(http=listener.getsockname()[1], grpc=grpc_port)

    async def start(self) -> None:
        assert self._socket is not None, "bound"
        await self._grpc.start()
        self._serving = asyncio.create_task(self._http.serve(sockets=[self._socket]))
        while not self._http.started:
            if self._serving.done():
                await self._serving
            await asyncio.sleep(0.001)

    async def stop(self, grace_s: float) -> None:
        """Accepts no new requests, lets running ones finish for `grace_s`, then aborts them."""
        if self._serving is None:
            if self._socket is not None:
                self._socket.close()
            await self._grpc.stop(None)
            return
        self._http.config.timeout_graceful_shutdown = math.ceil(grace_s)
        self._http.should_exit = True
        await asyncio.gather(self._grpc.stop(grace_s), self._serving, return_exceptions=True)
        if self._http.server_state.tasks:
            await asyncio.wait(self._http.server_state.tasks)

    def _bind_grpc(self) -> int:
        kind, at = f"{self._at.kind}gRPC", self._at
        listen(kind, at.host, at.ports.grpc).close()  # gRPC itself gives no reason
        address = bracketed(at.host, at.ports.grpc)
        try:
            return add_port(self._grpc, address, at.tls)
        except RuntimeError as error:
            raise ConfigError(f"the {kind} port {address}: {error}") from error


def _is_no_cut(record: logging.LogRecord) -> bool:
    """A stream that has failed is cut on purpose; who failed it has logged why."""
    return record.msg != "ASGI callable returned without completing response."


def _uvicorn_config(app: ASGIApp, bounds: HttpBounds) -> uvicorn.Config:
    logging.getLogger("uvicorn.error").addFilter(_is_no_cut)
    return uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        http=bounded_protocol(bounds),
        ws="none",
    )
