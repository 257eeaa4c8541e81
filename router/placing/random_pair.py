"""Any decode worker with any prefill worker. Pure: the randomness is passed in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from router.candidate import Candidate
from router.demand import Demand
from router.placing.policy import Choice, paired
from router.view import WorkerView


class Randomness(Protocol):
    """As `random.Random` has it."""

    def sample(self, population: Sequence[WorkerView], k: int) -> list[WorkerView]: ...


@dataclass(slots=True)
class RandomPair:
    randomness: Randomness

    def candidates(self, demand: Demand, choice: Choice, now_s: float) -> Iterable[Candidate]:
        return paired(
            choice, self._shuffled(choice.decoders), lambda: self._shuffled(choice.prefills)
        )

    def _shuffled(self, workers: Sequence[WorkerView]) -> list[WorkerView]:
        return self.randomness.sample(workers, len(workers))
