"""Controllers that look at what is served, to compare with: latencies, and how busy workers are.

`ScalesByLatency`: each role gets its number times p90 over objective, as llm-d's autoscaler does.
`ScalesByUse`: each role gets its number times use over 70 %, the law of Kubernetes' HPA. Both have
HPA's tolerance, and its window of five minutes before workers leave.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil, inf

from cluster.core.elastic.controller import NOTHING, Decision
from cluster.core.elastic.fleet import Counts, Fleet
from cluster.sim.simulation import ClusterSimulation
from cluster.sim.trace import Outcome
from cluster.sim.worker import SimWorker
from kvpool.core.blocks.pool import BlockState
from kvrelay.types import Role
from router.core.load.offered import OfferedWork

WINDOW_S = 20.0
EVERY_S, TOLERANCE, STABLE_S = 15.0, 0.1, 300.0
USE = 0.7


@dataclass(slots=True)
class ServedLatency:
    simulation: ClusterSimulation
    _seen: int = 0

    def pressures(self, now_s: float) -> tuple[float, float]:
        """p90 of times to first token, and per output token, over their objectives."""
        outcomes, objectives = self._recent(now_s), self.simulation.config.simulation.slo
        ttft = [one.ttft_s for one in outcomes if one.ttft_s is not None]
        tpot = [one.tpot_s for one in outcomes if one.tpot_s is not None]
        return _p90(ttft) / objectives.ttft, _p90(tpot) / objectives.tpot

    def _recent(self, now_s: float) -> list[Outcome]:
        """That had a token lately. Requests come in the order of their arrival."""
        outcomes, since_s = self.simulation.clients.outcomes, now_s - WINDOW_S
        while self._seen < len(outcomes) and _is_over(outcomes[self._seen], since_s):
            self._seen += 1
        recent = []
        for one in outcomes[self._seen :]:
            if one.request.arrival_s > now_s:
                break
            if one.last_token_s is not None and one.last_token_s >= since_s:
                recent.append(one)
        return recent


@dataclass(slots=True, kw_only=True)
class Scaling:
    """HPA's loop. `most`: workers of both roles."""

    least: int = 1
    most: int
    _looked_s: float = -inf
    _said: deque[tuple[float, Counts]] = field(default_factory=deque)

    def decide(self, ratios: tuple[float, float], fleet: Fleet, now_s: float) -> Decision:
        """`ratios`: by how much each role is used, or late, over what it shall be."""
        if now_s - self._looked_s < EVERY_S:
            return NOTHING
        self._looked_s, have = now_s, fleet.all
        counts = Counts(
            _proportional(ratios[0], fleet.prefill), _proportional(ratios[1], fleet.decode)
        )
        self._said.append((now_s, counts))
        while self._said[0][0] < now_s - STABLE_S:
            self._said.popleft()
        prefill = self._settled([one.prefill for _, one in self._said], have.prefill)
        decode = self._settled([one.decode for _, one in self._said], have.decode)
        wanted = self._bounded(Counts(prefill, decode), have)
        return NOTHING if wanted == have else Decision(counts=wanted)

    def _settled(self, said: Sequence[int], have: int) -> int:
        """Up at once; down to the most that was said."""
        return max(self.least, said[-1] if said[-1] > have else min(have, max(said)))

    def _bounded(self, wanted: Counts, have: Counts) -> Counts:
        """Who asks first gets what is left."""
        left = self.most - have.workers
        more = min(max(0, wanted.prefill - have.prefill), left)
        prefill = min(wanted.prefill, have.prefill + more)
        decode = min(wanted.decode, have.decode + left - more)
        return Counts(prefill, decode)


@dataclass(slots=True)
class ScalesByLatency:
    """Implements ElasticPolicy."""

    served: ServedLatency
    scaling: Scaling

    def look(self, offered: OfferedWork, fleet: Fleet, now_s: float) -> Decision:
        return self.scaling.decide(self.served.pressures(now_s), fleet, now_s)


@dataclass(slots=True)
class ScalesByUse:
    """Implements ElasticPolicy. Prefill: the share of time in which its device computes; decode:
    the larger share of its places and of its KV blocks."""

    simulation: ClusterSimulation
    scaling: Scaling
    _busy: dict[str, tuple[float, float]] = field(default_factory=dict)

    def look(self, offered: OfferedWork, fleet: Fleet, now_s: float) -> Decision:
        workers = [one for one in self.simulation.fleet.workers.values() if not one.is_dead]
        prefill = _mean(self._time(one, now_s) for one in workers if one.core.role is Role.PREFILL)
        decode = _mean(_places(one) for one in workers if one.core.role is Role.DECODE)
        return self.scaling.decide((prefill / USE, decode / USE), fleet, now_s)

    def _time(self, worker: SimWorker, now_s: float) -> float:
        """Of the last window."""
        then_s, busy_s = self._busy.get(worker.name, (now_s - 1.0, worker.device.prefill_busy_s))
        if now_s - then_s >= WINDOW_S:
            self._busy[worker.name] = (now_s, worker.device.prefill_busy_s)
        self._busy.setdefault(worker.name, (now_s, worker.device.prefill_busy_s))
        return min(1.0, (worker.device.prefill_busy_s - busy_s) / max(1.0, now_s - then_s))


def _places(worker: SimWorker) -> float:
    tables, running = worker.core.tables, len(worker.core.decode.batch.running_set.running)
    counts = tables.counts()
    free = counts[BlockState.FREE] + counts[BlockState.CACHED]
    most = worker.settings.max_running_requests
    return max(running / most, 1 - free / tables.blocks)


def _proportional(ratio: float, workers: int) -> int:
    """HPA's law."""
    return workers if abs(ratio - 1) <= TOLERANCE else ceil(workers * ratio)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0


def _is_over(outcome: Outcome, since_s: float) -> bool:
    if outcome.refused or outcome.failed:
        return True
    return outcome.done and (outcome.last_token_s or 0.0) < since_s


def _p90(values: Sequence[float]) -> float:
    return sorted(values)[int(0.9 * len(values))] if values else 0.0
