"""uvicorn's protocol for a connection, with bounds on what a client may send and how slowly.

uvicorn's parser has no bounds of its own: it takes headers of any size, and waits for ever for the
rest of a request. Runs in the router's event loop, once for each connection.
"""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass
from typing import cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpBounds:
    """`header_bytes` are of one header block, with the request's line and the body's trailer. It
    must have come within `header_s`. A client that is sent more than it reads must take
    `read_bytes` within `unread_s`."""

    header_bytes: int = 64 * 1024
    headers: int = 128
    header_s: float = 10.0
    unread_s: float = 30.0
    read_bytes: int = 16 * 1024
    connections: int = 4096


class BoundedProtocol(HttpToolsProtocol):
    bounds = HttpBounds()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._has_begun = False  # a header block
        self._not_body = 0  # bytes since the last of a body
        self._header_size = 0
        self._header_timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None
        super().connection_made(transport)
        if len(self.connections) > self.bounds.connections:
            most = self.bounds.connections
            self._refuse(503, f"{most} connections are open, and no more are accepted")
        else:
            self._expect_header()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_header_timer()
        self._cancel_reader_timer()
        super().connection_lost(exc)

    # --- what comes -----------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """The parser keeps the rest of a header, so what is too much is looked at after each
        read."""
        if self.transport.is_closing():
            return
        self._not_body += len(data)
        super().data_received(data)
        if self._not_body > self.bounds.header_bytes:
            self._refuse_header()

    def on_message_begin(self) -> None:
        self._has_begun = True
        self._header_size = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._header_size += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_size += len(name) + len(value) + 4  # a colon, a space and the line's end
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._has_begun = False
        self._not_body = 0
        self._cancel_header_timer()
        if self.transport.is_closing():
            return
        most = self.bounds
        if self._header_size > most.header_bytes:
            self._refuse_header()
        elif len(self.headers) > most.headers:
            self._refuse(431, f"{len(self.headers)} headers exceed the limit of {most.headers}")
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._not_body = 0
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._not_body = 0
        if not self.transport.is_closing():
            super().on_message_complete()

    def _expect_header(self) -> None:
        self._cancel_header_timer()
        self._header_timer = self.loop.call_later(self.bounds.header_s, self._drop_silent)

    def _cancel_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _drop_silent(self) -> None:
        """Also a client that still sends a body whose answer it has got already."""
        if self._has_begun:
            within_s = self.bounds.header_s
            self._refuse(408, f"the header block has not come within {within_s:g} s")
        else:
            self.transport.close()

    # --- what goes ------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_reader()
        if not self.pipeline and not self.transport.is_closing():
            self._expect_header()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def _watch_reader(self) -> None:
        unread = self.transport.get_write_buffer_size()
        if unread and self._reader_timer is None:
            look = self._look_at_reader
            self._reader_timer = self.loop.call_later(self.bounds.unread_s, look, unread)

    def _look_at_reader(self, before: int) -> None:
        self._reader_timer = None
        unread = self.transport.get_write_buffer_size()
        if unread and unread > before - self.bounds.read_bytes:
            log.warning(
                "a client did not read: %d bytes wait since %g s, its connection is closed",
                unread,
                self.bounds.unread_s,
            )
            self.transport.abort()
        else:
            self._watch_reader()

    def _cancel_reader_timer(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    # --- refusals -------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _refuse_header(self) -> None:
        most = self.bounds.header_bytes
        self._refuse(431, f"the header block exceeds the limit of {most} bytes")

    def _refuse(self, status: int, message: str) -> None:
        """In OpenAI's shape; nothing more is read from this client."""
        if self.transport.is_closing():
            return
        kind = "server_error" if status == 503 else "invalid_request_error"
        error = {"message": message, "type": kind, "code": CODES[status], "param": None}
        body = json.dumps({"error": error}).encode()
        head = (
            f"HTTP/1.1 {status} {REASONS[status]}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
        self._watch_reader()


REASONS = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}
CODES = {
    400: "invalid_http",
    408: "header_timeout",
    431: "header_too_large",
    503: "too_many_connections",
}


def bounded_protocol(bounds: HttpBounds) -> type[asyncio.Protocol]:
    """uvicorn makes one for each connection."""
    return cast(type[asyncio.Protocol], type("Bounded", (BoundedProtocol,), {"bounds": bounds}))
