"""Mooncake's three ways to reject (arXiv 2407.00079, §7), on our cores and simulator.

All of them take what is predicted to get its first token in time, and judge the decode side: the
baseline when the prompt is computed; early rejection when the request comes too, by the load of
that moment; prediction when it comes too, by the load when its prompt will be computed, every
sequence being taken to decode for the same time. A request that is rejected with its prompt
computed counts like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from cluster.sim.router import SimRouter
from cluster.sim.simulation import ClusterSimulation
from engine.core.step_times import decode_work
from kvrelay.messages import Reserve
from router.core.events import Aborted, Command, Deliver, Refuse, Send
from router.core.policy.admission import Admitted, Verdict
from router.core.policy.forecast import Forecast
from router.core.promises.refusal import Refusal
from router.core.request import Request, RequestState
from router.core.router_state import RouterState
from router.core.state.candidate import Candidate
from router.core.state.demand import Demand
from router.core.state.worker_view import WorkerView

BASELINE, EARLY, PREDICTION, OURS = "baseline", "early rejection", "prediction", "predictive"
AFTER_PREFILL = "after_prefill"
_NEW_SHARE = 0.02


@dataclass(slots=True)
class DecodeTimes:
    """`usual_s`: how long sequences decode, the mean of those that have ended."""

    usual_s: float = 0.0
    _since_s: dict[str, float] = field(default_factory=dict)
    _ended: int = 0

    def delivered(self, request_id: str, now_s: float, *, done: bool) -> None:
        since_s = self._since_s.setdefault(request_id, now_s)
        if done:
            self._ended += 1
            share = max(_NEW_SHARE, 1 / self._ended)
            self.usual_s += share * (now_s - since_s - self.usual_s)
            self.forget(request_id)

    def forget(self, request_id: str) -> None:
        self._since_s.pop(request_id, None)

    def joins_s(self, request: Request) -> float:
        """When it began, or will."""
        assert request.placed is not None
        expected_s = request.placed_s + request.placed.prediction.decode.joins_in_s
        return self._since_s.get(request.request_id, expected_s)


@dataclass(slots=True)
class Paper:
    """Admission as in the paper. It looks at the requests of the router whose `state` this is."""

    way: str
    state: RouterState
    times: DecodeTimes = field(default_factory=DecodeTimes)

    def judge(
        self,
        demand: Demand,
        candidates: Iterable[Candidate],
        otherwise: Refusal,
        forecast: Forecast,
        now_s: float,
    ) -> Verdict:
        refusal, most_s = otherwise, demand.objectives.ttft_s
        for candidate in candidates:
            prediction = forecast.predict(demand, candidate, now_s)
            if most_s is not None and prediction.ttft_s > most_s:
                refusal = Refusal(reason="ttft_unreachable", message="the queues are too long")
            elif self._decode_refuses(demand, candidate, prediction.decode.joins_in_s, now_s):
                refusal = Refusal(reason="tpot_unreachable", message="the decode side is too busy")
            else:
                return Admitted(candidate=candidate, prediction=prediction)
        return refusal

    def _decode_refuses(
        self, demand: Demand, candidate: Candidate, joins_in_s: float, now_s: float
    ) -> bool:
        if self.way == BASELINE:
            return False
        there = self._decoding(candidate.decode)
        if self.way == PREDICTION:
            there = self._decoding_then(candidate.decode, now_s + joins_in_s)
        return over(demand.objectives.tpot_s, candidate.decode, demand.prompt_tokens, there)

    def _decoding(self, worker: WorkerView) -> Iterator[Request]:
        return (one for one in self._at(worker) if one.state is RequestState.DECODING)

    def _decoding_then(self, worker: WorkerView, then_s: float) -> Iterator[Request]:
        for one in self._at(worker):
            if 0 <= then_s - self.times.joins_s(one) < self.times.usual_s:
                yield one

    def _at(self, worker: WorkerView) -> Iterator[Request]:
        for one in self.state.requests.values():
            if one.placement is not None and one.placement.decode == worker.incarnation:
                yield one

    def rejects_now(self, request: Request, worker: WorkerView) -> bool:
        """Its prompt is computed."""
        beside = (one for one in self._decoding(worker) if one is not request)
        return over(request.objectives.tpot_s, worker, _context(request), beside)


def over(tpot_s: float | None, worker: WorkerView, tokens: int, beside: Iterable[Request]) -> bool:
    """Whether a step with it takes too long."""
    contexts = [tokens, *map(_context, beside)]
    step_s = worker.step_s(decode_work(len(contexts), sum(contexts)))
    return tpot_s is not None and step_s > tpot_s


def _context(request: Request) -> int:
    return request.spec.context_tokens + request.choices[0].next_index


class JudgedAgain(SimRouter):
    """Rejects a computed prompt that would break a pace. Decode workers reject none themselves."""

    paper: Paper

    def _execute(self, command: Command) -> None:
        if isinstance(command, Send) and isinstance(command.message, Reserve):
            spec = replace(command.message.spec, tpot_s=None)
            command = replace(command, message=replace(command.message, spec=spec))
        if isinstance(command, Deliver):
            times, name = self.paper.times, command.request_id
            times.delivered(name, self._clock.now_s, done=command.done)
            if self._rejects(command):
                times.forget(name)
                self._reject(name)
                return
        super()._execute(command)

    def _reject(self, name: str) -> None:
        refusal = Refusal(reason=AFTER_PREFILL, message="the decode worker is too busy by now")
        super()._execute(Refuse(request_id=name, refusal=refusal))
        self.hear(Aborted(request_id=name))

    def _rejects(self, command: Deliver) -> bool:
        if command.done:
            return False
        request = self.core.state.requests[command.request_id]
        if request.choices[0].next_index > 1 or request.placement is None:
            return False
        worker = self.core.state.workers[request.placement.decode]
        return self.paper.rejects_now(request, worker)


class AsInThePaper(ClusterSimulation):
    way: str = BASELINE

    def _router(self, number: int) -> SimRouter:
        core = super()._router(number).core
        paper = core.state.admitting = Paper(self.way, core.state)
        simulation = self.config.simulation
        latency_s = simulation.fabric.router_latency
        router = JudgedAgain(core, self.clock, latency_s, simulation.service)
        router.paper = paper
        return router


class Early(AsInThePaper):
    way = EARLY


class Predicted(AsInThePaper):
    way = PREDICTION


SIMULATIONS: dict[str, type[ClusterSimulation]] = {
    BASELINE: AsInThePaper,
    EARLY: Early,
    PREDICTION: Predicted,
    OURS: ClusterSimulation,
}
