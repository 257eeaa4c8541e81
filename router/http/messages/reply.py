"""The answer to POST /v1/messages, streamed or whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvrelay.types import FinishReason
from router.chat.turns import TurnReader
from router.http.api import named_event
from router.http.errors import ErrorReply
from router.http.messages.bodies import MessagesBody, ThinkingAdaptive, ThinkingEnabled
from router.http.messages.errors import error_body
from router.http.messages.events import Event, MessageEvents
from router.http.reply import Answer, ChoiceTotals
from router.text.choices import TextDelta

PING: Event = {"type": "ping"}


class MessagesReply(Answer):
    comment = named_event("ping", PING)
    ends_after_failure = True

    def __init__(
        self,
        message_id: str,
        body: MessagesBody,
        model: str,
        turn: TurnReader,
        *,
        request_id: str,
        ledger: bool,
    ) -> None:
        super().__init__(stream=bool(body.stream), ledger=ledger)
        self._asked = body
        self._turn = turn
        self._request_id = request_id
        self._events = MessageEvents(show_thinking=not _is_omitted(body))
        self._begun = False
        self._last: TextDelta | None = None
        self._message: dict[str, Any] = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def headers(self) -> list[tuple[str, str]]:
        return [*super().headers(), ("request-id", self._request_id)]

    def streamed(self, position: int, delta: TextDelta) -> bytes:
        return _encoded([*self._begin(), *self._read(delta)])

    def ended(self) -> bytes:
        closing = self._events.close()
        end = {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
        return _encoded([*closing, end | self.ledger_extra(), {"type": "message_stop"}])

    def failed(self, error: ErrorReply) -> bytes:
        return named_event("error", error_body(error, self._request_id))

    def heard(self, position: int, delta: TextDelta) -> None:
        self._read(delta)

    def whole(self, totals: ChoiceTotals) -> dict[str, object]:
        self._events.close()
        ended = {"content": self._events.content, **self._stop(), "usage": self._usage()}
        return {**self._message, **ended}

    def _begin(self) -> list[Event]:
        if self._begun:
            return []
        self._begun = True
        message = {**self._message, "usage": {**self._usage(), "output_tokens": 1}}
        return [{"type": "message_start", "message": message}, PING]

    def _read(self, delta: TextDelta) -> list[Event]:
        self._last = delta
        is_last = delta.finish_reason is not None
        said = self._turn.read(delta.text, len(delta.token_ids), is_last=is_last)
        return self._events.blocks(said)

    def _stop(self) -> dict[str, Any]:
        sequence = self._last.stop_string if self._last is not None else None
        return {"stop_reason": self._stop_reason(), "stop_sequence": sequence}

    def _stop_reason(self) -> str:
        last = self._last
        assert last is not None, "no answer ends without a delta"
        if last.stop_string is not None:
            return "stop_sequence"
        if last.finish_reason is FinishReason.LENGTH:
            return self._limit()
        called = any(block["type"] == "tool_use" for block in self._events.content)
        return "tool_use" if called else "end_turn"

    def _limit(self) -> str:
        """The model's context ends, or what the client asked for."""
        room = self.generations[0].sampling.max_tokens
        is_context = room < self._asked.max_tokens and self._given() >= room
        return "model_context_window_exceeded" if is_context else "max_tokens"

    def _given(self) -> int:
        return self.generations[0].completion_tokens

    def _usage(self) -> dict[str, Any]:
        """Anthropic counts cached tokens apart from `input_tokens`."""
        generation = self.generations[0]
        return {
            "input_tokens": len(generation.prompt_ids) - generation.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": generation.cached_tokens,
            "output_tokens": self._given(),
            "output_tokens_details": {"thinking_tokens": self._turn.reasoning_tokens},
        }


def _is_omitted(body: MessagesBody) -> bool:
    match body.thinking:
        case ThinkingEnabled(display=display) | ThinkingAdaptive(display=display):
            return display == "omitted"
        case _:
            return False


def _encoded(events: Sequence[Event]) -> bytes:
    return b"".join(named_event(event["type"], event) for event in events)
