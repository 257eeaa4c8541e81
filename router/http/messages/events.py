"""The events of a streamed message, in the order that Anthropic's clients expect. Pure.

message_start, ping; for each content block: start, deltas, stop; then message_delta, message_stop.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from router.chat.values.events import (
    CallArguments,
    CallBegins,
    ChatEvent,
    ContentText,
    ReasoningText,
)

Event = dict[str, Any]
Block = dict[str, Any]

UNSIGNED = "unsigned"
"""Clients send thinking back only with a signature. Nothing is signed here, and none is checked."""
INVALID_JSON = "INVALID_JSON"
"""Arguments that are no JSON object are its value in `input`, as Anthropic wraps them."""


@dataclass(slots=True)
class _Open:
    """The block that is being written."""

    kind: type[ChatEvent]
    block: Block
    texts: list[str] = field(default_factory=list)


class MessageEvents:
    """Of one answer. `content` has the blocks that are whole."""

    def __init__(self, *, show_thinking: bool = True) -> None:
        self.content: list[Block] = []
        self._show_thinking = show_thinking
        self._open: _Open | None = None

    def blocks(self, said: Iterable[ChatEvent]) -> list[Event]:
        events: list[Event] = []
        for event in said:
            kind = CallBegins if isinstance(event, CallArguments) else type(event)
            if self._open is None or self._open.kind is not kind or isinstance(event, CallBegins):
                events += self.close()
                events.append(self._begin(kind, _new_block(event)))
            events += self._delta(event)
        return events

    def close(self) -> list[Event]:
        """Ends the block that is being written, if there is one."""
        if self._open is None:
            return []
        opened, self._open = self._open, None
        signature = []
        if opened.kind is ReasoningText:
            delta = {"type": "signature_delta", "signature": UNSIGNED}
            signature = [self._event("content_block_delta", delta=delta)]
        stop = self._event("content_block_stop")
        self.content.append({**opened.block, **_filled(opened.kind, "".join(opened.texts))})
        return [*signature, stop]

    def _begin(self, kind: type[ChatEvent], block: Block) -> Event:
        self._open = _Open(kind, block)
        return self._event("content_block_start", content_block=block)

    def _delta(self, event: ChatEvent) -> list[Event]:
        assert self._open is not None
        match event:
            case ContentText():
                delta = {"type": "text_delta", "text": event.text}
            case ReasoningText():
                delta = {"type": "thinking_delta", "thinking": event.text}
            case CallArguments():
                delta = {"type": "input_json_delta", "partial_json": event.text}
            case CallBegins():
                return []
        if not event.text or (isinstance(event, ReasoningText) and not self._show_thinking):
            return []
        self._open.texts.append(event.text)
        return [self._event("content_block_delta", delta=delta)]

    def _event(self, name: str, /, **fields: object) -> Event:
        return {"type": name, "index": len(self.content), **fields}


def _new_block(event: ChatEvent) -> Block:
    match event:
        case ContentText():
            return {"type": "text", "text": "", "citations": None}
        case ReasoningText():
            return {"type": "thinking", "thinking": "", "signature": ""}
        case CallBegins():
            return {"type": "tool_use", "id": event.call_id, "name": event.name, "input": {}}
        case CallArguments():
            raise AssertionError(f"arguments without a call: {event}")


def _filled(kind: type[ChatEvent], text: str) -> Block:
    if kind is ReasoningText:
        return {"thinking": text, "signature": UNSIGNED}
    return {"text": text} if kind is ContentText else {"input": _input(text)}


def _input(arguments: str) -> dict[str, Any]:
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {INVALID_JSON: arguments}
