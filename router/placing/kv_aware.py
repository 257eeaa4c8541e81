"""Prefill worker, decode worker and prefix source together, by predicted completion. Pure.

The best few of each role are looked at in all their pairs, so that what lies between two workers
counts. A way that keeps the request's objectives goes before one that doesn't, whatever their
times. A decode worker that may prefill too is one more way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest

from router.candidate import Candidate
from router.demand import Demand
from router.forecast.forecast import with_it
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
        ranked = [
            (self._rank(demand, choice, candidate, first_s, step_s), candidate)
            for first_s, way in prompts
            for step_s, decode in decodes
            for candidate in (replace(way, decode=decode),)
        ]
        alone = self._decodes(demand, choice.alone, choice, joins_in_s, now_s)
        for step_s, worker in alone:
            way = choice.sourced(demand, worker, None)
            first_s = choice.forecast.prompt(demand, way, now_s).first_token_s
            ranked.append((self._rank(demand, choice, way, first_s, step_s), way))
        ranked.sort(key=lambda one: one[0])
        yield from (way for _, way in ranked)
        looked_at = {worker.incarnation for _, worker in (*decodes, *alone)}
        rest = (w for w in choice.decoders if w.incarnation not in looked_at)
        yield from paired(choice, rest, lambda: [w for _, way in prompts if (w := way.prefill)])

    @staticmethod
    def _prompts(demand: Demand, choice: Choice, now_s: float) -> list[tuple[float, Candidate]]:
        """The prefill workers that are done first, and when."""
        if not choice.decodes:
            return []
        anyone, forecast = choice.decodes[0], choice.forecast
        ways = [choice.sourced(demand, anyone, worker) for worker in choice.prefills]
        timed = ((forecast.prompt(demand, way, now_s).first_token_s, way) for way in ways)
        return nsmallest(LOOKED_AT, timed, key=lambda one: (one[0], one[1].prefiller.prefill_load))

    @staticmethod
    def _decodes(
        demand: Demand,
        workers: Sequence[WorkerView],
        choice: Choice,
        joins_in_s: float,
        now_s: float,
    ) -> list[tuple[float, WorkerView]]:
        """Those that will decode it fastest, and a step's time there; full ones only if all are."""
        then_s, forecast = now_s + joins_in_s, choice.forecast
        having_room = [w for w in workers if demand.choices <= w.free_places] or workers
        batches = ((w, forecast.batch_then(demand, w, then_s, now_s)) for w in having_room)
        timed = ((w.step_s(with_it(demand, batch, w)), w) for w, batch in batches)
        return nsmallest(LOOKED_AT, timed, key=lambda one: (one[0], one[1].decode_load))

    @staticmethod
    def _rank(
        demand: Demand, choice: Choice, way: Candidate, first_s: float, step_s: float
    ) -> Rank:
        """As `Forecast.predict` has it, but for the moment at which the request joins."""
        gaps = max(1, demand.output_tokens - 1)
        handoff_s = choice.forecast.handoff_s(demand, way)
        ttft_s, tpot_s, forecast = (
            demand.objectives.ttft_s,
            demand.objectives.tpot_s,
            choice.forecast,
        )
        kept = (ttft_s is None or demand.waited_s + forecast.ttft.apply(first_s) <= ttft_s) and (
            tpot_s is None or forecast.tpot.apply(step_s + handoff_s / gaps) <= tpot_s
        )
        return choice.against(way), not kept, first_s + handoff_s + step_s * gaps
