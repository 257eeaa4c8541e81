"""Reads what one choice says, as it comes: reasoning, content and tool calls."""

from __future__ import annotations

from router.chat.events import ChatEvent, ContentText
from router.chat.form import ChatForm
from router.text.service import TextService


class ChatReader:
    def push(self, text: str) -> list[ChatEvent]:
        """What is certain by now, whatever comes next."""
        return [ContentText(text=text)] if text else []

    def finish(self) -> list[ChatEvent]:
        """The choice has ended: what was held back."""
        return []


def reader_of(service: TextService, form: ChatForm) -> ChatReader:
    """One for each choice."""
    return ChatReader()
