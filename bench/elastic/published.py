"""Rules of others that change roles, to compare with: xLLM's, as its service's source has it
(https://github.com/xLLM-AI/xllm-service, instance_mgr.cpp), and one in the manner of Arrow
(arXiv:2505.11916; of it only the abstract and the introduction were at hand).

Both go by predictions for each request. xLLM gives a decode worker to prefill when it runs empty,
because requests fill one worker after another; a prefill worker to decode when no decode worker
keeps the time per token, if prefill can spare one or has more workers than decode. Arrow's gives a
decode worker to prefill when no prefill worker keeps the time to first token, if decode can spare
one; and back when decode has no room.

Here both are asked once a second, and are told how much room KV leaves, which xLLM does not look
at: its decode workers would take more than fits. Requests are spread over decode workers, so one
"runs empty" when the others could hold all that run. xLLM also sends single prompts to decode
workers without changing their role, which is left out: here admission refuses them. Arrow's is a
little early: the longest new prompt counts, and may be in a queue already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import ceil

from cluster.core.elastic.controller import NOTHING, Decision
from cluster.core.elastic.fleet import Fleet
from cluster.sim.simulation import ClusterSimulation
from cluster.sim.trace import Outcome
from cluster.sim.worker import SimWorker
from engine.core.step_times import LinearTimes, decode_work
from kvpool.core.blocks.pool import BlockState
from kvrelay.errors import RefusalReason
from kvrelay.types import Role
from router.core.load.offered import OfferedWork

_OF_DECODE = frozenset(
    {
        RefusalReason.TPOT_UNREACHABLE,
        RefusalReason.KV_EXHAUSTED,
        RefusalReason.SLOTS_EXHAUSTED,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """Of the requests of the last second. `first_token_late`: one had no prefill worker in time;
    `decode_full`: one had no decode worker. `prefill_s`: what waits on a prefill worker, on
    average. `decode_workers`: the fewest that could hold all that run."""

    first_token_late: bool
    decode_full: bool
    prefill_s: float
    decode_workers: int


Rule = Callable[[Predictions, Fleet, float], int]
"""How many prefill workers more, with the objective in seconds for the first token."""


def as_xllm(seen: Predictions, fleet: Fleet, ttft_s: float) -> int:
    can_spare = seen.prefill_s < ttft_s * (fleet.prefill - 1) / fleet.prefill
    if seen.decode_full and (can_spare or fleet.decode < fleet.prefill):
        return -1
    return int(seen.decode_workers < fleet.decode and not seen.decode_full)


def as_arrow(seen: Predictions, fleet: Fleet, ttft_s: float) -> int:
    if seen.decode_full:
        return -1
    return int(seen.first_token_late and seen.decode_workers < fleet.decode)


@dataclass(slots=True)
class FlipsByPrediction:
    """Implements ElasticPolicy: one worker a second at most, at least one of each role."""

    simulation: ClusterSimulation
    rule: Rule
    _seen: int = 0

    def look(self, offered: OfferedWork, fleet: Fleet, now_s: float) -> Decision:
        ttft_s = self.simulation.config.simulation.slo.ttft
        wanted = fleet.prefill + self.rule(self._predictions(now_s), fleet, ttft_s)
        is_change = wanted != fleet.prefill and 1 <= wanted < fleet.workers
        return Decision(prefill=wanted) if is_change else NOTHING

    def _predictions(self, now_s: float) -> Predictions:
        fresh, queues = self._fresh(now_s), self._queues_s(now_s)
        needed = fewest_decode_workers(self._of(Role.DECODE), self._tpot_s)
        refused = {one.refused for one in fresh}
        return Predictions(
            first_token_late=RefusalReason.TTFT_UNREACHABLE in refused
            or min(queues) + self._longest_s(fresh) > self.simulation.config.simulation.slo.ttft,
            decode_full=bool(refused & _OF_DECODE) or needed > len(self._of(Role.DECODE)),
            prefill_s=sum(queues) / len(queues),
            decode_workers=needed,
        )

    @property
    def _tpot_s(self) -> float:
        return self.simulation.config.simulation.slo.tpot

    def _fresh(self, now_s: float) -> list[Outcome]:
        """That came since the last look."""
        outcomes, first = self.simulation.clients.outcomes, self._seen
        while self._seen < len(outcomes) and outcomes[self._seen].request.arrival_s <= now_s:
            self._seen += 1
        return list(outcomes[first : self._seen])

    def _of(self, role: Role) -> list[SimWorker]:
        workers = self.simulation.fleet.workers.values()
        return [one for one in workers if one.core.role is role and not one.is_dead]

    def _queues_s(self, now_s: float) -> list[float]:
        """Until each prefill worker has computed what the routers have sent it."""
        return [
            sum(
                router.core.state.workers[one.incarnation].queue.all_s(now_s)
                for router in self.simulation.routers
            )
            for one in self._of(Role.PREFILL)
        ]

    def _longest_s(self, fresh: Iterable[Outcome]) -> float:
        worker = self._of(Role.PREFILL)[0]
        times, chunk = LinearTimes.of(worker.hardware.told), worker.settings.prefill_chunk_tokens
        prompts = [times.prompt_s(one.request.input_tokens, 0, chunk) for one in fresh]
        return max(prompts, default=0.0)


def fewest_decode_workers(decode: list[SimWorker], tpot_s: float) -> int:
    """That could hold all that run on these, each with a sequence more: by KV blocks, by places,
    and by the time of a step. More than there are: not even these can."""
    running = [one.core.decode.batch.running_set.running for one in decode]
    sequences = sum(map(len, running))
    tokens = sum(sequence.length for of_one in running for sequence in of_one)
    first = decode[0]
    kv = ceil(sum(map(_used_blocks, decode)) / first.core.tables.blocks)
    places = ceil(sequences / first.settings.max_running_requests)
    fewest = max(1, kv, places)
    while fewest <= len(decode) and _step_s(first, sequences, tokens, fewest) > tpot_s:
        fewest += 1
    return fewest


def _step_s(worker: SimWorker, sequences: int, tokens: int, workers: int) -> float:
    each = sequences // workers + 1
    usual = tokens // max(1, sequences)
    return worker.hardware.times.step_s(decode_work(each, tokens // workers + usual))


def _used_blocks(worker: SimWorker) -> int:
    tables = worker.core.tables
    counts = tables.counts()
    return tables.blocks - counts[BlockState.FREE] - counts[BlockState.CACHED]
