"""How many workers' time the offered work takes, by the latency model of the workers. Pure.

Prefill: the seconds of compute that prompts need. A prompt also waits, the longer the busier the
workers are: so busy may they be that nine of ten prompts keep their time to first token (waiting
time of a queue with several servers: Sakasegawa 1977, with the spread of prompts' lengths).
Decode: output tokens, by the largest batch whose step keeps the time per output token and whose
KV fits; some places stay free for how the number of sequences swings (its square root).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, inf, sqrt

from engine.core.step_times import LinearTimes
from kvrelay.messages import WorkerHello
from router.core.load.flow import OUTPUTS_UNLIKE
from router.core.load.offered import OfferedWork

NOTHING = 1e-6
"""Requests per second."""
DOUBT = 2.0
"""Standard deviations."""
WAITS_LONG = 2.3
"""Nine of ten wait less than so many mean waiting times, if these are spread exponentially."""
_BISECTIONS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerModel:
    """One worker: its step times, and what fits into its steps and its KV pool. A sequence holds
    `block_tokens` beside its context: its last block is not full, and admission counts it whole."""

    times: LinearTimes
    chunk_tokens: int
    most_sequences: int
    kv_tokens: int
    block_tokens: int


def model_of(hello: WorkerHello) -> WorkerModel:
    return WorkerModel(
        times=LinearTimes.of(hello.step_times),
        chunk_tokens=hello.prefill_chunk_tokens,
        most_sequences=hello.max_running_requests,
        kv_tokens=hello.total_blocks * hello.block_size,
        block_tokens=hello.block_size,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """`prefill`, `decode`: workers that would be busy all the time; their `_chance`: standard
    deviations by chance alone, as shares of these. `prompt_s`: of a prompt alone;
    `variation`: squared, of prompts' times; `batch`: sequences of a decode worker at most."""

    prefill: float
    decode: float
    prompt_s: float
    variation: float
    ttft_s: float | None
    batch: int
    prefill_chance: float = 0.0
    decode_chance: float = 0.0

    @staticmethod
    def of(
        rate: OfferedWork,
        model: WorkerModel,
        over_s: float = inf,
        bursts: tuple[float, float] = (1.0, 1.0),
    ) -> Needs:
        """`rate`: per second, a mean over so long. Requests come by chance: the sum of their work
        has the variance of the sum of its squares, times what `bursts` of prompts and of outputs
        add."""
        rate = rate if rate.requests > NOTHING else OfferedWork()
        prefill = _prefill_s(rate, model)
        requests = max(rate.requests, 1e-9)
        mean = rate.prompt_tokens / requests
        squared = rate.prompt_squares / requests / mean**2 - 1 if mean else 0.0
        batch = decode_batch(rate, model)
        return Needs(
            prefill=prefill,
            decode=_decode_s(rate, model, batch),
            prompt_s=prefill / requests,
            variation=max(0.0, squared),
            ttft_s=rate.ttft_s / rate.with_ttft if rate.with_ttft > requests / 2 else None,
            batch=batch,
            prefill_chance=sqrt(bursts[0] * rate.prompt_squares / over_s)
            / max(rate.prompt_tokens, 1e-9),
            decode_chance=sqrt(bursts[1] * OUTPUTS_UNLIKE / (requests * over_s)),
        )

    def doubted(self, *, more_prefill: bool) -> Needs:
        """As they may be if chance speaks for more prefill workers, or for more decode workers."""
        sign = -1.0 if more_prefill else 1.0
        return replace(
            self,
            prefill=self.prefill * max(0.0, 1 + sign * DOUBT * self.prefill_chance),
            decode=self.decode * max(0.0, 1 - sign * DOUBT * self.decode_chance),
        )

    def with_decode_of(self, other: Needs) -> Needs:
        return replace(
            self, decode=other.decode, batch=other.batch, decode_chance=other.decode_chance
        )

    def scaled(self, prefill: float, decode: float) -> Needs:
        return replace(self, prefill=self.prefill * prefill, decode=self.decode * decode)

    # --- what so many workers can do --------------------------------------------------------------

    def prefill_workers(self, most: int) -> int:
        """The fewest that could do all of it in time; `most` if even these could not."""
        return _fewest(self.prefill, self.prefill_capacity, most)

    def decode_workers(self, most: int) -> int:
        return _fewest(self.decode, self.decode_capacity, most)

    def prefill_capacity(self, workers: int) -> float:
        """Of `prefill`, in time. A prompt that takes longer than its objective adds nobody: no
        number of workers would help it."""
        bounded = self.ttft_s is not None and 0 < self.prompt_s < self.ttft_s
        if not bounded or not workers:
            return float(workers)
        assert self.ttft_s is not None
        allowed = (self.ttft_s - self.prompt_s) / self.prompt_s / WAITS_LONG
        low, high = 0.0, 1.0
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            keeps = _waiting(middle, workers, self.variation) <= allowed
            low, high = (middle, high) if keeps else (low, middle)
        return workers * low

    def decode_capacity(self, workers: int) -> float:
        """Of `decode`, with places left for chance."""
        places = workers * self.batch
        return workers * max(0.5, 1 - 1 / sqrt(places)) if places else 0.0

    def served(self, prefill: int, decode: int) -> float:
        """The share of the offered work that so many workers could do; above 1 what is left."""
        shares = [
            self.prefill_capacity(prefill) / self.prefill if self.prefill else 10.0,
            self.decode_capacity(decode) / self.decode if self.decode else 10.0,
        ]
        return min(shares)


