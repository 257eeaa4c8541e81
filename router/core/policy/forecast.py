"""What becomes of a request on a pair of workers: TTFT, and TPOT when it gets there. Pure.

The prefill side: the queue ahead of it, the prefix pulled or not, the tokens left to compute. The
decode side at the time the request joins: the batch then, counting what is on its way already.

How long the prompts are that a router takes. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from engine.core.step_times import StepWork, decode_work, prefill_work
from kvrelay.types import Incarnation, Role
from router.core.load.decode_outlook import BatchThen, Lifetimes, Likely
from router.core.load.margins import Margin
from router.core.load.output_lengths import OutputLengths
from router.core.state.candidate import (
    Arrival,
    Candidate,
    DecodePrediction,
    Prediction,
    PromptPrediction,
)
from router.core.state.demand import Demand
from router.core.state.worker_view import WorkerView

_NEW_SHARE = 0.02


@dataclass(slots=True)
class UsualPrompts:
    """Of those taken: where long ones are refused, usual ones get shorter, until there is room."""

    tokens: float = 0.0
    _seen: int = 0

    def saw(self, prompt_tokens: int) -> None:
        self._seen += 1
        share = max(_NEW_SHARE, 1 / self._seen)
        self.tokens += share * (prompt_tokens - self.tokens)

    def longer_by(self, demand: Demand) -> int:
        """By how many tokens, of all its choices; 0 before any was seen."""
        longer = demand.prompt_tokens - self.tokens if self.tokens else 0
        return demand.choices * round(longer)


UNMEASURED_BYTES_PER_S = 1e11
"""Of a worker's links as long as none has been measured: a guess, which should refuse nobody."""
ALIKE = 0.05
"""Steps that differ by no more are taken to last equally long."""
CONFIDENCE = 0.95
"""The share of admitted requests that are to keep their objectives."""
AT_FIRST = 0.02
"""Before any has come, first tokens are taken to be later than predicted by this share."""
LAST_LAYERS = 0.25
"""Of a chunk's KV, what leaves when all of it is computed."""


def at_once(priority: int, now_s: float) -> float:
    """Prompts don't wait at the router."""
    return 0.0


