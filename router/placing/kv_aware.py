"""Prefill worker, decode worker and prefix source together, by predicted completion. Pure.

The best few of each role are looked at in all their pairs, so that what lies between two workers
counts. A way that keeps the request's objectives goes before one that doesn't, whatever their
times. A decode worker that may prefill too is one more way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import nsmallest
from math import inf
from typing import NamedTuple

from router.candidate import Candidate, PromptPrediction
from router.demand import Demand
from router.forecast.decode_outlook import BatchThen
from router.forecast.forecast import step_with
from router.placement import Against
from router.placing.local_prefill import IDLEST, holders, hurts, local_cost_s, local_way
from router.placing.policy import Choice, paired
from router.reserve import with_places
from router.view import WorkerView

_IDLE = (0.0, 0.0)
LOOKED_AT = 4
"""Workers of each role."""
LOOKED_AT_CLOSELY = 8
"""Of each role, from which these are taken: what a first look, by straight lines, finds best."""

Rank = tuple[Against, bool, float]


class Steps(NamedTuple):
    """`own_s` is a decode step with the request; `cost_s` adds by how much the others' get longer,
    so that the sum over all counts: a long context does least harm where few decode."""

    own_s: float
    cost_s: float


@dataclass(frozen=True, slots=True)
class KvAware:
    """`local_prefill`: decode workers may compute prompts themselves."""

    local_prefill: bool = False

    def candidates(self, demand: Demand, choice: Choice, now_s: float) -> Iterator[Candidate]:
        rank = partial(self._rank, demand, choice, now_s)
        prompts = self._prompts(demand, choice, now_s)
        joins_in_s = prompts[0][0].first_token_s if prompts else 0.0
        decodes = self._decodes(demand, choice.decodes, choice, joins_in_s, now_s)
        ranked = [
            (rank(way.prefill, decode, prompt, in_time, steps), way, decode)
            for prompt, way in prompts
            for in_time in (_in_time(demand, choice, prompt),)
            for steps, decode in decodes
        ]
        alone = self._decodes(demand, choice.alone, choice, joins_in_s, now_s)
        for steps, worker in alone:
            way = choice.sourced(demand, worker, None)
            prompt = choice.forecast.prompt(demand, way, now_s)
            in_time = _in_time(demand, choice, prompt)
            ranked.append((rank(None, worker, prompt, in_time, steps), way, worker))
        ranked.sort(key=lambda one: one[0])
        if self.local_prefill:
            best = ranked[0][0] if ranked else None
            ranked += self._locals(demand, choice, decodes, joins_in_s, best, now_s)
            ranked.sort(key=lambda one: one[0])
        for _, way, decode in ranked:
            yield Candidate(decode=decode, prefill=way.prefill, source=way.source)
        looked_at = {worker.incarnation for _, worker in (*decodes, *alone)}
        rest = (w for w in choice.decoders if w.incarnation not in looked_at)
        if self.local_prefill and not choice.prefills:
            yield from (Candidate(decode=worker, prefill=None) for worker in rest)
        else:
            yield from paired(choice, rest, lambda: [w for _, way in prompts if (w := way.prefill)])

    @staticmethod
    def _prompts(
        demand: Demand, choice: Choice, now_s: float
    ) -> list[tuple[PromptPrediction, Candidate]]:
        """The prefill workers that are done first, and when."""
        if not choice.decodes:
            return []
        anyone, forecast = choice.decodes[0], choice.forecast
        ways = [choice.sourced(demand, anyone, w) for w in _soonest(demand, choice, now_s)]
        timed = ((forecast.prompt(demand, way, now_s), way) for way in ways)
        return sorted(timed, key=_when_first)[:LOOKED_AT]

    @staticmethod
    def _decodes(
        demand: Demand,
        workers: Sequence[WorkerView],
        choice: Choice,
        joins_in_s: float,
        now_s: float,
    ) -> list[tuple[Steps, WorkerView]]:
        """Those where a step of all costs least, with all that it will meet; full ones only if all
        are."""
        forecast, joins_s = choice.forecast, now_s + joins_in_s
        ends_s = joins_s + _lasts_s(demand, workers)
        having_room = with_places(demand, workers) or workers
        if len(having_room) > LOOKED_AT_CLOSELY:
            having_room = nsmallest(LOOKED_AT_CLOSELY, having_room, key=_step_s)
        batches = ((w, forecast.batch_met(demand, w, joins_s, ends_s, now_s)) for w in having_room)
        timed = ((_steps(demand, batch, w), w) for w, batch in batches)
        return sorted(timed, key=lambda one: (one[0].cost_s, one[1].decode_load))[:LOOKED_AT]

    def _locals(
        self,
        demand: Demand,
        choice: Choice,
        decodes: Sequence[tuple[Steps, WorkerView]],
        joins_in_s: float,
        best: Rank | None,
        now_s: float,
    ) -> Iterator[tuple[Rank, Candidate, WorkerView]]:
        """Decode workers that compute the prompt themselves, where that is better than the `best`
        way without."""
        near = decodes[:IDLEST] if choice.prefills else decodes
        more = [w for w in holders(demand, choice) if all(w is not one for _, one in near)]
        if more:
            near = [*near, *self._decodes(demand, more, choice, joins_in_s, now_s)]
        for steps, worker in near:
            local = local_way(demand, choice, worker, now_s)
            if local is None:
                continue
            in_time = _in_time(demand, choice, local.prompt)
            rank = self._rank(demand, choice, now_s, None, worker, local.prompt, in_time, steps)
            alike, missed, done_s = rank
            rank = (alike, missed, done_s + local_cost_s(local.prompt, worker))
            if best is not None and rank >= best:
                continue
            if not hurts(choice, worker, local.prompt, steps.own_s, now_s):
                yield rank, local.way, worker

    @staticmethod
    def _rank(
        demand: Demand,
        choice: Choice,
        now_s: float,
        prefill: WorkerView | None,
        decode: WorkerView,
        prompt: PromptPrediction,
        in_time: bool,
        steps: Steps,
    ) -> Rank:
        """As `Forecast.predict` has it, but for the moment at which the request joins."""
        gaps, first_s = max(1, demand.output_tokens - 1), prompt.first_token_s
        forecast, tpot_s = choice.forecast, demand.objectives.tpot_s
        paused_s = forecast.handoff_s(demand, prefill, decode, prompt.prefill_s)
        paused_s += forecast.waits_s(prefill, decode, first_s + paused_s, now_s)
        kept = in_time and (
            tpot_s is None or forecast.tpot.apply(steps.own_s + paused_s / gaps) <= tpot_s
        )
        completes_s = first_s + paused_s + steps.cost_s * gaps
        return choice.against(prefill, decode), not kept, completes_s


def _in_time(demand: Demand, choice: Choice, prompt: PromptPrediction) -> bool:
    ttft_s = demand.objectives.ttft_s
    if ttft_s is None:
        return True
    return demand.waited_s + choice.forecast.ttft.apply(prompt.first_token_s) <= ttft_s


def _when_first(one: tuple[PromptPrediction, Candidate]) -> tuple[float, int]:
    prompt, way = one
    return prompt.first_token_s, way.prefiller.prefill_load


def _lasts_s(demand: Demand, workers: Sequence[WorkerView]) -> float:
    """How long it decodes, beside what one of them has now."""
    if not workers:
        return 0.0
    outlook = workers[0].outlook
    all_there = BatchThen(outlook.sequences, outlook.kv_tokens)
    return step_with(demand, all_there, workers[0]) * demand.output_tokens


def _steps(demand: Demand, batch: BatchThen, worker: WorkerView) -> Steps:
    own_s = step_with(demand, batch, worker)
    if not batch.sequences or own_s == inf:
        return Steps(own_s, own_s)
    sequences = min(batch.sequences, worker.hello.max_running_requests)
    without_s = worker.decode_s(sequences, batch.kv_tokens)
    return Steps(own_s, own_s + sequences * max(0.0, own_s - without_s))


def _soonest(demand: Demand, choice: Choice, now_s: float) -> Sequence[WorkerView]:
    """By the queue, and the tokens that the worker lacks; pulling comes in the closer look."""
    workers = choice.prefills
    if len(workers) <= LOOKED_AT_CLOSELY:
        return workers
    prompt_tokens, priority = demand.prompt_tokens, demand.priority
    held = demand.held.tokens_each(workers)
    first_s = [
        worker.queue.wait_s(priority, now_s, worker.counters.prefill_waiting_tokens)
        + (prompt_tokens - tokens) * worker.speed.prompt_token_s
        for worker, tokens in zip(workers, held, strict=True)
    ]
    soonest = nsmallest(LOOKED_AT_CLOSELY, range(len(workers)), key=first_s.__getitem__)
    return [workers[at] for at in soonest]


def _step_s(worker: WorkerView) -> tuple[float, float]:
    load = worker.decode_load
    return (load * worker.speed.full_step_s, load) if load else _IDLE
