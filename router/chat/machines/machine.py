"""The machine that reads a format: text in, in pieces cut anywhere; events out. Pure.

What has been said after some text depends on that text alone, never on where it was cut. So a
reader that is fed again what was delivered stands where the first one stood.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from router.chat.values.events import (
    CallArguments,
    CallBegins,
    ChatEvent,
    ContentText,
    ReasoningText,
)

Step = Callable[[], bool]
"""Takes some of the text that waits. False: it needs more."""


class Machine(ABC):
    """States are methods; `_state` is the one that goes on. Text that may begin a marker waits."""

    def __init__(self) -> None:
        self._text = ""
        self._ended = False
        self._state: Step = self._begin
        self._out: list[ChatEvent] = []

    def push(self, text: str) -> list[ChatEvent]:
        self._text += text
        return self._run()

    def finish(self) -> list[ChatEvent]:
        """No text comes any more."""
        self._ended = True
        self._run_on()
        self._end()
        return self._taken()

    @abstractmethod
    def _begin(self) -> bool:
        """The first state."""

    def _end(self) -> None:  # noqa: B027
        """All text is taken: say what was held back."""

    def _run(self) -> list[ChatEvent]:
        self._run_on()
        return self._taken()

    def _run_on(self) -> None:
        while self._text and self._state():
            pass

    def _taken(self) -> list[ChatEvent]:
        out, self._out = self._out, []
        return out

    def _until(self, markers: Sequence[str]) -> tuple[str, str]:
        """Takes the text before the first marker, and the marker. Without one: what can't belong to
        one, and an empty string."""
        found = [(at, -len(m), m) for m in markers if (at := self._text.find(m)) >= 0]
        if not found:
            return self._take(len(self._text) - self._open_length(markers)), ""
        at, _, marker = min(found)
        before = self._take(at)
        self._take(len(marker))
        return before, marker

    def _starts(self, markers: Sequence[str]) -> str | None:
        """Takes the marker that the text begins with; empty: there is none. None: not known yet."""
        for marker in markers:
            if self._text.startswith(marker):
                return self._take(len(marker))
        undecided = any(marker.startswith(self._text) for marker in markers)
        return None if undecided and not self._ended else ""

    def _take(self, length: int) -> str:
        taken, self._text = self._text[:length], self._text[length:]
        return taken

    def _skip_space(self) -> bool:
        """True when other text waits behind it."""
        self._text = self._text.lstrip()
        return bool(self._text)

    def _open_length(self, markers: Sequence[str]) -> int:
        """The length of the text's end that may begin a marker."""
        return 0 if self._ended else open_length(self._text, markers)


def open_length(text: str, markers: Sequence[str]) -> int:
    """The length of the longest end of `text` that begins a marker and isn't all of it."""
    longest = max(map(len, markers)) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0


class ToolMachine(Machine):
    """Says content and calls. Space beside calls is part of the format, not of the content.

    `new_id` makes the ids of calls; `tools` are the names on offer.
    """

    def __init__(self, new_id: Callable[[], str], tools: Sequence[str]) -> None:
        super().__init__()
        self._new_id = new_id
        self._tools = frozenset(tools)
        self._calls = 0
        self._space = ""
        self._beside_call = False
        self._raw = ""
        """Text that was taken and not said: it becomes content if no call comes of it."""

    def _say(self, text: str) -> None:
        """Content. Space at its end waits: a call may follow."""
        text = self._space + text
        if self._beside_call:
            text = text.lstrip()
        kept = text.rstrip()
        self._space = "" if self._beside_call and not kept else text[len(kept) :]
        if kept:
            self._beside_call = False
            self._out.append(ContentText(text=kept))

    def _call_begins(self, name: str) -> None:
        self._space = ""
        self._beside_call = True
        self._out.append(CallBegins(position=self._calls, call_id=self._new_id(), name=name))
        self._calls += 1

    def _argue(self, text: str) -> None:
        """More arguments of the last call."""
        if text:
            self._out.append(CallArguments(position=self._calls - 1, text=text))

    def _reason(self, text: str) -> None:
        if text:
            self._out.append(ReasoningText(text=text))

    def _say_raw(self, text: str = "") -> None:
        """It was no call."""
        raw, self._raw = self._raw, ""
        self._say(raw + text)

    def _end(self) -> None:
        self._say_raw(self._take(len(self._text)))
        if self._space:
            self._out.append(ContentText(text=self._space))
            self._space = ""
