"""What an assistant says, taken apart: reasoning, content and tool calls, as they come. Pure.

The text of a model becomes these by the reader of its format; each API has its own words
for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvrelay.types import value


@value
class ReasoningText:
    text: str


@value
class ContentText:
    text: str


@value
class CallBegins:
    """`position` counts the calls of one answer from 0. What follows are its arguments."""

    position: int
    call_id: str
    name: str


@value
class CallArguments:
    """More JSON text of the arguments of the call at `position`."""

    position: int
    text: str


ChatEvent = ReasoningText | ContentText | CallBegins | CallArguments


@dataclass(slots=True)
class ToolCall:
    """`arguments` is JSON text."""

    call_id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class AssistantTurn:
    """The sum of all events of one answer."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, events: Iterable[ChatEvent]) -> None:
        for event in events:
            match event:
                case ReasoningText():
                    self.reasoning += event.text
                case ContentText():
                    self.content += event.text
                case CallBegins():
                    assert event.position == len(self.calls), event
                    self.calls.append(ToolCall(event.call_id, event.name))
                case CallArguments():
                    self.calls[event.position].arguments += event.text
