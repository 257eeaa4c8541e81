"""What an admission policy is, and what it may answer. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from router.candidate import Candidate, Prediction
from router.demand import Demand
from router.forecast.forecast import Forecast
from router.refusal import Refusal
from router.reserve import has_place
from router.view import WorkerView

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

    def note_trial(self, now_s: float) -> None:
        for worker in self.candidate.workers if self.doubted else ():
            worker.doubt.tried(now_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deferred:
    """Not yet, for the `refusal`'s reason, but it may wait here for up to `patience_s`."""

    refusal: Refusal
    patience_s: float


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
        reason="slots_exhausted", message=f"all {places} places of every decode worker are taken"
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
