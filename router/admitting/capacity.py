"""Take what has a place at a decode worker now. Pure; for requests that were admitted before."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from router.admitting.policy import Admitted, Verdict, first_with_place
from router.candidate import Candidate
from router.demand import Demand
from router.forecast.forecast import Forecast
from router.refusal import Refusal


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
        found = first_with_place(demand, candidates, otherwise)
        if isinstance(found, Refusal):
            return found
        return Admitted(candidate=found, prediction=forecast.predict(demand, found, now_s))
