"""The events of a streamed response, in the order that OpenAI's clients expect. Pure.

created, in_progress; for each item of the output: output_item.added, its parts and deltas,
output_item.done; then completed, incomplete or failed. All are numbered from 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
Item = dict[str, Any]


@dataclass(slots=True)
class _Open:
    """The item that is being written."""

    kind: type[ChatEvent]
    item: Item
    texts: list[str] = field(default_factory=list)


class ResponseEvents:
    """Of one answer. `output` has the items that are whole."""

    def __init__(self, uid: str) -> None:
        """`uid` makes the ids of its items unique."""
        self.output: list[Item] = []
        self._uid = uid
        self._open: _Open | None = None
        self._sequence = 0

    def lifecycle(self, name: str, response: Mapping[str, Any]) -> Event:
        return self._event(f"response.{name}", response=response)

    def items(self, said: Iterable[ChatEvent]) -> list[Event]:
        events: list[Event] = []
        for event in said:
            kind = CallBegins if isinstance(event, CallArguments) else type(event)
            if self._open is None or self._open.kind is not kind or isinstance(event, CallBegins):
                events += self.close()
                events += self._begin(event)
            if delta := self._delta(event):
                events.append(delta)
        return events

    def close(self, status: str = "completed") -> list[Event]:
        """Ends the item that is being written, if there is one."""
        if self._open is None:
            return []
        opened, self._open = self._open, None
        text = "".join(opened.texts)
        events = self._part_done(opened, text)
        item = {**opened.item, **_content(opened.kind, text), "status": status}
        at = len(self.output)
        self.output.append(item)
        return [*events, self._event("response.output_item.done", output_index=at, item=item)]

    def _begin(self, event: ChatEvent) -> list[Event]:
        item = self._new_item(event)
        self._open = _Open(CallBegins if isinstance(event, CallArguments) else type(event), item)
        at = len(self.output)
        added = self._event("response.output_item.added", output_index=at, item=item)
        part = PARTS.get(type(event))
        if part is None:
            return [added]
        return [added, self._part_event("content_part.added", item, part=_part(part, ""))]

    def _new_item(self, event: ChatEvent) -> Item:
        number = len(self.output)
        match event:
            case ReasoningText():
                kind = {"id": f"rs_{self._uid}_{number}", "type": "reasoning", "summary": []}
                return {**kind, "content": [], "status": "in_progress"}
            case ContentText():
                kind = {"id": f"msg_{self._uid}_{number}", "type": "message", "role": "assistant"}
                return {**kind, "content": [], "status": "in_progress"}
            case CallBegins():
                called = {"call_id": event.call_id, "name": event.name, "arguments": ""}
                kind = {"id": f"fc_{self._uid}_{number}", "type": "function_call"}
                return {**kind, **called, "status": "in_progress"}
            case CallArguments():
                raise AssertionError(f"arguments without a call: {event}")

    def _delta(self, event: ChatEvent) -> Event | None:
        assert self._open is not None
        if isinstance(event, CallBegins) or not event.text:
            return None
        self._open.texts.append(event.text)
        item = self._open.item
        match event:
            case ReasoningText():
                return self._part_event("reasoning_text.delta", item, delta=event.text)
            case ContentText():
                return self._part_event("output_text.delta", item, delta=event.text, logprobs=[])
            case CallArguments():
                return self._item_event("function_call_arguments.delta", item, delta=event.text)

    def _part_done(self, opened: _Open, text: str) -> list[Event]:
        item = opened.item
        if opened.kind is CallBegins:
            told = {"name": item["name"], "arguments": text}
            return [self._item_event("function_call_arguments.done", item, **told)]
        kind = PARTS[opened.kind]
        more: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
        return [
            self._part_event(f"{kind}.done", item, text=text, **more),
            self._part_event("content_part.done", item, part=_part(kind, text)),
        ]

    def _part_event(self, name: str, item: Item, /, **fields: object) -> Event:
        return self._item_event(name, item, content_index=0, **fields)

    def _item_event(self, name: str, item: Item, /, **fields: object) -> Event:
        at = len(self.output)
        return self._event(f"response.{name}", item_id=item["id"], output_index=at, **fields)

    def _event(self, name: str, /, **fields: object) -> Event:
        number, self._sequence = self._sequence, self._sequence + 1
        return {"type": name, "sequence_number": number, **fields}


PARTS: Mapping[type[ChatEvent], str] = {ReasoningText: "reasoning_text", ContentText: "output_text"}
"""# kind of text |-> the type of its part; arguments of calls have none"""


def _part(kind: str, text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": kind, "text": text}
    return part | {"annotations": [], "logprobs": []} if kind == "output_text" else part


def _content(kind: type[ChatEvent], text: str) -> dict[str, Any]:
    if kind is CallBegins:
        return {"arguments": text}
    return {"content": [_part(PARTS[kind], text)]}
