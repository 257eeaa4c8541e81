"""Refuse by the load when the request arrives: TTFT with the queue as it is, TPOT with the batch as
it is now. Mooncake's early rejection (arXiv 2407.00079, §7.2). Pure.

It does not see that the batch will be another one when the prompt is prefilled, so that the load
of both sides swings; `predictive` does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from router.admitting.policy import ANY_NUMBER, Admitted, Verdict, no_place
from router.candidate import Candidate, Prediction
from router.demand import Demand
from router.forecast.forecast import Forecast
from router.refusal import Refusal


@dataclass(frozen=True, slots=True)
class EarlyRejection:
    def judge(
        self,
        demand: Demand,
        candidates: Iterable[Candidate],
        otherwise: Refusal,
        forecast: Forecast,
        now_s: float,
    ) -> Verdict:
        refusal = otherwise
        for candidate in candidates:
            prediction = forecast.predict(demand, candidate, now_s)
            against = no_place(demand, candidate.decode) or self._against(
                demand, candidate, prediction, forecast, now_s
            )
            if against is None:
                return Admitted(candidate=candidate, prediction=prediction, counted=ANY_NUMBER)
            refusal = against
        return refusal

    @staticmethod
    def _against(
        demand: Demand,
        candidate: Candidate,
        prediction: Prediction,
        forecast: Forecast,
        now_s: float,
    ) -> Refusal | None:
        ttft_s = demand.objectives.ttft_s
        if ttft_s is not None and prediction.ttft_s > ttft_s:
            return Refusal(
                reason="ttft_unreachable", message="the prefill queues are too long for its TTFT"
            )
        now = forecast.decode(demand, candidate.decode, 0.0, now_s)
        tpot_s = demand.objectives.tpot_s
        if tpot_s is not None and now.step_s > tpot_s:
            return Refusal(
                reason="tpot_unreachable", message="the decode workers are too busy for its TPOT"
            )
        return None
