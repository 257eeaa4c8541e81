"""Refuse when too many prompts wait: a bound on the queue, as engines have it
(vLLM's `--max-num-queued-reqs`, Ray Serve's `max_queued_requests`). Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from router.admitting.policy import ANY_NUMBER, Admitted, Verdict, no_place
from router.candidate import Candidate
from router.demand import Demand
from router.forecast.forecast import Forecast
from router.refusal import Refusal


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
            reason="ttft_unreachable",
            message=f"{self.limit} prompts wait at every prefill worker already",
        )
