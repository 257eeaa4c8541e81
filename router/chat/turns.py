"""One answer as it is taken apart: its events, and how many of its tokens were reasoning. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from router.chat.values.events import ChatEvent, ReasoningText


class Reader(Protocol):
    def push(self, text: str) -> list[ChatEvent]: ...

    def finish(self) -> list[ChatEvent]: ...


class TurnReader:
    """Tokens count for what was read when they came. Those that brought nothing certain yet count
    for what comes next."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._undecided_tokens = 0
        self._reasons = False
        self.reasoning_tokens = 0

    def read(self, text: str, tokens: int, *, is_last: bool) -> Sequence[ChatEvent]:
        events = self._reader.push(text)
        if is_last:
            events = [*events, *self._reader.finish()]
        self._undecided_tokens += tokens
        if events:
            self._reasons = isinstance(events[0], ReasoningText)
        if events or is_last:
            self.reasoning_tokens += self._undecided_tokens if self._reasons else 0
            self._undecided_tokens = 0
        return events
