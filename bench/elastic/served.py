"""A controller that looks at served latencies alone, to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from cluster.core.elastic.roles import Fleet
from cluster.sim.simulation import ClusterSimulation
from cluster.sim.trace import Outcome
from router.core.load.offered import OfferedWork

WINDOW_S, DWELL_S = 20.0, 15.0


@dataclass(slots=True)
class ServedLatency:
    """Implements RolePolicy: one more worker for the role whose p90 of the last `WINDOW_S` is
    further above its objective."""

    simulation: ClusterSimulation
    _changed_s: float = -inf
    _seen: int = 0

    def look(self, offered: OfferedWork, fleet: Fleet, now_s: float) -> int | None:
        ttft, tpot = self._pressures(now_s)
        if now_s - self._changed_s < DWELL_S or max(ttft, tpot) <= 1.0:
            return None
        wanted = fleet.prefill + (1 if ttft > tpot else -1)
        if not 1 <= wanted < fleet.workers:
            return None
        self._changed_s = now_s
        return wanted

    def _pressures(self, now_s: float) -> tuple[float, float]:
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


def _is_over(outcome: Outcome, since_s: float) -> bool:
    if outcome.refused or outcome.failed:
        return True
    return outcome.done and (outcome.last_token_s or 0.0) < since_s


def _p90(values: Sequence[float]) -> float:
    return sorted(values)[int(0.9 * len(values))] if values else 0.0