def _fewest(work: float, capacity: Callable[[int], float], most: int) -> int:
    low, high = min(ceil(work), most), most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if capacity(middle) >= work else (middle + 1, high)
    return low


def _waiting(busy: float, workers: int, variation: float) -> float:
    """Mean waiting time, in service times."""
    if busy >= 1.0:
        return float("inf")
    queued = busy ** (sqrt(2 * (workers + 1)) - 1) / (workers * (1 - busy))
    return queued * (1 + variation) / 2


def _prefill_s(rate: OfferedWork, model: WorkerModel) -> float:
    """Prompts share steps when they queue: half of them are taken to begin one."""
    times = model.times
    chunks = rate.prompt_tokens / model.chunk_tokens + rate.requests / 2
    return (
        (times.prefill_overhead_s + times.prefill_sequence_s) * chunks
        + times.prefill_token_s * rate.prompt_tokens
        + times.prefill_pair_s * rate.prompt_pairs
    )


def decode_batch(rate: OfferedWork, model: WorkerModel) -> int:
    """The largest batch within the time per output token and the KV pool. An objective that not
    even one sequence alone could keep bounds nothing."""
    context = rate.context_tokens / rate.output_tokens if rate.output_tokens else 0.0
    known = model.times.decode_knots[-1][0] if model.times.decode_knots else model.most_sequences
    most = min(model.most_sequences, known)
    if context:
        most = max(1, min(most, int(model.kv_tokens / (context + model.block_tokens))))
    if rate.with_tpot <= rate.requests / 2:
        return most
    tpot_s = rate.tpot_s / rate.with_tpot
    fits = [n for n in (1, most) if _step_s(model, n, context) <= tpot_s]
    return most if not fits or most in fits else _between(model, context, tpot_s, most)


def _between(model: WorkerModel, context: float, tpot_s: float, most: int) -> int:
    low, high = 1, most
    while high - low > 1:
        middle = (low + high) // 2
        keeps = _step_s(model, middle, context) <= tpot_s
        low, high = (middle, high) if keeps else (low, middle)
    return low


def _step_s(model: WorkerModel, sequences: int, context: float) -> float:
    return model.times.decode_s(sequences, round(sequences * context))


def _decode_s(rate: OfferedWork, model: WorkerModel, batch: int) -> float:
    if not rate.output_tokens:
        return 0.0
    context = rate.context_tokens / rate.output_tokens
    return rate.output_tokens * _step_s(model, batch, context) / batch
