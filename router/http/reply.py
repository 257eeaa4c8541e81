"""How a generation becomes a response: streamed or whole, aborted when the client goes away.

Log probabilities have OpenAI's two shapes.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from base64 import b64encode
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from typing import ClassVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvrelay.errors import KvrelayError
from kvrelay.types import PromptLogprob, TokenLogprobs, value
from router.http.api import (
    DONE_EVENT,
    HttpApi,
    event,
    event_of,
    json_bytes,
    json_response,
    long_json_bytes,
    run_until_disconnect,
)
from router.http.bodies import StreamFlags
from router.http.errors import INTERNAL, TIER_HEADER, ErrorReply, reply_of
from router.http.event_stream import COMMENT, EventStream
from router.text.choices import DeltaSum, TextDelta
from router.text.generation import TextGeneration
from router.text.request import TextRequest
from router.text.side_by_side import merged, start_all
from router.text.tokenizer import TextTokenizer

log = logging.getLogger(__name__)


CAPPED_HEADER = "x-kvrelay-capped"

ChoiceTotals = Mapping[tuple[int, int], TextDelta]
"""# (prompt, choice) |-> the sum of its deltas"""


class Answer(ABC):
    """Shapes the answer of one call. `generations` is set once the requests are admitted."""

    comment: ClassVar[bytes] = COMMENT
    """What a silent stream sends."""
    ends_after_failure: ClassVar[bool] = False
    """Its API has an event that ends a failed stream. Without one the connection is closed, so no
    client takes a part for the whole."""

    def __init__(self, *, stream: bool, ledger: bool) -> None:
        self.stream = stream
        self.generations: Sequence[TextGeneration] = ()
        self._ledger = ledger

    @abstractmethod
    def streamed(self, position: int, delta: TextDelta) -> bytes:
        """The events of one delta; `position` is that of the prompt."""

    @abstractmethod
    def ended(self) -> bytes:
        """The events behind the last delta."""

    @abstractmethod
    def failed(self, error: ErrorReply) -> bytes:
        """The last events of a stream that failed."""

    def heard(self, position: int, delta: TextDelta) -> None:
        """Hears of each delta of an answer that isn't streamed."""
        return

    @abstractmethod
    def whole(self, totals: ChoiceTotals) -> dict[str, object]:
        """The body of an answer that isn't streamed."""

    def headers(self) -> list[tuple[str, str]]:
        """The tier that was applied, and the length that the output was cut to, if it was."""
        capped = [one.capped_tokens for one in self.generations if one.capped_tokens is not None]
        tiers = [(TIER_HEADER, one.tier) for one in self.generations[:1] if one.tier]
        return [*tiers, (CAPPED_HEADER, str(min(capped)))] if capped else tiers

    def ledger_extra(self) -> dict[str, object]:
        """One ledger, or one for each prompt."""
        if not self._ledger:
            return {}
        ledgers = [generation.ledger_ms() for generation in self.generations]
        return {"kvrelay": {"ledger_ms": ledgers[0] if len(ledgers) == 1 else ledgers}}


