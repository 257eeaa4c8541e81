"""Prefill worker, decode worker and prefix source together, by predicted completion. Pure.

The best few of each role are looked at in all their pairs, so that what lies between two workers
counts. A way that keeps the request's objectives goes before one that doesn't, whatever their
times. A decode worker that may prefill too is one more way. A request that was admitted before and
has lost its worker is computed by the decode worker that has most of it, if prefill workers lack
more.

`kv_aware`, and prompts that a decode worker had better compute itself: nothing is handed over,
but its batch waits for them. Pure.

Suggested are short rests of prompts, at the decode workers that are best otherwise or have most of
the prompt cached, where all who decode keep their TPOT objectives. Without any prefill worker,
every one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import nlargest, nsmallest
from math import inf
from operator import itemgetter
from typing import NamedTuple

from kvrelay.types import value
from router.core.load.decode_outlook import BatchThen
from router.core.policy.admission import with_places
from router.core.policy.forecast import step_with
from router.core.policy.placement import WorkerChoice, paired
from router.core.state.candidate import Candidate, PromptPrediction
from router.core.state.demand import Demand
from router.core.state.quarantine import NOTHING_AGAINST, Against, trusted
from router.core.state.worker_view import WorkerView

_IDLE = (0.0, 0.0)
LOOKED_AT = 4
"""Workers of each role."""
LOOKED_AT_CLOSELY = 8
"""Of each role, from which these are taken: what a first look, by straight lines, finds best."""

Rank = tuple[Against, bool, float]
Ranked = tuple[Rank, Candidate, WorkerView]
"""With the decode worker, which may be another one than that of the candidate."""
by_rank: Callable[[Ranked], Rank] = itemgetter(0)


class Steps(NamedTuple):
    """`own_s` is a decode step with the request; `cost_s` adds by how much the others' get longer,
    so that the sum over all counts: a long context does least harm where few decode."""

    own_s: float
    cost_s: float


@dataclass(frozen=True, slots=True)
class KvAware:
    def candidates(self, demand: Demand, choice: WorkerChoice, now_s: float) -> Iterator[Candidate]:
        look = Look.at(demand, choice, now_s)
        if demand.displaced:
            yield from _where_it_lies(look)
        yield from ways(look.ranked)
        yield from look.others()


@value
class Look:
    """What was found for one request. `prompts`: the prefill workers that are done first, and when.
    `decodes` and `alone`: the decode workers where a step costs least. `ranked`: their pairs, best
    first."""

    demand: Demand
    choice: WorkerChoice
    now_s: float
    prompts: Sequence[tuple[PromptPrediction, Candidate]]
    joins_in_s: float
    decodes: Sequence[tuple[Steps, WorkerView]]
    alone: Sequence[tuple[Steps, WorkerView]]
    ranked: Sequence[Ranked]

    @staticmethod
    def at(demand: Demand, choice: WorkerChoice, now_s: float) -> Look:
        rank = partial(rank_of, demand, choice, now_s)
        prompts = _prompts(demand, choice, now_s)
        joins_in_s = prompts[0][0].first_token_s if prompts else 0.0
        decodes = cheapest(demand, choice.decodes, choice, joins_in_s, now_s)
        ranked: list[Ranked] = [
            (rank(way.prefill, decode, prompt, in_time, steps), way, decode)
            for prompt, way in prompts
            for in_time in (is_in_time(demand, choice, prompt),)
            for steps, decode in decodes
        ]
        alone = cheapest(demand, choice.alone, choice, joins_in_s, now_s)
        for steps, worker in alone:
            way = choice.sourced(demand, worker, None)
            prompt = choice.forecast.prompt(demand, way, now_s)
            in_time = is_in_time(demand, choice, prompt)
            ranked.append((rank(None, worker, prompt, in_time, steps), way, worker))
        ranked.sort(key=by_rank)
        return Look(
            demand=demand,
            choice=choice,
            now_s=now_s,
            prompts=prompts,
            joins_in_s=joins_in_s,
            decodes=decodes,
            alone=alone,
            ranked=ranked,
        )

    def others(self) -> Iterator[Candidate]:
        """The decode workers that were not looked at closely, each with a prefill worker."""
        prefills = [w for _, way in self.prompts if (w := way.prefill)]
        return paired(self.choice, self.rest(), lambda: prefills)

    def rest(self) -> Iterator[WorkerView]:
        looked_at = {worker.incarnation for _, worker in (*self.decodes, *self.alone)}
        return (w for w in self.choice.decoders if w.incarnation not in looked_at)


def ways(ranked: Iterable[Ranked]) -> Iterator[Candidate]:
    for _, way, decode in ranked:
        yield Candidate(decode=decode, prefill=way.prefill, source=way.source)


def _prompts(
    demand: Demand, choice: WorkerChoice, now_s: float
) -> list[tuple[PromptPrediction, Candidate]]:
    if not choice.decodes:
        return []
    anyone, forecast = choice.decodes[0], choice.forecast
    ways = [choice.sourced(demand, anyone, w) for w in _soonest(demand, choice, now_s)]
    timed = [(forecast.prompt(demand, way, now_s), way) for way in ways]
    return sorted(timed, key=_when_first)[:LOOKED_AT]


def cheapest(
    demand: Demand,
    workers: Sequence[WorkerView],
    choice: WorkerChoice,
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
    batches = [(w, forecast.batch_met(demand, w, joins_s, ends_s, now_s)) for w in having_room]
    timed = [(_steps(demand, batch, w), w) for w, batch in batches]
    return sorted(timed, key=lambda one: (one[0].cost_s, one[1].decode_load))[:LOOKED_AT]


def rank_of(
    demand: Demand,
    choice: WorkerChoice,
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
    if decode.queue.tokens:
        paused_s += forecast.waits_s(prefill, decode, first_s + paused_s, now_s)
    kept = in_time and (
        tpot_s is None or forecast.tpot.apply(steps.own_s + paused_s / gaps) <= tpot_s
    )
    completes_s = first_s + paused_s + steps.cost_s * gaps
    trusts_all = choice.objections is trusted
    against = NOTHING_AGAINST if trusts_all else choice.against(prefill, decode)
    return against, not kept, completes_s


def is_in_time(demand: Demand, choice: WorkerChoice, prompt: PromptPrediction) -> bool:
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


def _soonest(demand: Demand, choice: WorkerChoice, now_s: float) -> Sequence[WorkerView]:
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
    def candidates(self, demand: Demand, choice: WorkerChoice, now_s: float) -> Iterator[Candidate]:
        look = Look.at(demand, choice, now_s)
        if demand.displaced:
            yield from _where_it_lies(look)
        yield from ways(sorted((*look.ranked, *_better(look)), key=by_rank))
        if choice.prefills:
            yield from look.others()
        else:
            yield from (Candidate(decode=worker, prefill=None) for worker in look.rest())


def _where_it_lies(look: Look) -> Iterator[Candidate]:
    """The decode worker with most of the request's KV, if it has more than each prefill worker and
    who decodes there keeps his objectives. What a prefill worker would get from a peer or a pool
    doesn't count: it would be sent there and back."""
    demand, choice, now_s = look.demand, look.choice, look.now_s
    if not choice.prefills:
        return
    most = max(map(demand.held.own_tokens, choice.prefills))
    for worker in holders(demand, choice)[:1]:
        local = local_way(demand, choice, worker, now_s)
        if local is None or demand.held.own_tokens(worker) <= most:
            continue
        ((steps, _),) = cheapest(demand, [worker], choice, look.joins_in_s, now_s)
        if not hurts(choice, worker, local.prompt, steps.own_s, now_s):
            yield local.way


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


def holders(demand: Demand, choice: WorkerChoice) -> list[WorkerView]:
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


def local_way(
    demand: Demand, choice: WorkerChoice, worker: WorkerView, now_s: float
) -> Local | None:
    """None where the rest of the prompt is too long."""
    left = demand.prompt_tokens - demand.held.tokens(worker)
    if choice.prefills and left > MOST_CHUNKS * worker.chunk_tokens:
        return None
    way = Candidate(decode=worker, prefill=None)
    return Local(way, choice.forecast.prompt(demand, way, now_s))


def hurts(
    choice: WorkerChoice, worker: WorkerView, prompt: PromptPrediction, step_s: float, now_s: float
) -> bool:
    """Somebody who decodes there, with steps of `step_s`, would miss an objective."""
    if not choice.prefills:
        return False
    pending_s, margin = worker.queue.all_s(now_s), choice.forecast.tpot
    return not worker.outlook.bears(prompt.pause_s, pending_s, step_s, margin, now_s)


def local_cost_s(prompt: PromptPrediction, worker: WorkerView) -> float:
    """What speaks against it, beside its own time."""
    return OTHERS * prompt.pause_s * worker.outlook.sequences + LEAST_GAIN * prompt.first_token_s
