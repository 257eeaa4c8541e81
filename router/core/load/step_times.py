"""How long a worker takes for prompts and for decode steps, as it says now. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.core.step_times import LinearTimes, StepTimes, StepWork, pairs_of
from kvrelay.counters import Counters
from kvrelay.messages import WorkerHello


class ToldTimes(StepTimes, Protocol):
    """Also by what a step computes, without a StepWork. Each may raise NotCovered."""

    def prefill_s(self, new_tokens: int, context_tokens: int) -> float:
        """A chunk of one prompt."""

    def prompt_s(self, tokens: int, cached: int, chunk: int) -> float:
        """What is not `cached` of a prompt, in chunks of so many tokens at most."""

    def decode_s(self, sequences: int, kv_tokens: int) -> float: ...


class NoTimes:
    """Of a worker that has not told: nothing takes any time."""

    def step_s(self, work: StepWork) -> float:
        return 0.0

    def prefill_s(self, new_tokens: int, context_tokens: int) -> float:
        return 0.0

    def prompt_s(self, tokens: int, cached: int, chunk: int) -> float:
        return 0.0

    def decode_s(self, sequences: int, kv_tokens: int) -> float:
        return 0.0


@dataclass(slots=True, kw_only=True)
class WorkerTimes:
    """Implements ToldTimes: the hello's times multiplied by the corrections of the latest
    counters; `current` is the product, made when it is asked for. `batch_s` are the told times of
    decode steps without KV, by the number of sequences."""

    told: LinearTimes
    batch_s: Sequence[float]
    prefill_correction: float = 1.0
    decode_correction: float = 1.0
    _current: LinearTimes | None = field(init=False, default=None)

    @staticmethod
    def of(hello: WorkerHello) -> WorkerTimes:
        told = LinearTimes.of(hello.step_times)
        return WorkerTimes(told=told, batch_s=told.batches_s())

    @property
    def current(self) -> LinearTimes:
        if self._current is None:
            self._current = self.told.scaled(self.prefill_correction, self.decode_correction)
        return self._current

    def corrected(self, counters: Counters) -> WorkerTimes:
        prefill, decode = counters.prefill_correction, counters.decode_correction
        if (prefill, decode) == (self.prefill_correction, self.decode_correction):
            return self
        return WorkerTimes(
            told=self.told,
            batch_s=self.batch_s,
            prefill_correction=prefill,
            decode_correction=decode,
        )

    def step_s(self, work: StepWork) -> float:
        return self.current.step_s(work)

    def prefill_s(self, new_tokens: int, context_tokens: int) -> float:
        return self.current.prefill_s(new_tokens, pairs_of(new_tokens, context_tokens))

    def prompt_s(self, tokens: int, cached: int, chunk: int) -> float:
        return (self._current or self.current).prompt_s(tokens, cached, chunk)

    def decode_s(self, sequences: int, kv_tokens: int) -> float:
        batch_s, told = self.batch_s, self.told
        if sequences >= len(batch_s):
            return self.current.decode_s(sequences, kv_tokens)  # not covered
        return (batch_s[sequences] + told.decode_kv_token_s * kv_tokens) * self.decode_correction