@dataclass(slots=True)
class Forecast:
    """`turn_in_s`: after how many seconds a new prompt of a priority leaves the router. `ttft` and
    `tpot` say how far to trust it. `lifetimes` and `prompts`: how long outputs and inputs are."""

    workers: Mapping[Incarnation, WorkerView]
    turn_in_s: Callable[[int, float], float] = at_once
    ttft: Margin = field(default_factory=lambda: Margin(confidence=0.5))
    tpot: Margin = field(default_factory=lambda: Margin(confidence=0.5))
    lifetimes: Lifetimes = field(default_factory=Lifetimes)
    prompts: UsualPrompts = field(default_factory=UsualPrompts)

    def predict(self, demand: Demand, candidate: Candidate, now_s: float) -> Prediction:
        prompt, joins_in_s, paused_s, batches = self._arrival(demand, candidate, now_s)
        decode = _decode(demand, candidate.decode, joins_in_s, batches)
        gaps = max(1, demand.output_tokens - 1)
        tpot_s = decode.step_s + paused_s / gaps
        decodes_s = 0.0 if demand.is_prompt_only else decode.step_s * gaps
        return Prediction(
            prompt=prompt,
            decode=decode,
            ttft_s=demand.waited_s + self.ttft.overhead_s + prompt.first_token_s,
            tpot_s=tpot_s,
            ttft_at_most_s=demand.waited_s + self.ttft.apply(prompt.first_token_s),
            tpot_at_most_s=self.tpot.apply(tpot_s),
            completes_in_s=joins_in_s + decodes_s,
            choices=demand.choices,
            kv_tokens=demand.kv_tokens,
            asked=demand.objectives,
        )

    def _arrival(self, demand: Demand, candidate: Candidate, now_s: float) -> Arrival:
        if demand.known is None:
            return self._arrives(demand, candidate, now_s)
        found = demand.known.arrivals.get(candidate.way)
        if found is None:
            found = self._arrives(demand, candidate, now_s)
            demand.known.arrivals[candidate.way] = found
        return found

    def _arrives(self, demand: Demand, candidate: Candidate, now_s: float) -> Arrival:
        prefill, decode = candidate.prefill, candidate.decode
        prompt = self.prompt(demand, candidate, now_s)
        handoff_s = self.handoff_s(demand, prefill, decode, prompt.prefill_s)
        joins_in_s = prompt.first_token_s + handoff_s
        paused_s = handoff_s + self.waits_s(prefill, decode, joins_in_s, now_s)
        batches = self._met_then(demand, decode, now_s + joins_in_s, now_s)
        return Arrival(prompt, joins_in_s, paused_s, batches)

    # --- prefill side ---------------------------------------------------------------------------

    def prompt(self, demand: Demand, candidate: Candidate, now_s: float) -> PromptPrediction:
        if demand.known is None:
            return self._prompt(demand, candidate, now_s)
        decode, prefill, source = candidate.way
        way = (prefill or decode, prefill is None, source)
        found = demand.known.prompts.get(way)
        if found is None:
            found = demand.known.prompts[way] = self._prompt(demand, candidate, now_s)
            return found
        reached_s = messages_s(candidate)
        return found if found.messages_s == reached_s else replace(found, messages_s=reached_s)

    def _prompt(self, demand: Demand, candidate: Candidate, now_s: float) -> PromptPrediction:
        worker = candidate.prefiller
        beside = self._beside(candidate, now_s)
        own = demand.held.tokens(worker)
        pull_s, prefill_s = 0.0, prompt_s(worker, demand.prompt_tokens, own, beside)
        source = candidate.source
        if source is not None and (more := source.blocks * worker.hello.block_size) > own:
            pulled_s = self._move_s(worker, source.peer, more - own)
            rest_s = prompt_s(worker, demand.prompt_tokens, more, beside)
            if pulled_s + rest_s < prefill_s:
                pull_s, prefill_s = pulled_s, rest_s
        queue_s = self._queue_s(demand, candidate, now_s)
        if not candidate.is_local:
            queue_s += demand.promised.prefill_s
            return PromptPrediction(
                queue_s=queue_s,
                pull_s=pull_s,
                prefill_s=prefill_s,
                messages_s=messages_s(candidate),
            )
        step_s = 0.0 if beside is None else worker.step_s(beside)  # one runs already
        steps = -(-(demand.prompt_tokens - own) // worker.chunk_tokens)
        return PromptPrediction(
            queue_s=queue_s + step_s,
            pull_s=pull_s,
            prefill_s=prefill_s,
            pause_s=max(0.0, prefill_s - steps * step_s) if beside is not None else 0.0,
            messages_s=messages_s(candidate),
        )

    def _queue_s(self, demand: Demand, candidate: Candidate, now_s: float) -> float:
        """At the worker, and before it at the router where prompts wait there."""
        worker = candidate.prefiller
        here_s = wait_s(worker, demand.priority, now_s)
        if self.turn_in_s is at_once or not worker.prefills:
            return here_s
        return max(here_s, self.turn_in_s(demand.priority, now_s))

    @staticmethod
    def _beside(candidate: Candidate, now_s: float) -> StepWork | None:
        """A decode worker's chunks share their steps with its batch."""
        if candidate.prefill is not None:
            return None
        worker = candidate.decode
        batch = worker.outlook.at(now_s, now_s)
        sequences = min(batch.sequences, worker.hello.max_running_requests)
        return decode_work(sequences, batch.kv_tokens) if sequences else None

    @staticmethod
    def waits_s(
        prefill: WorkerView | None, decode: WorkerView, joins_in_s: float, now_s: float
    ) -> float:
        """For the prompts that its decode worker still computes when it joins."""
        if prefill is None or not decode.queue.tokens or decode.own_role is not Role.DECODE:
            return 0.0
        return max(0.0, decode.queue.all_s(now_s) - joins_in_s)

    # --- between --------------------------------------------------------------------------------

    def handoff_s(
        self, demand: Demand, prefill: WorkerView | None, decode: WorkerView, prefill_s: float
    ) -> float:
        """What is left to send after the last chunk's compute. The rest was sent behind the
        computing, and so were that chunk's first layers; what the decode worker has isn't sent."""
        if prefill is None:
            return 0.0
        bytes_per_s, latency_s = self._link(prefill, decode.incarnation)
        hello, missing = prefill.hello, demand.prompt_tokens - demand.held.tokens(decode)
        last = min(missing, hello.prefill_chunk_tokens) * LAST_LAYERS
        token_s = hello.kv_token_bytes / bytes_per_s
        return latency_s + max(last * token_s, missing * token_s - prefill_s)

    def _move_s(self, worker: WorkerView, peer: Incarnation, tokens: int) -> float:
        bytes_per_s, latency_s = self._link(worker, peer)
        return latency_s + tokens * worker.hello.kv_token_bytes / bytes_per_s

    def _link(self, worker: WorkerView, peer: Incarnation) -> tuple[float, float]:
        """Bytes per second and latency of the one that either of the two has opened, else as fast
        as the sender's slowest."""
        link = worker.link(peer)
        if link is None and peer in self.workers:
            link = self.workers[peer].link(worker.incarnation)
        if link is not None and link.bytes_per_s:
            return link.bytes_per_s, link.latency_s
        usual = worker.slowest_bytes_per_s or UNMEASURED_BYTES_PER_S
        return usual, 0.0 if link is None else link.latency_s

    # --- decode side ----------------------------------------------------------------------------

    def decode(
        self, demand: Demand, worker: WorkerView, joins_in_s: float, now_s: float
    ) -> DecodePrediction:
        batches = self._met_then(demand, worker, now_s + joins_in_s, now_s)
        return _decode(demand, worker, joins_in_s, batches)

    def _met_then(self, demand: Demand, worker: WorkerView, then_s: float, now_s: float) -> Likely:
        mean, at_most = self._own_then(worker, then_s, now_s)
        others = _others(demand, worker)
        return Likely(_with(others, mean), _with(others, at_most))

    def _own_then(self, worker: WorkerView, then_s: float, now_s: float) -> Likely:
        """Steps take as long as now at first, and as with that batch at last."""
        outlook, told = worker.outlook, worker.counters
        if not outlook.sequences:
            return Likely(BatchThen(0, 0), BatchThen(0, 0))
        step_s = worker.decode_s(max(1, told.decode_sequences), told.decode_kv_tokens)
        if not 0 < step_s < inf:
            return Likely(*[outlook.at(then_s, now_s)] * 2)
        outlooks = (one.outlook for one in self.workers.values())
        survivals = self.lifetimes.by_tier(outlooks, now_s)
        first = outlook.likely(then_s, now_s, step_s, survivals)
        last_s = worker.decode_s(max(1, first.mean.sequences), first.mean.kv_tokens)
        if last_s == inf or abs(last_s - step_s) < ALIKE * step_s:
            return first
        return outlook.likely(then_s, now_s, (step_s + last_s) / 2, survivals)

    @staticmethod
    def batch_met(
        demand: Demand, worker: WorkerView, joins_s: float, ends_s: float, now_s: float
    ) -> BatchThen:
        """All those that it meets."""
        return _with(_others(demand, worker), worker.outlook.met_by(joins_s, ends_s, now_s))


def open_forecast(
    workers: Mapping[Incarnation, WorkerView],
    turn_in_s: Callable[[int, float], float],
    lengths: OutputLengths,
) -> Forecast:
    each = (1 + CONFIDENCE) / 2  # of two objectives
    return Forecast(
        workers,
        turn_in_s,
        ttft=Margin(confidence=each, at_first=AT_FIRST),
        tpot=Margin(confidence=each),
        lifetimes=Lifetimes(lengths),
    )


def messages_s(candidate: Candidate) -> float:
    """Until the prefill worker begins, if it is free: as measured at these workers."""
    reserving_s = 0.0 if candidate.prefill is None else candidate.decode.reserving.usual_s
    return reserving_s + candidate.prefiller.dispatching.usual_s


def _decode(
    demand: Demand, worker: WorkerView, joins_in_s: float, batches: Likely
) -> DecodePrediction:
    mean, total_blocks = batches.mean, worker.hello.total_blocks
    return DecodePrediction(
        joins_in_s=joins_in_s,
        batch=batches.at_most,
        step_s=step_with(demand, mean, worker),
        needed_blocks=needed_blocks(demand, worker),
        free_blocks=total_blocks - blocks_of(worker, mean.kv_tokens) - mean.sequences,
    )


def _others(demand: Demand, worker: WorkerView) -> BatchThen | None:
    """Those that were promised a place, and those of other routers, as far as the worker has told
    of them, stay."""
    outlook, promised = worker.outlook, demand.promised
    sequences, kv_tokens = promised.sequences, promised.kv_tokens
    others = worker.counters.running - outlook.sequences
    if others > 0:
        sequences += others
        used = worker.counters.active_blocks * worker.hello.block_size
        kv_tokens += max(0, used - outlook.kv_tokens)
    return BatchThen(round(sequences), round(kv_tokens)) if sequences else None


def _with(others: BatchThen | None, own: BatchThen) -> BatchThen:
    if others is None:
        return own
    return BatchThen(own.sequences + others.sequences, own.kv_tokens + others.kv_tokens)


def wait_s(worker: WorkerView, priority: float, now_s: float) -> float:
    """Behind this router's prompts, and what others have sent there."""
    waiting, queue = worker.counters.prefill_waiting_tokens, worker.queue
    if not queue.token_s:
        return prompt_s(worker, waiting, 0) if waiting else 0.0
    return queue.wait_s(priority, now_s, waiting)


def step_with(demand: Demand, batch: BatchThen, worker: WorkerView) -> float:
    """Seconds of a decode step that the request is in; the worker runs no more than its places."""
    sequences = min(batch.sequences + demand.choices, worker.hello.max_running_requests)
    return worker.decode_s(sequences, batch.kv_tokens + demand.kv_tokens)


def needed_blocks(demand: Demand, worker: WorkerView) -> int:
    """Choices share the prompt's."""
    outputs = demand.choices * blocks_of(worker, (demand.output_tokens + 1) // 2)
    return blocks_of(worker, demand.prompt_tokens) + outputs


def blocks_of(worker: WorkerView, tokens: int) -> int:
    return -(-tokens // worker.hello.block_size)


def prompt_s(
    worker: WorkerView, prompt_tokens: int, cached_tokens: int, beside: StepWork | None = None
) -> float:
    """Seconds to compute what is not cached, chunk by chunk, `beside` in each of the steps."""
    if beside is None:
        return worker.prompt_s(prompt_tokens, cached_tokens)
    chunk, seconds, done = worker.chunk_tokens, 0.0, cached_tokens
    while done < prompt_tokens:
        take = min(chunk, prompt_tokens - done)
        seconds += worker.step_s(prefill_work(take, done) + beside)
        done += take
    return seconds
