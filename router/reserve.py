"""What of a decode worker is a tier's own, though others may have borrowed it. Pure.

Who takes what is its tier's own gets it whoever is there: those on lent places yield, with the next
step, and go on later (`decode_worker.standing`).
"""

from __future__ import annotations

from router.demand import Demand
from router.forecast.decode_outlook import BatchThen
from router.view import WorkerView


def has_place(demand: Demand, worker: WorkerView) -> bool:
    """A prompt of which no token is wanted needs none."""
    return demand.is_prompt_only or demand.choices <= worker.free_places or is_own(demand, worker)


def is_own(demand: Demand, worker: WorkerView) -> bool:
    """Whether it stays within its tier's share of the worker's places."""
    own = demand.tier.own_places(worker.hello.max_running_requests)
    return demand.choices <= own and worker.held(demand.tier.name) + demand.choices <= own


def own_batch(demand: Demand, worker: WorkerView) -> BatchThen:
    """Those on their own places, at most; each with the worker's mean context."""
    places, outlook = worker.hello.max_running_requests, worker.outlook
    own = sum(min(worker.held(tier.name), tier.own_places(places)) for tier in demand.tiers.tiers)
    tokens = own * outlook.kv_tokens // outlook.sequences if outlook.sequences else 0
    return BatchThen(own, tokens)
