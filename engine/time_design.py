"""Which steps are timed to learn how long all steps take. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from engine.latency import StepWork, decode_work, prefill_work

_SHORT_TOKENS = 32
_LONG_TOKENS = 512
"""Contexts of decode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A step of `rows` sequences, each with `tokens` new ones after `context` others."""

    rows: int
    tokens: int
    context: int = 0

    @property
    def work(self) -> StepWork:
        if self.tokens == 1:
            return decode_work(self.rows, self.rows * self.context)
        return sum([prefill_work(self.tokens, self.context)] * self.rows, StepWork())


def design(
    *, chunk_tokens: int, most_sequences: int, max_model_len: int, pool_tokens: int
) -> list[tuple[Shape, bool]]:
    """Each with whether nothing can be said without it; no shape twice."""
    longest = min(max_model_len, pool_tokens)
    chunk = min(chunk_tokens, longest)
    essential = [*_chunks(chunk, longest), *_ends(most_sequences, longest)]
    more = [*_packed(chunk, longest), *_batches(most_sequences, longest, pool_tokens)]
    return [(shape, shape in essential) for shape in dict.fromkeys([*essential, *more])]


def _chunks(chunk: int, longest: int) -> list[Shape]:
    """A prompt's first chunk, and a small one far behind others."""
    small = max(2, chunk // 8)
    first = [Shape(rows=1, tokens=max(2, chunk)), Shape(rows=1, tokens=small)]
    return [*first, *_behind(small, longest // 2)]


def _behind(tokens: int, context: int) -> list[Shape]:
    return [Shape(rows=1, tokens=tokens, context=context)] if context >= tokens else []


def _ends(most: int, longest: int) -> list[Shape]:
    short = min(_SHORT_TOKENS, longest - 1)
    return [Shape(rows=rows, tokens=1, context=short) for rows in (1, most)]


def _packed(chunk: int, longest: int) -> list[Shape]:
    """Several prompts in a step, and chunks of other sizes with and without others before."""
    shapes = [Shape(rows=4, tokens=tokens) for tokens in {chunk // 4, chunk // 16} if tokens > 1]
    shapes += [Shape(rows=1, tokens=tokens) for tokens in {chunk // 2, chunk // 32} if tokens > 1]
    for tokens, context in ((chunk, chunk), (chunk // 4, chunk)):
        if 1 < tokens <= longest - context:
            shapes.append(Shape(rows=1, tokens=tokens, context=context))
    return shapes


def _batches(most: int, longest: int, pool_tokens: int) -> list[Shape]:
    """Powers of two, with short and with long contexts."""
    rows = [1 << i for i in range(most.bit_length()) if 1 << i < most]
    return [
        Shape(rows=n, tokens=1, context=min(context, longest - 1, max(1, pool_tokens // n - 1)))
        for n in [*rows, most]
        for context in (_SHORT_TOKENS, _LONG_TOKENS)
    ]
