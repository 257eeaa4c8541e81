"""The text of one choice, as its tokens come. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvrelay.types import (
    FinishReason,
    TokenLogprobs,
)
from router.carried.continuation import Continuation, Delivered
from router.core.state.generation import (
    ChoiceTokens,
)
from router.text.detokenizer import Delta, TextStream
from router.text.sampling import RequestedSampling
from router.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """New text of one choice. The last delta of a choice has its finish reason.

    `token_ids` and `logprobs` run ahead of `text` while text is held back.
    """

    choice: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    completion_tokens: int
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    stop_token_id: int | None = None


class DeltaSum:
    """All deltas of a choice that isn't streamed, as one. Summed as they come: at the end of a long
    answer the event loop would stand still."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._last: TextDelta | None = None

    def add(self, delta: TextDelta) -> None:
        self._texts.append(delta.text)
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs
        self._last = delta

    def total(self) -> TextDelta:
        assert self._last is not None, "nothing came"
        return replace(
            self._last,
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
        )


class ChoiceText:
    def __init__(self, index: int, stream: TextStream, *, keep_stop_token: bool) -> None:
        self.index = index
        self.finished = False
        self.completion_tokens = 0
        self.delivered_text = ""
        self._stream = stream
        self._keep_stop_token = keep_stop_token

    def go_on_behind(self, delivered: Delivered) -> None:
        """Its text up to there was delivered by another router."""
        self.finished = delivered.finished
        if not delivered.finished:
            self.delivered_text = self._stream.push(delivered.token_ids).text
        self.completion_tokens = len(delivered.token_ids)

    def push(self, tokens: ChoiceTokens) -> TextDelta:
        delta = self._text_of(tokens)
        if delta.stopped is not None:
            return self._stopped(tokens, delta)
        self.completion_tokens += len(tokens.token_ids)
        self.finished = tokens.finish_reason is not None
        return TextDelta(
            choice=self.index,
            text=delta.text,
            token_ids=tokens.token_ids,
            logprobs=tokens.logprobs,
            completion_tokens=self.completion_tokens,
            finish_reason=tokens.finish_reason,
            stop_token_id=tokens.stop_token_id,
        )

    def _text_of(self, tokens: ChoiceTokens) -> Delta:
        delta = self._stream.push(self._spoken_ids(tokens))
        if tokens.finish_reason is None or delta.stopped is not None:
            return delta
        rest = self._stream.finish()
        return Delta(text=delta.text + rest.text, stopped=rest.stopped)

    def _spoken_ids(self, tokens: ChoiceTokens) -> tuple[int, ...]:
        """Leaves out the token that stopped the choice: it counts, but isn't part of the text."""
        ids = tokens.token_ids
        if tokens.stop_token_id is None or self._keep_stop_token:
            return ids
        return ids[:-1] if ids and ids[-1] == tokens.stop_token_id else ids

    def _stopped(self, tokens: ChoiceTokens, delta: Delta) -> TextDelta:
        assert delta.stopped is not None
        valid = delta.stopped.valid_tokens - self.completion_tokens
        self.completion_tokens = delta.stopped.valid_tokens
        self.finished = True
        return TextDelta(
            choice=self.index,
            text=delta.text,
            token_ids=tokens.token_ids[:valid],
            logprobs=tokens.logprobs[:valid],
            completion_tokens=self.completion_tokens,
            finish_reason=FinishReason.STOP,
            stop_string=delta.stopped.stop_string,
        )


def choice_text(tokenizer: TextTokenizer, asked: RequestedSampling, index: int) -> ChoiceText:
    keep = asked.include_stop_str_in_output
    return ChoiceText(index, _text_stream(tokenizer, asked), keep_stop_token=keep)


def go_on(choices: Sequence[ChoiceText], behind: Continuation) -> None:
    for choice, delivered in zip(choices, behind.choices, strict=True):
        choice.go_on_behind(delivered)


def _text_stream(tokenizer: TextTokenizer, asked: RequestedSampling) -> TextStream:
    return TextStream(
        tokenizer,
        stop_strings=asked.stop,
        skip_special_tokens=asked.skip_special_tokens,
        shown_special=asked.shown_special,
        include_stop_str_in_output=asked.include_stop_str_in_output,
        min_tokens=asked.min_tokens,
    )
