"""`kv_aware`, and prompts that a decode worker had better compute itself: nothing is handed over,
but its batch waits for them. Pure.

Suggested are short rests of prompts, at the decode workers that are best otherwise or have most of
the prompt cached, where all who decode keep their TPOT objectives. Without any prefill worker,
every one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import nlargest
from typing import NamedTuple

from router.candidate import Candidate, PromptPrediction
from router.demand import Demand
from router.placing.kv_aware import Look, Ranked, by_rank, cheapest, is_in_time, rank_of, ways
from router.placing.policy import Choice
from router.view import WorkerView

MOST_CHUNKS = 8
"""A longer rest is a prefill worker's: that is what these are for."""
LEAST_GAIN = 0.1
"""Of the time to its first token a request is to win so much, in that or in its handoff."""
OTHERS = 0.1
"""What each of those that decode there waits counts so much of what the request itself does."""
IDLEST, HOLDERS = 2, 2
"""So many are looked at, of those that are best otherwise and of those with most of the prompt."""


@dataclass(frozen=True, slots=True)
class LocalPrefill:
    def candidates(self, demand: Demand, choice: Choice, now_s: float) -> Iterator[Candidate]:
        look = Look.at(demand, choice, now_s)
        yield from ways(sorted((*look.ranked, *_better(look)), key=by_rank))
        if choice.prefills:
            yield from look.others()
        else:
            yield from (Candidate(decode=worker, prefill=None) for worker in look.rest())


def _better(look: Look) -> Iterator[Ranked]:
    """Decode workers that compute the prompt themselves, where that is better than the best way
    without."""
    demand, choice, now_s = look.demand, look.choice, look.now_s
    near = look.decodes[:IDLEST] if choice.prefills else look.decodes
    more = [w for w in holders(demand, choice) if all(w is not one for _, one in near)]
    if more:
        near = [*near, *cheapest(demand, more, choice, look.joins_in_s, now_s)]
    for steps, worker in near:
        local = local_way(demand, choice, worker, now_s)
        if local is None:
            continue
        in_time = is_in_time(demand, choice, local.prompt)
        rank = rank_of(demand, choice, now_s, None, worker, local.prompt, in_time, steps)
        alike, missed, done_s = rank
        rank = (alike, missed, done_s + local_cost_s(local.prompt, worker))
        if look.ranked and rank >= look.ranked[0][0]:
            continue
        if not hurts(choice, worker, local.prompt, steps.own_s, now_s):
            yield rank, local.way, worker


def holders(demand: Demand, choice: Choice) -> list[WorkerView]:
    """The decode workers with most of the prompt."""
    if not choice.decodes:
        return []
    held = demand.held.blocks(choice.decodes[0])
    if not held:
        return []
    having = [worker for worker in choice.decodes if worker.incarnation in held]
    return nlargest(HOLDERS, having, key=lambda w: (held[w.incarnation], -w.decode_load))


class Local(NamedTuple):
    way: Candidate
    prompt: PromptPrediction


def local_way(demand: Demand, choice: Choice, worker: WorkerView, now_s: float) -> Local | None:
    """None where the rest of the prompt is too long."""
    left = demand.prompt_tokens - demand.held.tokens(worker)
    if choice.prefills and left > MOST_CHUNKS * worker.hello.prefill_chunk_tokens:
        return None
    way = Candidate(decode=worker, prefill=None)
    return Local(way, choice.forecast.prompt(demand, way, now_s))


def hurts(
    choice: Choice, worker: WorkerView, prompt: PromptPrediction, step_s: float, now_s: float
) -> bool:
    """Somebody who decodes there, with steps of `step_s`, would miss an objective."""
    if not choice.prefills:
        return False
    pending_s, margin = worker.queue.all_s(now_s), choice.forecast.tpot
    return not worker.outlook.bears(prompt.pause_s, pending_s, step_s, margin, now_s)


def local_cost_s(prompt: PromptPrediction, worker: WorkerView) -> float:
    """What speaks against it, beside its own time."""
    return OTHERS * prompt.pause_s * worker.outlook.sequences + LEAST_GAIN * prompt.first_token_s