class Reply(Answer):
    """Completions and chat completions: each event is a chunk, the last one says [DONE]."""

    def __init__(self, flags: StreamFlags, *, ledger: bool, tickets: bool) -> None:
        """`tickets`: the first event of each prompt has what a continuation needs."""
        super().__init__(stream=flags.stream, ledger=ledger)
        self._told_tickets: set[int] | None = set() if tickets else None
        self._flags = flags

    @abstractmethod
    def chunk(self, position: int, delta: TextDelta) -> dict[str, object]:
        """The object of one event; `position` is that of the prompt."""

    @abstractmethod
    def closing_chunk(self) -> dict[str, object]:
        """The object of the last event, without choices."""

    def streamed(
        self, position: int, delta: TextDelta, encode: Callable[[object], bytes] = json_bytes
    ) -> bytes:
        """One event, with the usage of its choice so far if every event shall have it."""
        chunk = self.chunk(position, delta)
        if self._flags.continuous_usage:
            prompt = len(self.generations[position].prompt_ids)
            chunk["usage"] = _usage(prompt, delta.completion_tokens)
        if self._told_tickets is not None and position not in self._told_tickets:
            self._told_tickets.add(position)
            chunk["ticket"] = b64encode(self.generations[position].ticket).decode()
        return event_of(encode(chunk))

    def usage(self) -> dict[str, object]:
        prompt = sum(len(generation.prompt_ids) for generation in self.generations)
        cached = sum(generation.cached_tokens for generation in self.generations)
        completion = sum(generation.completion_tokens for generation in self.generations)
        return _usage(prompt, completion) | {"prompt_tokens_details": {"cached_tokens": cached}}

    def ended(self) -> bytes:
        extra = self.closing_extra()
        return (event(self.closing_chunk() | extra) if extra else b"") + DONE_EVENT

    def failed(self, error: ErrorReply) -> bytes:
        return event(error.body())

    def closing_extra(self) -> dict[str, object]:
        extra: dict[str, object] = {}
        if self._flags.include_usage:
            extra["usage"] = self.usage()
        return extra | self.ledger_extra()


def _usage(prompt: int, completion: int) -> dict[str, object]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


TOLD_AT_ONCE = 500
"""An answer that tells of more tokens of its prompts is written on a thread."""


def _told(generation: TextGeneration) -> int:
    return len(generation.prompt_logprobs)


class GenerationResponse(Response):
    """Runs the requests while it answers; those in `started` run already."""

    def __init__(
        self,
        api: HttpApi,
        requests: Sequence[TextRequest],
        reply: Answer,
        *,
        started: Sequence[TextGeneration] = (),
    ) -> None:
        self._service = api.service
        self._keep_alive_s = api.keep_alive_s
        self._requests = requests
        self._reply = reply
        self._started = started
        self._begun: set[int] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = self._stream(send) if self._reply.stream else self._whole(scope, receive, send)
        try:
            await run_until_disconnect(receive, work)
        finally:
            for generation in self._started:
                generation.abort()

    async def _start(self) -> Sequence[TextGeneration]:
        return self._started or await start_all(self._service, self._requests)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._reply.generations = await self._start()
        sums: defaultdict[tuple[int, int], DeltaSum] = defaultdict(DeltaSum)
        async with aclosing(merged(self._reply.generations)) as deltas:
            async for position, delta in deltas:
                self._reply.heard(position, delta)
                sums[position, delta.choice].add(delta)
        totals = {key: sums[key].total() for key in sorted(sums)}
        content = await self._whole_body(totals)
        await json_response(content, headers=dict(self._reply.headers()))(scope, receive, send)

    async def _whole_body(self, totals: ChoiceTotals) -> bytes:
        def shape(encode: Callable[[object], bytes]) -> bytes:
            return encode(self._reply.whole(totals) | self._reply.ledger_extra())

        reply = self._reply
        if not isinstance(reply, Reply) or sum(map(_told, reply.generations)) <= TOLD_AT_ONCE:
            return shape(json_bytes)
        return await asyncio.to_thread(shape, long_json_bytes)

    async def _event(self, position: int, delta: TextDelta) -> bytes:
        """The first one of a prompt tells of the prompt."""
        reply = self._reply
        begun = position in self._begun
        self._begun.add(position)
        is_short = begun or _told(reply.generations[position]) <= TOLD_AT_ONCE
        if is_short or not isinstance(reply, Reply):
            return reply.streamed(position, delta)
        return await asyncio.to_thread(reply.streamed, position, delta, long_json_bytes)

    async def _stream(self, send: Send) -> None:
        """A first token, or a comment, opens the stream; until then errors have their own status.
        Where the API has no event for a failure the stream then has no end, so the server closes
        the connection: no client takes it for a whole answer."""
        reply = self._reply
        reply.generations = await self._start()
        async with (
            EventStream(send, self._stream_headers, self._keep_alive_s, reply.comment) as out,
            aclosing(merged(reply.generations)) as deltas,
        ):
            try:
                async for position, delta in deltas:
                    if events := await self._event(position, delta):
                        await out.send(events)
            except Exception as error:
                if not out.is_open:
                    raise
                await out.send(reply.failed(_failure(error, self._requests[0].request_id)))
                if reply.ends_after_failure:
                    await out.end()
            else:
                await out.send(reply.ended())
                await out.end()

    def _stream_headers(self) -> list[tuple[bytes, bytes]]:
        return [(name.encode(), value.encode()) for name, value in self._reply.headers()]


