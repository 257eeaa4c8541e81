"""Take everything, and let it wait for as long as it takes: what most systems do. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from router.admitting.policy import ANY_NUMBER, Admitted, Deferred, Verdict, first_with_place
from router.candidate import Candidate
from router.demand import Demand
from router.forecast.forecast import Forecast
from router.refusal import NO_CAPACITY, Refusal


@dataclass(frozen=True, slots=True)
class Unlimited:
    def judge(
        self,
        demand: Demand,
        candidates: Iterable[Candidate],
        otherwise: Refusal,
        forecast: Forecast,
        now_s: float,
    ) -> Verdict:
        found = first_with_place(demand, candidates, otherwise)
        if isinstance(found, Candidate):
            return Admitted(
                candidate=found,
                prediction=forecast.predict(demand, found, now_s),
                counted=ANY_NUMBER,
            )
        return found if found is NO_CAPACITY else Deferred(refusal=found, patience_s=inf)
