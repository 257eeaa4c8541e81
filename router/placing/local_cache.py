"""The prefill worker that is done first with what it has cached itself, and the emptiest decode
worker. Nothing is pulled from elsewhere: Mooncake's local cache-aware scheduling (FAST'25). Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from router.candidate import Candidate
from router.demand import Demand
from router.placing.policy import Choice, paired
from router.view import WorkerView


@dataclass(frozen=True, slots=True)
class LocalCache:
    def candidates(self, demand: Demand, choice: Choice, now_s: float) -> Iterable[Candidate]:
        def first_token_s(worker: WorkerView) -> float:
            alone = Candidate(decode=worker, prefill=worker)
            return choice.forecast.prompt(demand, alone, now_s).first_token_s

        prefills = sorted(choice.prefills, key=first_token_s)
        decoders = sorted(choice.decoders, key=lambda worker: worker.decode_load)
        return paired(choice, decoders, lambda: prefills)
