"""What an admission policy is, and what it may answer. Pure.

What of a decode worker is a tier's own, though others may have borrowed it. Pure.

Who takes what is its tier's own gets it whoever is there: those on lent places yield, with the next
step, and go on later (`decode_worker.running_set`).

Take what has a place at a decode worker now; where there is none, one of a lower tier. Pure; for
requests that were admitted before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from kvrelay.errors import RefusalReason
from router.core.load.decode_outlook import BatchThen
from router.core.policy.forecast import Forecast
from router.core.promises.refusal import Refusal
from router.core.state.candidate import Candidate, Prediction
from router.core.state.demand import Demand
from router.core.state.worker_view import WorkerView


def has_place(demand: Demand, worker: WorkerView) -> bool:
    """A prompt of which no token is wanted needs none."""
    return demand.is_prompt_only or demand.choices <= worker.free_places or is_own(demand, worker)


def with_places(demand: Demand, workers: Iterable[WorkerView]) -> list[WorkerView]:
    """Those that have a place for it."""
    choices = demand.choices
    return [w for w in workers if choices <= w.free_places or is_own(demand, w)]


def is_own(demand: Demand, worker: WorkerView) -> bool:
    """Whether it stays within its tier's share of the worker's places."""
    own = demand.tier.own_places(worker.hello.max_running_requests)
    return demand.choices <= own and worker.held(demand.tier.name) + demand.choices <= own


def yielded(demand: Demand, worker: WorkerView) -> bool:
    """Whether it gets a place there once those of lower tiers on lent places have made room."""
    places = worker.hello.max_running_requests
    lower = [tier for tier in demand.tiers.tiers if tier.priority > demand.priority]
    lent = sum(max(0, worker.held(tier.name) - tier.own_places(places)) for tier in lower)
    return lent > 0 and demand.choices <= worker.free_places + lent


def own_batch(demand: Demand, worker: WorkerView) -> BatchThen:
    """Those on their own places, at most; each with the worker's mean context."""
    places, outlook = worker.hello.max_running_requests, worker.outlook
    own = sum(min(worker.held(tier.name), tier.own_places(places)) for tier in demand.tiers.tiers)
    tokens = own * outlook.kv_tokens // outlook.sequences if outlook.sequences else 0
    return BatchThen(own, tokens)


ANY_NUMBER = 2**32 - 1
"""`counted` of policies that promise no pace: nor shall the worker refuse for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """`doubted`: against what its workers say of their speed. `counted`: its pace was judged
    beside so many sequences of its decode worker; None: the worker judges it."""

    candidate: Candidate
    prediction: Prediction
    doubted: bool = False
    counted: int | None = None

    @property
    def shares(self) -> Mapping[str, float]:
        """# ttft, tpot |-> predicted over asked for"""
        return self.prediction.shares

    def note_trial(self, now_s: float) -> None:
        for worker in self.candidate.workers if self.doubted else ():
            worker.doubt.tried(now_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deferred:
    """Not yet, for the `refusal`'s reason, but it may wait here for up to `patience_s`."""

    refusal: Refusal
    patience_s: float

    @property
    def shares(self) -> Mapping[str, float]:
        return self.refusal.shares


Verdict = Admitted | Deferred | Refusal


class AdmissionPolicy(Protocol):
    def judge(
        self,
        demand: Demand,
        candidates: Iterable[Candidate],
        otherwise: Refusal,
        forecast: Forecast,
        now_s: float,
    ) -> Verdict:
        """Of the ways to serve it, best first, one that may be gone; `otherwise` if there are
        none."""


def no_place(demand: Demand, worker: WorkerView) -> Refusal | None:
    """What the decode worker would answer, as far as the router knows; None: ask it."""
    if has_place(demand, worker):
        return None
    places = worker.hello.max_running_requests
    return Refusal(
        reason=RefusalReason.SLOTS_EXHAUSTED,
        message=f"all {places} places of every decode worker are taken",
    )


def first_with_place(
    demand: Demand, candidates: Iterable[Candidate], otherwise: Refusal
) -> Candidate | Refusal:
    refusal = otherwise
    for candidate in candidates:
        full = no_place(demand, candidate.decode)
        if full is None:
            return candidate
        refusal = full
    return refusal


@dataclass(frozen=True, slots=True)
class Capacity:
    def judge(
        self,
        demand: Demand,
        candidates: Iterable[Candidate],
        otherwise: Refusal,
        forecast: Forecast,
        now_s: float,
    ) -> Verdict:
        ways = [*candidates]
        found = first_with_place(demand, ways, otherwise)
        if isinstance(found, Refusal):
            yielding = (way for way in ways if yielded(demand, way.decode))
            found = next(yielding, found)
        if isinstance(found, Refusal):
            return found
        return Admitted(candidate=found, prediction=forecast.predict(demand, found, now_s))
