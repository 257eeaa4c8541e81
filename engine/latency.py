"""How long a step of the engine takes, as a function of what it computes. Pure.

The router predicts with it, workers order their queues by it, and the simulator runs on it: it is
the same object everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class StepWork:
    """What one step computes, summed over its sequences, so that works add up. A value like any
    other, but not frozen: predictions make thousands a second, and that would take thrice as long.

    `attended_tokens` counts the query-key pairs of the prompts' new tokens: a chunk of n tokens
    after p others has n * p + n * (n + 1) / 2. `kv_tokens` is the context of those that decode.
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
    """Of a new token and one that it sees."""
    return new_tokens * context_tokens + new_tokens * (new_tokens + 1) // 2


def decode_work(sequences: int, kv_tokens: int) -> StepWork:
    """One token for each of `sequences`, whose contexts sum to `kv_tokens`."""
    return StepWork(decode_sequences=sequences, kv_tokens=kv_tokens)


def mixed_work(chunks: Sequence[tuple[int, int]], *, decoding: int, kv_tokens: int) -> StepWork:
    """Chunks of prompts (new tokens, those before them) beside sequences that decode."""
    return StepWork(
        prefill_tokens=sum([new for new, _ in chunks]),
        prefill_sequences=len(chunks),
        attended_tokens=sum([pairs_of(new, before) for new, before in chunks]),
        decode_sequences=decoding,
        kv_tokens=kv_tokens,
    )


class StepTimes(Protocol):
    """Of one device, or of the devices that share a model copy."""

    def step_s(self, work: StepWork) -> float:
        """Seconds of a step. Raises NotCovered where nothing is known of such a step."""


class NotCovered(Exception):
    """The measurements that the times come from say nothing of this work."""
