"""Two-sided early rejection by prediction: a request is taken if it will keep its objectives, and
breaks nobody's, at the time when it gets to each worker. Pure.

Otherwise it is refused at once, with the reason and the time when the same would be taken: when the
queue has become short enough, or enough sequences have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from router.admitting.policy import Admitted, Verdict, no_place
from router.candidate import Candidate, Prediction
from router.demand import Demand
from router.forecast.decode_outlook import BatchThen
from router.forecast.forecast import Forecast, blocks_of, with_it
from router.refusal import Refusal
from router.view import WorkerView

LOOKED_AT = 16
"""Ways to serve a request; the first ones are the best."""


@dataclass(frozen=True, slots=True)
class Predictive:
    def judge(
        self,
        demand: Demand,
        candidates: Iterable[Candidate],
        otherwise: Refusal,
        forecast: Forecast,
        now_s: float,
    ) -> Verdict:
        refusals: list[Refusal] = []
        for candidate in islice(candidates, LOOKED_AT):
            prediction = forecast.predict(demand, candidate, now_s)
            refusal = self._against(demand, candidate, prediction, now_s)
            if refusal is None:
                return Admitted(candidate=candidate, prediction=prediction)
            refusals.append(refusal)
        return min(refusals, key=_retry_s, default=otherwise)

    def _against(
        self, demand: Demand, candidate: Candidate, prediction: Prediction, now_s: float
    ) -> Refusal | None:
        worker = candidate.decode
        return (
            self._place(demand, worker, now_s)
            or self._ttft(demand, prediction)
            or self._tpot(demand, worker, prediction, now_s)
            or self._blocks(demand, worker, prediction, now_s)
        )

    @staticmethod
    def _place(demand: Demand, worker: WorkerView, now_s: float) -> Refusal | None:
        full = no_place(demand, worker)
        if full is None:
            return None
        ends_s = worker.outlook.end_s(demand.choices - worker.free_places, now_s)
        return Refusal(
            reason=full.reason,
            message=full.message,
            retry_after_s=None if ends_s is None else ends_s - now_s,
        )

    @staticmethod
    def _ttft(demand: Demand, prediction: Prediction) -> Refusal | None:
        """A queue shrinks by a second each second; the prompt's own time does not."""
        objective_s = demand.objectives.ttft_s
        if objective_s is None or prediction.ttft_s <= objective_s:
            return None
        alone_s = prediction.prompt.first_token_s - prediction.prompt.queue_s
        over_s = prediction.ttft_s - demand.waited_s - objective_s
        hopeless = alone_s > objective_s
        return Refusal(
            reason="ttft_unreachable",
            message=f"its first token would take {prediction.ttft_s * 1e3:.0f} ms, "
            f"{alone_s * 1e3:.0f} ms without a queue; asked for {objective_s * 1e3:.0f} ms",
            retry_after_s=None if hopeless else max(0.0, over_s),
            hopeless=hopeless,
        )

    @staticmethod
    def _tpot(
        demand: Demand, worker: WorkerView, prediction: Prediction, now_s: float
    ) -> Refusal | None:
        """Its own objective, and the strictest of those that decode there."""
        strictest = worker.outlook.strictest_tpot_s
        bounds = [s for s in (demand.objectives.tpot_s, strictest) if s is not None]
        if not bounds or prediction.tpot_s <= min(bounds):
            return None
        bound_s = min(bounds)

        def fits(batch: BatchThen) -> bool:
            return worker.step_s(with_it(demand, batch, worker)) <= bound_s

        return Refusal(
            reason="tpot_unreachable",
            message=f"a token would take {prediction.tpot_s * 1e3:.1f} ms, "
            f"more than {bound_s * 1e3:.1f} ms",
            retry_after_s=_when(fits, worker, prediction, now_s),
        )

    @staticmethod
    def _blocks(
        demand: Demand, worker: WorkerView, prediction: Prediction, now_s: float
    ) -> Refusal | None:
        """An idle worker takes what fits it at all."""
        decode = prediction.decode
        if decode.needed_blocks <= decode.free_blocks or not decode.batch.sequences:
            return None

        def fits(batch: BatchThen) -> bool:
            used = blocks_of(worker, batch.kv_tokens) + batch.sequences
            return used + decode.needed_blocks <= worker.hello.total_blocks

        return Refusal(
            reason="kv_exhausted",
            message=f"it needs {decode.needed_blocks} KV blocks, "
            f"and {max(0, decode.free_blocks)} will be free",
            retry_after_s=_when(fits, worker, prediction, now_s),
        )


def _when(
    fits: Callable[[BatchThen], bool], worker: WorkerView, prediction: Prediction, now_s: float
) -> float | None:
    """In how many seconds so many sequences have ended that it fits in the batch; None: the known
    ones don't matter."""
    batch = prediction.decode.batch
    for ended in range(1, batch.sequences + 1):
        left = batch.sequences - ended
        kv_tokens = round(batch.kv_tokens * left / batch.sequences)
        if fits(BatchThen(left, kv_tokens)):
            joins_s = now_s + prediction.decode.joins_in_s
            ends_s = worker.outlook.end_s(ended, joins_s)
            return None if ends_s is None else max(0.0, ends_s - joins_s)
    return None


def _retry_s(refusal: Refusal) -> float:
    return float("inf") if refusal.retry_after_s is None else refusal.retry_after_s
