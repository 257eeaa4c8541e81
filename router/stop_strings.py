"""Finds stop strings in text that arrives piece by piece. Knuth-Morris-Pratt, one state each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StopHit:
    """The pushed piece's first `end` characters complete `stop_string`."""

    stop_string: str
    end: int


def _borders(pattern: str) -> list[int]:
    """# i |-> the longest proper prefix of pattern[: i + 1] that also ends it"""
    borders = [0]
    length = 0
    for character in pattern[1:]:
        while length and character != pattern[length]:
            length = borders[length - 1]
        length += character == pattern[length]
        borders.append(length)
    return borders


class _Pattern:
    __slots__ = ("borders", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.borders = _borders(text)
        self.matched = 0

    def step(self, character: str) -> bool:
        """True when this character completes the stop string."""
        matched = self.matched
        while matched and character != self.text[matched]:
            matched = self.borders[matched - 1]
        matched += character == self.text[matched]
        complete = matched == len(self.text)
        self.matched = self.borders[-1] if complete else matched
        return complete


class StopStrings:
    """Of stop strings that end at the same character the longest wins: it starts first."""

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._patterns = [_Pattern(text) for text in sorted(stop_strings, key=len, reverse=True)]

    @property
    def open_characters(self) -> int:
        """How much of the text's end may be the beginning of a stop string."""
        return max((pattern.matched for pattern in self._patterns), default=0)

    def push(self, piece: str, *, accept: bool = True) -> StopHit | None:
        """The first stop string that `piece` completes; `accept` false passes hits over."""
        for position, character in enumerate(piece):
            hits = [pattern for pattern in self._patterns if pattern.step(character)]
            if hits and accept:
                return StopHit(stop_string=hits[0].text, end=position + 1)
        return None
