"""The token ids that an attempt begins with: prompt, and what earlier ones emitted. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload


@dataclass(frozen=True, slots=True)
class Context(Sequence[int]):
    """Both as one, neither copied."""

    prompt: Sequence[int]
    emitted: Sequence[int]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.emitted)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[int]: ...
    def __getitem__(self, at: int | slice) -> int | Sequence[int]:
        border = len(self.prompt)
        if isinstance(at, slice):
            return self._span(range(len(self))[at])
        position = range(len(self))[at]
        return self.prompt[position] if position < border else self.emitted[position - border]

    def _span(self, span: range) -> Sequence[int]:
        assert span.step == 1, span
        border = len(self.prompt)
        if span.stop <= border:
            return self.prompt[span.start : span.stop]
        emitted = self.emitted[max(0, span.start - border) : span.stop - border]
        return (*self.prompt[span.start :], *emitted) if span.start < border else emitted
