"""Reads what one choice says, as it comes: reasoning, content and tool calls.

After some text it has told the same, wherever the text was cut. So a stream that goes on behind
what another router delivered feeds that text first, and leaves out what it gets for it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from router.chat.formats.format import ToolFormat
from router.chat.formats.plain import PlainMachine
from router.chat.formats.thinking import ThinkingMachine
from router.chat.machines.machine import Machine
from router.chat.prompt_end import begins_of
from router.chat.values.events import (
    CallArguments,
    CallBegins,
    ChatEvent,
    ContentText,
    ReasoningText,
)
from router.chat.values.form import ChatForm
from router.text.service import TextService

PIECE = 1024
"""Characters that a machine gets at once. It copies what waits at each mark, so a long text with
many marks would take quadratic time."""


class ChatReader:
    """`calls` counts those that have begun."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.calls = 0

    def push(self, text: str) -> list[ChatEvent]:
        """What is certain by now, whatever comes next."""
        events: list[ChatEvent] = []
        for at in range(0, len(text), PIECE):
            events += self._machine.push(text[at : at + PIECE])
        return self._counted(events)

    def finish(self) -> list[ChatEvent]:
        """The choice has ended: what was held back."""
        return self._counted(self._machine.finish())

    def _counted(self, events: list[ChatEvent]) -> list[ChatEvent]:
        events = _joined(events)
        self.calls += sum(isinstance(event, CallBegins) for event in events)
        return events


def reader_of(service: TextService, form: ChatForm) -> ChatReader:
    """For an answer of one choice."""
    return readers_of(service, form)()


def readers_of(service: TextService, form: ChatForm) -> Callable[[], ChatReader]:
    """Makes one for each choice."""
    formats = service.formats
    tools = form.callable_tools()
    begins = begins_of(service, form)

    def reader() -> ChatReader:
        machine: Machine = PlainMachine()
        if formats.tools is not None and (tools or formats.tools.reads_all):
            machine = formats.tools.machine(_ids(formats.tools), tools)
        if formats.reasoning is not None:
            machine = ThinkingMachine(formats.reasoning, begins, machine)
        return ChatReader(machine)

    return reader


def _ids(chosen: ToolFormat) -> Callable[[], str]:
    """Some chat templates take ids of a fixed length only."""
    return lambda: chosen.call_id_prefix + secrets.token_hex(16)[: chosen.call_id_length]


def _joined(events: list[ChatEvent]) -> list[ChatEvent]:
    """Neighbours of one kind become one."""
    joined: list[ChatEvent] = []
    for event in events:
        match joined[-1:], event:
            case [ContentText(text=before)], ContentText():
                joined[-1] = ContentText(text=before + event.text)
            case [ReasoningText(text=before)], ReasoningText():
                joined[-1] = ReasoningText(text=before + event.text)
            case [CallArguments(position=at, text=before)], CallArguments() if at == event.position:
                joined[-1] = CallArguments(position=at, text=before + event.text)
            case _:
                joined.append(event)
    return joined
