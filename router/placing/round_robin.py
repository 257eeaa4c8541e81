"""Workers in turn, each role by itself. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from router.candidate import Candidate
from router.demand import Demand
from router.placing.policy import Choice, paired
from router.view import WorkerView


@dataclass(slots=True)
class RoundRobin:
    turn: int = 0

    def candidates(self, demand: Demand, choice: Choice, now_s: float) -> Iterable[Candidate]:
        turn, self.turn = self.turn, self.turn + 1
        prefills = _from(choice.prefills, turn)
        return paired(choice, _from(choice.decoders, turn), lambda: prefills)


def _from(workers: Sequence[WorkerView], turn: int) -> list[WorkerView]:
    start = turn % len(workers) if workers else 0
    return [*workers[start:], *workers[:start]]
