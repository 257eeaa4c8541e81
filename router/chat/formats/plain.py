"""Text without tool calls. Pure."""

from __future__ import annotations

from router.chat.events import ContentText
from router.chat.formats.machine import Machine


class PlainMachine(Machine):
    def _begin(self) -> bool:
        self._out.append(ContentText(text=self._take(len(self._text))))
        return True
