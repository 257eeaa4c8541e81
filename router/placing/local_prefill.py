"""Prompts that a decode worker had better compute itself: nothing is handed over, but its batch
waits for them. Pure.

Suggested are short rests of prompts, at the decode workers that are best otherwise or have most of
the prompt cached, where all who decode keep their TPOT objectives. Without any prefill worker,
every one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import nlargest

from router.candidate import Candidate, PromptPrediction
from router.demand import Demand
from router.placing.policy import Choice
from router.view import WorkerView

MOST_CHUNKS = 8
"""A longer rest is a prefill worker's: that is what these are for."""
HOLDERS = 2
"""Of those that have something of the prompt cached, so many are looked at."""


def holders(demand: Demand, choice: Choice) -> list[WorkerView]:
    """The decode workers with most of the prompt."""
    if not choice.decodes:
        return []
    held = demand.held.blocks(choice.decodes[0])
    if not held:
        return []
    having = [worker for worker in choice.decodes if worker.incarnation in held]
    return nlargest(HOLDERS, having, key=lambda w: (held[w.incarnation], -w.decode_load))


def local_ways(
    demand: Demand, choice: Choice, workers: Sequence[WorkerView], now_s: float
) -> Iterator[tuple[Candidate, PromptPrediction]]:
    """With what is predicted of the prompt there."""
    for worker in workers:
        if choice.prefills and not _is_short(demand, worker):
            continue
        way = Candidate(decode=worker, prefill=None)
        yield way, choice.forecast.prompt(demand, way, now_s)


def _is_short(demand: Demand, worker: WorkerView) -> bool:
    left = demand.prompt_tokens - demand.held.tokens(worker)
    return left <= MOST_CHUNKS * worker.hello.prefill_chunk_tokens


def hurts(
    choice: Choice, worker: WorkerView, prompt: PromptPrediction, step_s: float, now_s: float
) -> bool:
    """Somebody who decodes there, with steps of `step_s`, would miss an objective."""
    if not choice.prefills:
        return False
    pending_s, margin = worker.queue.all_s(now_s), choice.forecast.tpot
    return not worker.outlook.bears(prompt.pause_s, pending_s, step_s, margin, now_s)
