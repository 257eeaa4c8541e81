"""How a generation becomes a response: streamed or whole, aborted when the client goes away."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvrelay.errors import KvrelayError
from router.batch import merged, start_all
from router.choice_text import DeltaSum, TextDelta
from router.http.disconnect import run_until_disconnect
from router.http.encoding import DONE_EVENT, event, json_response
from router.http.errors import INTERNAL, TIER_HEADER, reply_of
from router.serving import TextGeneration, TextRequest, TextService

log = logging.getLogger(__name__)

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

CAPPED_HEADER = "x-kvrelay-capped"

Totals = Mapping[tuple[int, int], TextDelta]
"""# (prompt, choice) |-> all it gained"""


class Reply(ABC):
    """Shapes one endpoint's answer. `generations` is set once the requests are admitted."""

    def __init__(self, *, stream: bool, include_usage: bool, ledger: bool) -> None:
        self.stream = stream
        self.generations: Sequence[TextGeneration] = ()
        self._include_usage = include_usage
        self._ledger = ledger

    @abstractmethod
    def chunk(self, position: int, delta: TextDelta) -> dict[str, object]:
        """One event's object; `position` is the prompt's."""

    @abstractmethod
    def closing_chunk(self) -> dict[str, object]:
        """The last event's object, without choices."""

    @abstractmethod
    def whole(self, totals: Totals) -> dict[str, object]: ...

    def usage(self) -> dict[str, object]:
        prompt = sum(len(generation.prompt_ids) for generation in self.generations)
        cached = sum(generation.cached_tokens for generation in self.generations)
        completion = sum(generation.completion_tokens for generation in self.generations)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def headers(self) -> list[tuple[str, str]]:
        """The tier that was applied; whether the output is shorter than asked for, and how long it
        may be."""
        capped = [one.capped_tokens for one in self.generations if one.capped_tokens is not None]
        tiers = [(TIER_HEADER, one.tier) for one in self.generations[:1] if one.tier]
        return [*tiers, (CAPPED_HEADER, str(min(capped)))] if capped else tiers

    def closing_extra(self) -> dict[str, object]:
        extra: dict[str, object] = {}
        if self._include_usage:
            extra["usage"] = self.usage()
        return extra | self.ledger_extra()

    def ledger_extra(self) -> dict[str, object]:
        """One ledger, or one for each prompt."""
        if not self._ledger:
            return {}
        ledgers = [generation.ledger_ms() for generation in self.generations]
        return {"kvrelay": {"ledger_ms": ledgers[0] if len(ledgers) == 1 else ledgers}}


class GenerationResponse(Response):
    """Runs the requests while it answers."""

    def __init__(self, service: TextService, requests: Sequence[TextRequest], reply: Reply) -> None:
        self._service = service
        self._requests = requests
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = self._stream(send) if self._reply.stream else self._whole(scope, receive, send)
        await run_until_disconnect(receive, work)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._reply.generations = await start_all(self._service, self._requests)
        sums: defaultdict[tuple[int, int], DeltaSum] = defaultdict(DeltaSum)
        async with aclosing(merged(self._reply.generations)) as deltas:
            async for position, delta in deltas:
                sums[position, delta.choice].add(delta)
        totals = {key: sums[key].total() for key in sorted(sums)}
        body = self._reply.whole(totals) | self._reply.ledger_extra()
        await json_response(body, headers=dict(self._reply.headers()))(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        """The status line leaves with the first token: until then errors have their own status."""
        reply = self._reply
        reply.generations = await start_all(self._service, self._requests)
        async with aclosing(merged(reply.generations)) as deltas:
            position, delta = await anext(deltas)
            capped = [(name.encode(), value.encode()) for name, value in reply.headers()]
            headers = [*STREAM_HEADERS, *capped]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await _send(send, event(reply.chunk(position, delta)))
            try:
                async for position, delta in deltas:
                    await _send(send, event(reply.chunk(position, delta)))
            except Exception as error:
                await _send(send, _error_event(error, self._requests[0].request_id))
            else:
                await self._close(send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _close(self, send: Send) -> None:
        extra = self._reply.closing_extra()
        if extra:
            await _send(send, event(self._reply.closing_chunk() | extra))
        await _send(send, DONE_EVENT)


async def _send(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


def _error_event(error: Exception, request_id: str) -> bytes:
    if isinstance(error, KvrelayError):
        return event(reply_of(error).body())
    log.error("a stream failed", exc_info=error, extra={"request_id": request_id})
    return event(INTERNAL.body())
