"""Prefill worker, decode worker and prefix source together, by predicted completion. Pure.

The best few of each role are looked at in all their pairs, so that what lies between two workers
counts. A way that keeps the request's objectives goes before one that doesn't, whatever their
times. A decode worker that may prefill too is one more way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import nsmallest

from router.candidate import Candidate
from router.demand import Demand
from router.placement import Against
from router.placing.policy import Choice, paired
from router.view import WorkerView

LOOKED_AT = 4
"""Workers of each role."""

Rank = tuple[Against, bool, float]


@dataclass(frozen=True, slots=True)
class KvAware:
    def candidates(self, demand: Demand, choice: Choice, now_s: float) -> Iterator[Candidate]:
        prompts = self._prompts(demand, choice, now_s)
        joins_in_s = prompts[0][0] if prompts else 0.0
        decodes = self._decodes(demand, choice.decodes, choice, joins_in_s, now_s)
        alone = self._decodes(demand, choice.alone, choice, joins_in_s, now_s)
        ways = [
            Candidate(decode=decode, prefill=way.prefill, source=way.source)
            for _, way in prompts
            for decode in decodes
        ]
        ways += [choice.sourced(demand, worker, None) for worker in alone]
        ranks = {id(way): self._rank(demand, choice, way, now_s) for way in ways}
        yield from sorted(ways, key=lambda way: ranks[id(way)])
        looked_at = {worker.incarnation for worker in (*decodes, *alone)}
        rest = (w for w in choice.decoders if w.incarnation not in looked_at)
        yield from paired(choice, rest, lambda: [w for _, way in prompts if (w := way.prefill)])

    @staticmethod
    def _prompts(demand: Demand, choice: Choice, now_s: float) -> list[tuple[float, Candidate]]:
        """The prefill workers that are done first, and when."""
        if not choice.decodes:
            return []
        anyone = choice.decodes[0]
        ways = (choice.sourced(demand, anyone, worker) for worker in choice.prefills)
        timed = ((choice.forecast.prompt(demand, way, now_s).first_token_s, way) for way in ways)
        return nsmallest(LOOKED_AT, timed, key=lambda one: (one[0], one[1].prefiller.prefill_load))

    @staticmethod
    def _decodes(
        demand: Demand,
        workers: Sequence[WorkerView],
        choice: Choice,
        joins_in_s: float,
        now_s: float,
    ) -> list[WorkerView]:
        """Those that will decode it fastest."""

        def step_s(worker: WorkerView) -> tuple[float, float]:
            decode = choice.forecast.decode(demand, worker, joins_in_s, now_s)
            return decode.step_s, worker.decode_load

        return nsmallest(LOOKED_AT, workers, key=step_s)

    @staticmethod
    def _rank(demand: Demand, choice: Choice, way: Candidate, now_s: float) -> Rank:
        predicted = choice.forecast.predict(demand, way, now_s)
        kept = predicted.within(demand.objectives)
        return choice.against(way), not kept, predicted.completes_in_s
