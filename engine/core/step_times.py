"""The time of an engine step, as a function of its work. Pure.

The router predicts with it, workers order their queues by it, and the simulator runs on it: it is
the same object everywhere. Times are linear in the work:

    prefill   overhead + tokens + pairs (of a new token and one that it sees) + sequences
    decode    a function of the sequences, linear between measured knots, + tokens of context
    both      their sum, with the larger of the two overheads once

`least_squares` finds the coefficients.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol

from kvrelay.types import StepCoefficients


@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class StepWork:
    """The work of one step, summed over its sequences, so that works add up. Used like a value, but
    not frozen: predictions make thousands a second, and that would take three times as long.

    `attended_tokens` counts the query-key pairs of the prompts' new tokens: a chunk of n tokens
    after p others has n * p + n * (n + 1) / 2. `kv_tokens` is the context of the decoding
    sequences.
    """

    prefill_tokens: int = 0
    prefill_sequences: int = 0
    attended_tokens: int = 0
    decode_sequences: int = 0
    kv_tokens: int = 0

    def __add__(self, other: StepWork) -> StepWork:
        return StepWork(
            prefill_tokens=self.prefill_tokens + other.prefill_tokens,
            prefill_sequences=self.prefill_sequences + other.prefill_sequences,
            attended_tokens=self.attended_tokens + other.attended_tokens,
            decode_sequences=self.decode_sequences + other.decode_sequences,
            kv_tokens=self.kv_tokens + other.kv_tokens,
        )


def prefill_work(new_tokens: int, context_tokens: int = 0) -> StepWork:
    """A chunk of one prompt, after `context_tokens` whose KV is there."""
    pairs = pairs_of(new_tokens, context_tokens)
    return StepWork(prefill_tokens=new_tokens, prefill_sequences=1, attended_tokens=pairs)


def pairs_of(new_tokens: int, context_tokens: int) -> int:
    """Pairs of a new token and one that it sees."""
    return new_tokens * context_tokens + new_tokens * (new_tokens + 1) // 2


def decode_work(sequences: int, kv_tokens: int) -> StepWork:
    """One token for each of `sequences`, whose contexts sum to `kv_tokens`."""
    return StepWork(decode_sequences=sequences, kv_tokens=kv_tokens)


def mixed_work(chunks: Sequence[tuple[int, int]], *, decoding: int, kv_tokens: int) -> StepWork:
    """Chunks of prompts (new tokens, those before them) beside decoding sequences."""
    return StepWork(
        prefill_tokens=sum([new for new, _ in chunks]),
        prefill_sequences=len(chunks),
        attended_tokens=sum([pairs_of(new, before) for new, before in chunks]),
        decode_sequences=decoding,
        kv_tokens=kv_tokens,
    )


class StepTimes(Protocol):
    """The step times of one device, or of the devices that share a copy of the model."""

    def step_s(self, work: StepWork) -> float:
        """Seconds of a step. Raises NotCovered if there are no data for such a step."""


class NotCovered(Exception):
    """The measurements behind the times don't cover this work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearTimes(StepCoefficients):
    """Implements `engine.core.step_times.StepTimes`. Decode beyond the last knot is NotCovered."""

    @staticmethod
    def of(told: StepCoefficients) -> LinearTimes:
        names = (field.name for field in fields(StepCoefficients))
        return LinearTimes(**{name: getattr(told, name) for name in names})

    def scaled(self, prefill: float, decode: float) -> LinearTimes:
        """Prompts take `prefill` times as long, decode steps `decode` times."""
        return replace(
            self,
            prefill_overhead_s=self.prefill_overhead_s * prefill,
            prefill_token_s=self.prefill_token_s * prefill,
            prefill_pair_s=self.prefill_pair_s * prefill,
            prefill_sequence_s=self.prefill_sequence_s * prefill,
            decode_knots=tuple((n, seconds * decode) for n, seconds in self.decode_knots),
            decode_kv_token_s=self.decode_kv_token_s * decode,
        )

    def step_s(self, work: StepWork) -> float:
        if not work.prefill_tokens:
            return self.decode_s(work.decode_sequences, work.kv_tokens)
        prefill_s = self.prefill_s(
            work.prefill_tokens, work.attended_tokens, work.prefill_sequences
        )
        if not work.decode_sequences:
            return prefill_s
        shared_s = min(self.prefill_overhead_s, self.decode_overhead_s)
        return prefill_s + self.decode_s(work.decode_sequences, work.kv_tokens) - shared_s

    # --- prefill --------------------------------------------------------------------------------

    def prefill_s(self, tokens: int, pairs: int, sequences: int = 1) -> float:
        """`tokens` new ones, of this many sequences; `pairs` of a new token and one that it
        sees."""
        return (
            self.prefill_overhead_s
            + self.prefill_token_s * tokens
            + self.prefill_pair_s * pairs
            + self.prefill_sequence_s * sequences
        )

    def prompt_s(self, tokens: int, cached: int, chunk: int) -> float:
        """The part of a prompt that is not `cached`, in chunks of at most this many tokens."""
        new = max(0, tokens - cached)
        chunks = -(-new // chunk)
        return (
            (self.prefill_overhead_s + self.prefill_sequence_s) * chunks
            + self.prefill_token_s * new
            + self.prefill_pair_s * pairs_of(new, cached)
        )

    # --- decode ---------------------------------------------------------------------------------

    @property
    def decode_overhead_s(self) -> float:
        """The fixed time of a step: the line through the first two knots, at zero sequences."""
        if len(self.decode_knots) < 2:
            return sum(seconds for _, seconds in self.decode_knots)
        (few, few_s), (more, more_s) = self.decode_knots[:2]
        return min(few_s, max(0.0, few_s - few * (more_s - few_s) / (more - few)))

    def decode_s(self, sequences: int, kv_tokens: int) -> float:
        """One token for each. Below the first knot it takes the first knot's time."""
        return self._batch_s(sequences) + self.decode_kv_token_s * kv_tokens

    def batches_s(self) -> list[float]:
        """Of 0 sequences, 1, and so on, up to the last knot; empty without any."""
        most = self.decode_knots[-1][0] if self.decode_knots else -1
        return [self._batch_s(sequences) for sequences in range(most + 1)]

    def _batch_s(self, sequences: int) -> float:
        knots = self.decode_knots
        at = bisect_left(knots, (sequences,))
        if at == len(knots):
            most = knots[-1][0] if knots else 0
            raise NotCovered(f"{sequences} sequences: decode was measured up to {most}")
        more, more_s = knots[at]
        if at == 0 or more == sequences:
            return more_s
        few, few_s = knots[at - 1]
        return few_s + (more_s - few_s) * (sequences - few) / (more - few)
