"""The emptiest decode worker with the shortest prefill queue. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from router.candidate import Candidate
from router.demand import Demand
from router.placing.policy import Choice, paired


@dataclass(frozen=True, slots=True)
class LeastLoaded:
    def candidates(self, demand: Demand, choice: Choice, now_s: float) -> Iterable[Candidate]:
        prefills = sorted(choice.prefills, key=lambda worker: worker.prefill_load)
        decoders = sorted(choice.decoders, key=lambda worker: worker.decode_load)
        return paired(choice, decoders, lambda: prefills)
