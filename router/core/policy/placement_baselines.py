"""Simple placement policies. Pure.

LeastLoaded: the emptiest decode worker with the shortest prefill queue.

LocalCache: the prefill worker that is done first with what it has cached itself, and the emptiest
decode worker. Nothing is pulled from elsewhere: Mooncake's local cache-aware scheduling (FAST'25).

RandomPair: any decode worker with any prefill worker. The randomness is passed in.

RoundRobin: workers in turn, each role by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from router.core.policy.placement import WorkerChoice, paired
from router.core.state.candidate import Candidate
from router.core.state.demand import Demand
from router.core.state.worker_view import WorkerView


@dataclass(frozen=True, slots=True)
class LeastLoaded:
    def candidates(self, demand: Demand, choice: WorkerChoice, now_s: float) -> Iterable[Candidate]:
        prefills = sorted(choice.prefills, key=lambda worker: worker.prefill_load)
        decoders = sorted(choice.decoders, key=lambda worker: worker.decode_load)
        return paired(choice, decoders, lambda: prefills)


@dataclass(frozen=True, slots=True)
class LocalCache:
    def candidates(self, demand: Demand, choice: WorkerChoice, now_s: float) -> Iterable[Candidate]:
        def first_token_s(worker: WorkerView) -> float:
            alone = Candidate(decode=worker, prefill=worker)
            return choice.forecast.prompt(demand, alone, now_s).first_token_s

        prefills = sorted(choice.prefills, key=first_token_s)
        decoders = sorted(choice.decoders, key=lambda worker: worker.decode_load)
        return paired(choice, decoders, lambda: prefills)


class Randomness(Protocol):
    """As `random.Random` has it."""

    def sample(self, population: Sequence[WorkerView], k: int) -> list[WorkerView]: ...


@dataclass(slots=True)
class RandomPair:
    randomness: Randomness

    def candidates(self, demand: Demand, choice: WorkerChoice, now_s: float) -> Iterable[Candidate]:
        return paired(
            choice, self._shuffled(choice.decoders), lambda: self._shuffled(choice.prefills)
        )

    def _shuffled(self, workers: Sequence[WorkerView]) -> list[WorkerView]:
        return self.randomness.sample(workers, len(workers))


@dataclass(slots=True)
class RoundRobin:
    turn: int = 0

    def candidates(self, demand: Demand, choice: WorkerChoice, now_s: float) -> Iterable[Candidate]:
        turn, self.turn = self.turn, self.turn + 1
        prefills = _from(choice.prefills, turn)
        return paired(choice, _from(choice.decoders, turn), lambda: prefills)


def _from(workers: Sequence[WorkerView], turn: int) -> list[WorkerView]:
    start = turn % len(workers) if workers else 0
    return [*workers[start:], *workers[:start]]
