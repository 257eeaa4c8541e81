"""What formats share whose calls are JSON objects with a name and arguments. Pure."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

from router.chat.machines.json_scan import JsonCall, State
from router.chat.machines.machine import ToolMachine


class JsonCallMachine(ToolMachine):
    """A subclass starts a call with `_open_call`, and goes on in `_after_call` behind it."""

    def __init__(self, new_id: Callable[[], str], tools: Sequence[str]) -> None:
        super().__init__(new_id, tools)
        self._call: JsonCall | None = None
        self._said_call = False
        self._offered_only = False

    def _open_call(self, raw: str, *, offered_only: bool = False) -> None:
        """`raw` is the text so far, which becomes content if no call comes of it. With
        `offered_only` a call has no keys but those of calls, and the name of a tool on offer."""
        self._call = JsonCall()
        self._raw = raw
        self._said_call = False
        self._offered_only = offered_only
        self._state = self._in_call

    def _in_call(self) -> bool:
        call = self._call
        assert call is not None
        taken = self._take(call.feed(self._text))
        self._raw += "" if self._said_call else taken
        if not self._said_call and self._ready(call):
            assert call.name is not None
            self._call_begins(call.name)
            self._said_call, self._raw = True, ""
        if self._said_call:
            self._argue(call.take_arguments())
        if call.state is State.OPEN and not self._is_content(call):
            return False
        self._close_call(call)
        return True

    def _ready(self, call: JsonCall) -> bool:
        done = call.state is State.DONE and not self._offered_only
        return bool(call.name) and (call.has_arguments or done) and not self._is_content(call)

    def _is_content(self, call: JsonCall) -> bool:
        """It can't be a call any more."""
        if self._said_call or not self._offered_only:
            return False
        return call.strange or (call.name is not None and call.name not in self._tools)

    def _close_call(self, call: JsonCall) -> None:
        if self._said_call:
            if not call.has_arguments:
                self._argue("{}")
            self._state = self._after_call
        else:
            self._say_raw()
            self._state = self._content

    @abstractmethod
    def _content(self) -> bool:
        """Outside of calls."""

    @abstractmethod
    def _after_call(self) -> bool:
        """Behind the object of a call."""
