"""Text without tool calls. Pure."""

from __future__ import annotations

from router.chat.machines.machine import Machine
from router.chat.values.events import ContentText


class PlainMachine(Machine):
    def _begin(self) -> bool:
        self._out.append(ContentText(text=self._take(len(self._text))))
        return True
