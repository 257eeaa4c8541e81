"""The parts of one prompt, put together. Pure.

All are text, or all are token ids. A part may say where it begins: what the client has sent twice
counts once, and a gap is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPart:
    """`offset`: characters, or tokens, that go before it; None: it goes on behind the last one."""

    content: str | tuple[int, ...]
    offset: int | None = None


@dataclass(slots=True, kw_only=True)
class PartsSoFar:
    """`most_characters` and `most_tokens` are bounds for the whole prompt."""

    most_characters: int
    most_tokens: int
    length: int = 0  # characters or tokens
    _texts: list[str] = field(default_factory=list)
    _ids: list[int] = field(default_factory=list)

    def add(self, part: PromptPart) -> str | tuple[int, ...]:
        """What is new of it. Raises InvalidRequest, and keeps nothing of the part."""
        content = part.content
        self._check_kind(content)
        content = content[self._known(part) :]
        self._check_room(len(content))
        if isinstance(content, str):
            if content:
                self._texts.append(content)
        else:
            self._ids += content
        self.length += len(content)
        return content

    def whole(self) -> str | tuple[int, ...]:
        return tuple(self._ids) if self._ids else "".join(self._texts)

    def _known(self, part: PromptPart) -> int:
        """How much of the part has come before."""
        if part.offset is None:
            return 0
        if part.offset > self.length:
            raise _invalid(
                f"a part begins at {part.offset}, but only {self.length} {self._unit} have come: "
                "send what is missing"
            )
        return min(len(part.content), self.length - part.offset)

    def _check_kind(self, content: str | tuple[int, ...]) -> None:
        is_text = isinstance(content, str)
        if (self._ids and is_text) or (any(self._texts) and not is_text):
            raise _invalid("one part is text, another token ids: send one kind only")

    def _check_room(self, more: int) -> None:
        most = self.most_tokens if self._ids else self.most_characters
        if self.length + more > most:
            raise InvalidRequest(
                f"the prompt has more than {most} {self._unit} so far: shorten it",
                code="context_length_exceeded",
                param="prompt",
            )

    @property
    def _unit(self) -> str:
        return "tokens" if self._ids else "characters"


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="prompt")