def _failure(error: Exception, request_id: str) -> ErrorReply:
    if isinstance(error, KvrelayError):
        return reply_of(error)
    log.error("a stream failed", exc_info=error, extra={"request_id": request_id})
    return INTERNAL


LOWEST = -9999.0
"""Stands for minus infinity, which JSON doesn't have."""


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)


@value
class EchoedPrompt:
    """`entries` are those of all its tokens but the first."""

    token_ids: Sequence[int]
    entries: Sequence[PromptLogprob]


class CompletionLogprobs:
    """The log probabilities of one choice, with `top` alternatives. It counts the characters
    before, for `text_offset`."""

    def __init__(self, tokenizer: TextTokenizer, top: int) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._offset = 0

    def shape(
        self, entries: Sequence[TokenLogprobs], echoed: EchoedPrompt | None = None
    ) -> dict[str, object]:
        """Includes the tokens of an echoed prompt, the first of which has no log probability."""
        known: list[TokenLogprobs | PromptLogprob] = [*entries]
        ids = [entry.token_id for entry in entries]
        if echoed is not None:
            known[:0], ids[:0] = echoed.entries, echoed.token_ids
        unknown = [None] * (len(ids) - len(known))
        return {
            "text_offset": [self._offset_of(token_id) for token_id in ids],
            "token_logprobs": [*unknown, *(_finite(entry.logprob) for entry in known)],
            "tokens": [self._name(token_id) for token_id in ids],
            "top_logprobs": [*unknown, *map(self._alternatives, known)],
        }

    def _offset_of(self, token_id: int) -> int:
        """The offset of the next token."""
        offset = self._offset
        self._offset += len(self._tokenizer.token_text(token_id))
        return offset

    def _name(self, token_id: int) -> str:
        """The token's text. A half character is named by its bytes, as OpenAI does, because many
        look alike."""
        token = self._tokenizer.token_bytes(token_id)
        try:
            return token.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)

    def _alternatives(self, entry: TokenLogprobs | PromptLogprob) -> dict[str, float]:
        """Includes the chosen token, even when it isn't among the best. Of two tokens with the same
        text the likelier counts."""
        named: dict[str, float] = {}
        for token_id, logprob in (*entry.top[: self._top], (entry.token_id, entry.logprob)):
            named.setdefault(self._name(token_id), _finite(logprob))
        return named


def prompt_logprobs(
    tokenizer: TextTokenizer, entries: Sequence[PromptLogprob], top: int
) -> list[dict[str, object] | None]:
    """In vLLM's shape: for each token of the prompt, by token id; none for the first."""
    return [None, *(_by_id(tokenizer, entry, top) for entry in entries)]


def _by_id(tokenizer: TextTokenizer, entry: PromptLogprob, top: int) -> dict[str, object]:
    best = [(i, logprob, rank) for rank, (i, logprob) in enumerate(entry.top[:top], 1)]
    return {
        str(i): {
            "logprob": _finite(logprob),
            "rank": rank,
            "decoded_token": tokenizer.token_text(i),
        }
        for i, logprob, rank in (*best, (entry.token_id, entry.logprob, entry.rank))
    }


def chat_logprobs(tokenizer: TextTokenizer, entries: Sequence[TokenLogprobs]) -> dict[str, object]:
    content = [
        {
            **_chat_token(tokenizer, entry.token_id, entry.logprob),
            "top_logprobs": [_chat_token(tokenizer, i, logprob) for i, logprob in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _chat_token(tokenizer: TextTokenizer, token_id: int, logprob: float) -> dict[str, object]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }
