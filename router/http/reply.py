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
from router.http.errors import INTERNAL, reply_of
from router.http.event_stream import EventStream
from router.http.face import HttpFace
from router.http.parameters import StreamFlags
from router.serving import TextGeneration, TextRequest

log = logging.getLogger(__name__)

CAPPED_HEADER = "x-kvrelay-capped"

Totals = Mapping[tuple[int, int], TextDelta]
"""# (prompt, choice) |-> all it gained"""


class Reply(ABC):
    """Shapes one endpoint's answer. `generations` is set once the requests are admitted."""

    def __init__(self, flags: StreamFlags, *, ledger: bool) -> None:
        self.stream = flags.stream
        self.generations: Sequence[TextGeneration] = ()
        self._flags = flags
        self._ledger = ledger

    @abstractmethod
    def chunk(self, position: int, delta: TextDelta) -> dict[str, object]:
        """One event's object; `position` is the prompt's."""

    @abstractmethod
    def closing_chunk(self) -> dict[str, object]:
        """The last event's object, without choices."""

    @abstractmethod
    def whole(self, totals: Totals) -> dict[str, object]: ...

    def streamed(self, position: int, delta: TextDelta) -> bytes:
        """One event, with the usage of its choice so far if every one is to have it."""
        chunk = self.chunk(position, delta)
        if self._flags.continuous_usage:
            prompt = len(self.generations[position].prompt_ids)
            chunk["usage"] = _usage(prompt, delta.completion_tokens)
        return event(chunk)

    def usage(self) -> dict[str, object]:
        prompt = sum(len(generation.prompt_ids) for generation in self.generations)
        cached = sum(generation.cached_tokens for generation in self.generations)
        completion = sum(generation.completion_tokens for generation in self.generations)
        return _usage(prompt, completion) | {"prompt_tokens_details": {"cached_tokens": cached}}

    def capped_header(self) -> list[tuple[str, str]]:
        """Says that the output is shorter than asked for, and how long it may be."""
        capped = [one.capped_tokens for one in self.generations if one.capped_tokens is not None]
        return [(CAPPED_HEADER, str(min(capped)))] if capped else []

    def closing_extra(self) -> dict[str, object]:
        extra: dict[str, object] = {}
        if self._flags.include_usage:
            extra["usage"] = self.usage()
        return extra | self.ledger_extra()

    def ledger_extra(self) -> dict[str, object]:
        """One ledger, or one for each prompt."""
        if not self._ledger:
            return {}
        ledgers = [generation.ledger_ms() for generation in self.generations]
        return {"kvrelay": {"ledger_ms": ledgers[0] if len(ledgers) == 1 else ledgers}}


def _usage(prompt: int, completion: int) -> dict[str, object]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


class GenerationResponse(Response):
    """Runs the requests while it answers."""

    def __init__(self, face: HttpFace, requests: Sequence[TextRequest], reply: Reply) -> None:
        self._service = face.service
        self._keep_alive_s = face.keep_alive_s
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
        await json_response(body, headers=dict(self._reply.capped_header()))(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        """A first token, or a comment, opens the stream: until then errors have their own
        status."""
        reply = self._reply
        reply.generations = await start_all(self._service, self._requests)
        async with (
            EventStream(send, self._stream_headers, self._keep_alive_s) as out,
            aclosing(merged(reply.generations)) as deltas,
        ):
            try:
                async for position, delta in deltas:
                    await out.send(reply.streamed(position, delta))
            except Exception as error:
                if not out.is_open:
                    raise
                await out.send(_error_event(error, self._requests[0].request_id))
            else:
                await self._close(out)
            await out.end()

    def _stream_headers(self) -> list[tuple[bytes, bytes]]:
        return [(name.encode(), value.encode()) for name, value in self._reply.capped_header()]

    async def _close(self, out: EventStream) -> None:
        extra = self._reply.closing_extra()
        if extra:
            await out.send(event(self._reply.closing_chunk() | extra))
        await out.send(DONE_EVENT)


def _error_event(error: Exception, request_id: str) -> bytes:
    if isinstance(error, KvrelayError):
        return event(reply_of(error).body())
    log.error("a stream failed", exc_info=error, extra={"request_id": request_id})
    return event(INTERNAL.body())
