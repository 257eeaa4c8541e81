"""The answer to POST /v1/responses, streamed or whole."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from kvrelay.types import FinishReason
from router.chat.turns import TurnReader
from router.http.api import named_event
from router.http.errors import ErrorReply
from router.http.reply import Answer, ChoiceTotals
from router.http.responses.bodies import ResponsesBody
from router.http.responses.events import Event, ResponseEvents
from router.text.choices import TextDelta

Response = dict[str, Any]
Keep = Callable[[Response], None]
"""Keeps a response that has ended."""


class ResponsesReply(Answer):
    ends_after_failure = True

    def __init__(
        self,
        response_id: str,
        body: ResponsesBody,
        model: str,
        turn: TurnReader,
        *,
        keep: Keep,
        ledger: bool,
    ) -> None:
        super().__init__(stream=bool(body.stream), ledger=ledger)
        self._turn = turn
        self._keep = keep
        self._events = ResponseEvents(uuid.uuid4().hex[:16])
        self._begun = False
        self._limit_reached = False
        self._response = _envelope(response_id, body, model)

    def streamed(self, position: int, delta: TextDelta) -> bytes:
        return _encoded([*self._begin(), *self._read(delta)])

    def ended(self) -> bytes:
        closing = self._events.close(self._status())
        response = self._final()
        self._keep(response)
        told = response | self.ledger_extra()
        return _encoded([*closing, self._events.lifecycle(response["status"], told)])

    def failed(self, error: ErrorReply) -> bytes:
        beginning = [*self._begin(), *self._events.close("incomplete")]
        failure = {"code": error.code or "server_error", "message": error.message}
        output = self._events.output
        response = {**self._response, "status": "failed", "error": failure, "output": output}
        return _encoded([*beginning, self._events.lifecycle("failed", response)])

    def heard(self, position: int, delta: TextDelta) -> None:
        self._read(delta)

    def whole(self, totals: ChoiceTotals) -> dict[str, object]:
        self._events.close(self._status())
        response = self._final()
        self._keep(response)
        return response

    def _begin(self) -> list[Event]:
        if self._begun:
            return []
        self._begun = True
        self._response |= self._effective()
        names = ("created", "in_progress")
        return [self._events.lifecycle(name, self._response) for name in names]

    def _effective(self) -> Response:
        sampling = self.generations[0].sampling
        return {"temperature": sampling.temperature, "top_p": sampling.top_p}

    def _read(self, delta: TextDelta) -> list[Event]:
        is_last = delta.finish_reason is not None
        self._limit_reached = delta.finish_reason is FinishReason.LENGTH
        said = self._turn.read(delta.text, len(delta.token_ids), is_last=is_last)
        return self._events.items(said)

    def _status(self) -> str:
        return "incomplete" if self._limit_reached else "completed"

    def _final(self) -> Response:
        reason = {"reason": "max_output_tokens"} if self._limit_reached else None
        return {
            **self._response,
            **self._effective(),
            "status": self._status(),
            "completed_at": None if self._limit_reached else int(time.time()),
            "incomplete_details": reason,
            "output": self._events.output,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        generation = self.generations[0]
        asked, given = len(generation.prompt_ids), generation.completion_tokens
        return {
            "input_tokens": asked,
            "input_tokens_details": {
                "cached_tokens": generation.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": given,
            "output_tokens_details": {"reasoning_tokens": self._turn.reasoning_tokens},
            "total_tokens": asked + given,
        }


def _encoded(events: Sequence[Event]) -> bytes:
    return b"".join(named_event(event["type"], event) for event in events)


def _envelope(response_id: str, body: ResponsesBody, model: str) -> Response:
    """A response that has just begun, with what was asked for."""
    asked = body.model_dump(by_alias=True)
    text, reasoning = asked["text"] or {}, asked["reasoning"] or {}
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": {"format": text.get("format") or {"type": "text"}},
        "tool_choice": asked["tool_choice"] or "auto",
        "tools": asked["tools"] or [],
        "top_logprobs": 0,
        "top_p": body.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": None,
    }
