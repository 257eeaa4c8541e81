"""TLS of gRPC servers, HTTP servers and gRPC clients, from PEM files.

A server looks at its files when a connection begins, and takes them anew when they have changed.
Connections that are open go on. Files that don't fit together, as while they are being replaced,
change nothing until they do.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import grpc

from kvrelay.access.values import Tls, TlsFiles
from kvrelay.errors import ConfigError

log = logging.getLogger(__name__)

Made = TypeVar("Made")
_Stamp = tuple[tuple[int, int, int], ...]
ChannelOptions = Sequence[tuple[str, object]]


class Reloaded(Generic[Made]):
    """What is made of the files, made again after they have changed. For any thread."""

    def __init__(self, files: TlsFiles, make: Callable[[TlsFiles], Made]) -> None:
        """Raises ConfigError that names the files."""
        self._files = files
        self._make = make
        self._lock = threading.Lock()
        self._stamp: _Stamp | None = None
        self._made = self._read()

    def latest(self) -> Made:
        with self._lock:
            try:
                if _stamp(self._files) != self._stamp:
                    self._made = self._read()
                    log.info("took the new certificate in %s", self._files.certificate)
            except ConfigError as error:
                log.warning("the certificate stays as it is: %s", error)
            return self._made

    def _read(self) -> Made:
        """A file that can't be used is looked at again once it changes."""
        self._stamp = _stamp(self._files)
        return self._make(self._files)


def _stamp(files: TlsFiles) -> _Stamp:
    return _stamp_of(files.certificate, files.key, files.client_ca)


def _stamp_of(*paths: str | None) -> _Stamp:
    """Another one once a file has changed. Raises ConfigError."""
    try:
        found = [os.stat(path) for path in paths if path is not None]
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from None
    return tuple((one.st_mtime_ns, one.st_size, one.st_ino) for one in found)


def _context(files: TlsFiles) -> ssl.SSLContext:
    """Raises ConfigError when the files are no certificate, its key, and an authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(files.certificate, files.key)
        if files.client_ca is not None:
            context.load_verify_locations(files.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ValueError) as error:
        names = ", ".join(filter(None, (files.certificate, files.key, files.client_ca)))
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise ConfigError(f"TLS files {names}: {reason}") from None
    return context


class HttpTls(ssl.SSLContext):
    """Of a server in an event loop, which asks it for each connection."""

    _reloaded: Reloaded[ssl.SSLContext]

    def __new__(cls, files: TlsFiles) -> HttpTls:
        """Raises ConfigError."""
        made = super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)
        made._reloaded = Reloaded(files, _context)
        return made

    def __init__(self, files: TlsFiles) -> None:
        pass

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        return self._reloaded.latest().wrap_bio(
            incoming, outgoing, server_side, server_hostname, session
        )


def add_port(server: grpc.aio.Server, address: str, files: TlsFiles | None) -> int:
    """The port that a gRPC server got. Raises ConfigError for the files, and RuntimeError when
    the address can't be had."""
    if files is None:
        return int(server.add_insecure_port(address))
    return int(server.add_secure_port(address, _server_credentials(files)))


def _server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    reloaded = Reloaded(files, _configuration)
    first = given = reloaded.latest()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """None: as before."""
        nonlocal given
        before, given = given, reloaded.latest()
        return None if given is before else given

    return grpc.dynamic_ssl_server_credentials(first, fetch, files.client_ca is not None)


def _configuration(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    _context(files)  # gRPC itself gives no reason
    pair = (Path(files.key).read_bytes(), Path(files.certificate).read_bytes())
    ca = None if files.client_ca is None else Path(files.client_ca).read_bytes()
    return grpc.ssl_server_certificate_configuration([pair], ca)


def aio_channel(address: str, tls: Tls | None, options: ChannelOptions = ()) -> grpc.aio.Channel:
    """To HOST:PORT. The files are read now. Raises ConfigError that names them."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=[*options])
    return grpc.aio.secure_channel(address, _credentials(tls), options=_named(tls, options))


class LastingChannel:
    """To HOST:PORT, for as long as a process lives: another channel once the files have changed.
    Calls on an earlier one go on."""

    def __init__(self, address: str, tls: Tls | None, options: ChannelOptions = ()) -> None:
        """Raises ConfigError that names a file that can't be read."""
        self._at = (address, tls, options)
        self._stamp = self._stamp_now()
        self._opened = [aio_channel(*self._at)]

    def latest(self) -> grpc.aio.Channel:
        try:
            if (stamp := self._stamp_now()) != self._stamp:
                self._stamp = stamp
                self._opened.append(aio_channel(*self._at))
        except ConfigError as error:
            log.warning("calls to %s go on with the certificate as it was: %s", self._at[0], error)
        return self._opened[-1]

    async def close(self) -> None:
        for channel in self._opened:
            await channel.close()

    def _stamp_now(self) -> _Stamp:
        _, tls, _ = self._at
        return () if tls is None else _stamp_of(tls.ca, tls.certificate, tls.key)


def blocking_channel(address: str, tls: Tls | None, options: ChannelOptions = ()) -> grpc.Channel:
    """As `aio_channel`, for threads."""
    if tls is None:
        return grpc.insecure_channel(address, options=[*options])
    return grpc.secure_channel(address, _credentials(tls), options=_named(tls, options))


def _named(tls: Tls, options: ChannelOptions) -> list[tuple[str, object]]:
    name = tls.server_name
    return [*options, *([] if name is None else [("grpc.ssl_target_name_override", name)])]


def _credentials(tls: Tls) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(_pem(tls.ca), _pem(tls.key), _pem(tls.certificate))


def _pem(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
