"""How long a worker takes for prompts and for decode steps, as it says now. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.latency import StepWork
from engine.latency_fit import LinearTimes
from kvrelay.messages import Counters, WorkerHello


@dataclass(slots=True, kw_only=True)
class WorkerTimes:
    """Implements `engine.latency.StepTimes`: the hello's times multiplied by the corrections of
    the latest counters; `current` is the product, made when it is asked for."""

    told: LinearTimes
    chunk_tokens: int
    prefill_correction: float = 1.0
    decode_correction: float = 1.0
    _current: LinearTimes | None = field(init=False, default=None)

    @staticmethod
    def of(hello: WorkerHello) -> WorkerTimes:
        times = LinearTimes.of(hello.step_times)
        return WorkerTimes(told=times, chunk_tokens=hello.prefill_chunk_tokens)

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
            chunk_tokens=self.chunk_tokens,
            prefill_correction=prefill,
            decode_correction=decode,
        )

    def step_s(self, work: StepWork) -> float:
        return self.current.step_s(work)

    def prompts_s(self, work: StepWork) -> float:
        """All prompts of `work`, in as many steps as it takes."""
        return self.current.chunked_s(work, self.chunk_tokens)

    def decode_s(self, sequences: int, kv_tokens: int) -> float:
        return self.current.decode_s(sequences, kv_tokens)

    def decode_run_s(self, sequences: int, kv_tokens: int, steps: int) -> float:
        """Steps in a row, each of which adds a token to each context."""
        return self.current.decode_run_s(sequences, kv_tokens, steps)

    def decode_steps_within(self, sequences: int, kv_tokens: int, span_s: float) -> int:
        """The most steps in a row that end within `span_s`."""
        return self.current.decode_steps_within(sequences, kv_tokens, span_s)
