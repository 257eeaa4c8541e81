"""The body of a streamed answer: server-sent events, and comments while no token comes.

Proxies cut a connection that is silent for long. A comment keeps it open; clients skip it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from starlette.types import Send

KEEP_ALIVE_S = 15.0
COMMENT = b": keep-alive\n\n"

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

Headers = list[tuple[bytes, bytes]]


@dataclass(slots=True, kw_only=True)
class Silence:
    """Nothing was sent since `since_s`; a silence may last `longest_s`. Pure."""

    longest_s: float
    since_s: float

    def left_s(self, now_s: float) -> float:
        """Seconds until something must be sent; 0 or less: now."""
        return self.since_s + self.longest_s - now_s


class EventStream:
    """The status line leaves with the first event or comment. Until then an error can have its own
    status."""

    def __init__(
        self,
        send: Send,
        headers: Callable[[], Headers],
        keep_alive_s: float,
        comment: bytes = COMMENT,
    ) -> None:
        """`headers` is called when the stream opens. `comment` is sent after each silence."""
        self.is_open = False
        self._comment = comment
        self._send = send
        self._headers = headers
        self._clock = asyncio.get_running_loop().time
        self._silence = Silence(longest_s=keep_alive_s, since_s=self._clock())
        self._turn = asyncio.Lock()

    async def send(self, body: bytes) -> None:
        async with self._turn:
            if not self.is_open:
                await self._open()
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
        self._silence.since_s = self._clock()

    async def end(self) -> None:
        await self._stop()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _open(self) -> None:
        headers = [*STREAM_HEADERS, *self._headers()]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        self.is_open = True

    async def _keep_alive(self) -> None:
        while True:
            left_s = self._silence.left_s(self._clock())
            if left_s > 0:
                await asyncio.sleep(left_s)
            else:
                await self.send(self._comment)

    async def _stop(self) -> None:
        self._keeping.cancel()
        await asyncio.wait((self._keeping,))

    async def __aenter__(self) -> Self:
        self._keeping = asyncio.create_task(self._keep_alive())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stop()
