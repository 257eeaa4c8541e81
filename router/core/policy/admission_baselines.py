"""Refuse by the load when the request arrives: TTFT with the queue as it is, TPOT with the batch as
it is now. Mooncake's early rejection (arXiv 2407.00079, §7.2). Pure.

It does not see that the batch will be another one when the prompt is prefilled, so that the load
of both sides swings; `predictive` does.

Refuse when too many prompts wait: a bound on the queue, as engines have it
(vLLM's `--max-num-queued-reqs`, Ray Serve's `max_queued_requests`). Pure.

Take everything, and let it wait for as long as it takes: what most systems do. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from kvrelay.errors import RefusalReason
from router.core.policy.admission import (
    ANY_NUMBER,
    Admitted,
    Deferred,
    Verdict,
    first_with_place,
    no_place,
)
from router.core.policy.forecast import Forecast
from router.core.promises.refusal import NO_CAPACITY, Refusal
from router.core.state.candidate import Candidate, Prediction
from router.core.state.demand import Demand


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
                reason=RefusalReason.TTFT_UNREACHABLE,
                message="the prefill queues are too long for its TTFT",
            )
        now = forecast.decode(demand, candidate.decode, 0.0, now_s)
        tpot_s = demand.objectives.tpot_s
        if tpot_s is not None and now.step_s > tpot_s:
            return Refusal(
                reason=RefusalReason.TPOT_UNREACHABLE,
                message="the decode workers are too busy for its TPOT",
            )
        return None


@dataclass(frozen=True, slots=True)
class QueueLimit:
    """`limit`: prompts waiting at one prefill worker."""

    limit: int

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
            full = no_place(demand, candidate.decode) or self._queue_full(candidate)
            if full is None:
                prediction = forecast.predict(demand, candidate, now_s)
                return Admitted(candidate=candidate, prediction=prediction, counted=ANY_NUMBER)
            refusal = full
        return refusal

    def _queue_full(self, candidate: Candidate) -> Refusal | None:
        worker = candidate.prefiller
        if max(len(worker.queue), worker.counters.waiting) < self.limit:
            return None
        return Refusal(
            reason=RefusalReason.TTFT_UNREACHABLE,
            message=f"{self.limit} prompts wait at every prefill worker already",
        )


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
