"""Turns one choice's tokens into text, piece by piece: no half character, nothing past a stop
string.

A short window of tokens is decoded together, because the text of a token depends on its neighbours
(spaces, characters split over tokens). Amortised constant work per token.

Stop strings are found by Knuth-Morris-Pratt, with one state each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.text.tokenizer import TextTokenizer


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
    """If several stop strings end at the same character, the longest wins: it starts first."""

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._patterns = [_Pattern(text) for text in sorted(stop_strings, key=len, reverse=True)]

    @property
    def open_characters(self) -> int:
        """The length of the text's end that may begin a stop string."""
        return max((pattern.matched for pattern in self._patterns), default=0)

    def push(self, piece: str, *, accept: bool = True) -> StopHit | None:
        """The first stop string that `piece` completes; with `accept` false, matches are
        ignored."""
        for position, character in enumerate(piece):
            hits = [pattern for pattern in self._patterns if pattern.step(character)]
            if hits and accept:
                return StopHit(stop_string=hits[0].text, end=position + 1)
        return None


UNFINISHED = "\ufffd"
WINDOW_TOKENS = 8
"""The window is cut when it has this many tokens."""
PATIENCE_TOKENS = 8
"""A character never takes this many tokens: what is unfinished for so long is not UTF-8."""
CONTEXT_TOKENS = 4
"""Longer than any unfinished character at the window's end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopFound:
    """`valid_tokens`: the choice's tokens up to the one that completed the string."""

    stop_string: str
    valid_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    text: str
    stopped: StopFound | None = None


class Detokenizer:
    """Emits text that later tokens can't change. All pieces together are the decoded text of all
    tokens."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        skip_special_tokens: bool = True,
        shown_special: frozenset[int] = frozenset(),
    ) -> None:
        self._backend = tokenizer.backend
        skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._skipped = skipped - shown_special
        self._window: list[int] = []
        self._clean_tokens = 0  # window[:clean_tokens] ends where a character ends
        self._sent_characters = 0  # of the window's text
        self._waiting_tokens = 0

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(UNFINISHED):
            if not self._decode([token_id]):  # not a token of the model's: it adds nothing
                self._window.pop()
                return ""
            return self._emit_finished_part(text)
        self._waiting_tokens = 0
        piece = text[self._sent_characters :]
        self._sent_characters = len(text)
        self._slide()
        return piece

    def finish(self) -> str:
        """The text held back, with U+FFFD for a character that was never completed."""
        piece = self._decode(self._window)[self._sent_characters :]
        self._window.clear()
        self._sent_characters = 0
        return piece

    def _decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def _emit_finished_part(self, text: str) -> str:
        """After PATIENCE_TOKENS all but the last character, which the next token may finish."""
        is_late = self._waiting_tokens >= PATIENCE_TOKENS
        finished = len(text) - 1 if is_late else len(text.rstrip(UNFINISHED))
        piece = text[self._sent_characters : finished]
        self._waiting_tokens = 0 if piece else self._waiting_tokens + 1
        self._sent_characters = max(self._sent_characters, finished)
        if piece and len(self._window) > WINDOW_TOKENS + CONTEXT_TOKENS:
            self._window = self._window[-CONTEXT_TOKENS:]
            self._clean_tokens = 0
            unfinished = len(text) - finished
            self._sent_characters = max(0, len(self._decode(self._window)) - unfinished)
        return piece

    def _slide(self) -> None:
        """Keep only the tokens since the last clean border as context."""
        if len(self._window) >= WINDOW_TOKENS:
            self._window = self._window[self._clean_tokens :]
            self._sent_characters = len(self._decode(self._window))
        self._clean_tokens = len(self._window)


class TextStream:
    """Detokenises and looks for stop strings across token borders.

    Text that may begin a stop string is held back, unless stop strings are part of the output
    anyway. A stop string that ends before `min_tokens` tokens doesn't count.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        stop_strings: Sequence[str] = (),
        skip_special_tokens: bool = True,
        shown_special: frozenset[int] = frozenset(),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens, shown_special=shown_special
        )
        self._stops = StopStrings(stop_strings) if stop_strings else None
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._tokens = 0
        self._held = ""

    def push(self, token_ids: Sequence[int]) -> Delta:
        pieces: list[str] = []
        for token_id in token_ids:
            self._tokens += 1
            delta = self._advance(self._detokenizer.push(token_id))
            pieces.append(delta.text)
            if delta.stopped is not None:
                return Delta(text="".join(pieces), stopped=delta.stopped)
        return Delta(text="".join(pieces))

    def finish(self) -> Delta:
        """The choice has ended for another reason. Returns the text held back, which may complete a
        stop string."""
        delta = self._advance(self._detokenizer.finish())
        text, self._held = delta.text + self._held, ""
        return Delta(text=text, stopped=delta.stopped)

    def _advance(self, piece: str) -> Delta:
        if self._stops is None or not piece:
            return Delta(text=piece)
        hit = self._stops.push(piece, accept=self._tokens >= self._min_tokens)
        text = self._held + piece
        if hit is not None:
            return self._stopped(text, hit, len(self._held))
        held = 0 if self._include_stop else self._stops.open_characters
        self._held = text[len(text) - held :]
        return Delta(text=text[: len(text) - held])

    def _stopped(self, text: str, hit: StopHit, offset: int) -> Delta:
        end = offset + hit.end
        kept = end if self._include_stop else end - len(hit.stop_string)
        self._held = ""
        stopped = StopFound(stop_string=hit.stop_string, valid_tokens=self._tokens)
        return Delta(text=text[:kept], stopped=stopped)
