"""How long a worker takes for prompts and for decode steps, as it says now. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.correction import CorrectedTimes
from engine.latency import StepWork
from engine.latency_fit import LinearTimes
from kvrelay.messages import Counters, WorkerHello


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTimes:
    """Implements `engine.latency.StepTimes`: the hello's times multiplied by the corrections of
    the latest counters."""

    times: LinearTimes
    chunk_tokens: int
    prefill_correction: float = 1.0
    decode_correction: float = 1.0

    @staticmethod
    def of(hello: WorkerHello) -> WorkerTimes:
        times = LinearTimes.of(hello.step_times)
        return WorkerTimes(times=times, chunk_tokens=hello.prefill_chunk_tokens)

    def corrected(self, counters: Counters) -> WorkerTimes:
        return replace(
            self,
            prefill_correction=counters.prefill_correction,
            decode_correction=counters.decode_correction,
        )

    def step_s(self, work: StepWork) -> float:
        corrected = CorrectedTimes(self.times, self.prefill_correction, self.decode_correction)
        return corrected.step_s(work)

    def prompts_s(self, work: StepWork) -> float:
        """All prompts of `work`, in as many steps as it takes."""
        return self.times.chunked_s(work, self.chunk_tokens) * self.prefill_correction

    def decode_s(self, sequences: int, kv_tokens: int) -> float:
        return self.times.decode_s(sequences, kv_tokens) * self.decode_correction

    def decode_run_s(self, sequences: int, kv_tokens: int, steps: int) -> float:
        """Steps in a row, each of which adds a token to each context."""
        return self.times.decode_run_s(sequences, kv_tokens, steps) * self.decode_correction

    def decode_steps_within(self, sequences: int, kv_tokens: int, span_s: float) -> int:
        """The most steps in a row that end within `span_s`."""
        uncorrected_s = span_s / self.decode_correction
        return self.times.decode_steps_within(sequences, kv_tokens, uncorrected_s)
