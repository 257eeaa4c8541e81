"""Fleets that arithmetic finds worth a simulation, cheapest or fastest first. Pure.

A fleet as a cluster file: what is simulated, and what can be served. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil, floor, inf

from cluster.sim.planning.estimate import (
    PIPELINE_CHUNK,
    Copy,
    PlanObjectives,
    Workload,
    busy_s,
    decode_s,
    prefill_s,
    simulated_kv,
)
from cluster.sim.profiles.capacity import PlannedModel
from cluster.sim.profiles.worker_memory import planned_limits
from engine.core.sizing import EngineLimits
from kvpool.core.transfer.slabs import HEADER_BYTES
from kvrelay.types import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidatePool:
    """`seconds` is how long a request keeps one of its copies busy."""

    role: Role
    copy: Copy
    replicas: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CandidateFleet:
    """One pool that does both, or one for each."""

    pools: tuple[CandidatePool, ...]

    @property
    def price_per_hour(self) -> float:
        return sum(pool.replicas * pool.copy.price_per_hour for pool in self.pools)

    @property
    def most_rate_per_s(self) -> float:
        return min(pool.replicas / pool.seconds for pool in self.pools)

    @property
    def devices(self) -> Counter[str]:
        used: Counter[str] = Counter()
        for pool in self.pools:
            used[pool.copy.device] += pool.replicas * pool.copy.parallel.devices
        return used

    def __str__(self) -> str:
        return " + ".join(f"{p.replicas} x {p.copy.name} {p.role}" for p in self.pools)


Kind = tuple[CandidatePool, ...]
"""A fleet's pools before it is known how many replicas they have."""


def kinds(copies: Sequence[Copy], work: Workload, objectives: PlanObjectives) -> Iterator[Kind]:
    """All that can keep both objectives when nothing else runs. Pipelines compute prompts only: a
    decode step passes their stages one by one."""
    prefills, decodes = [], []
    for copy in copies:
        prompt_s, tokens_s = _prompt_s(copy, work, objectives), _tokens_s(copy, work, objectives)
        if prompt_s is not None:
            prefills.append(_one(Role.PREFILL, copy, prompt_s))
        if tokens_s is not None:
            decodes.append(_one(Role.DECODE, copy, tokens_s))
        if prompt_s is not None and tokens_s is not None:
            yield (_one(Role.BOTH, copy, prompt_s + tokens_s),)
    yield from ((prefill, decode) for prefill in prefills for decode in decodes)


def _prompt_s(copy: Copy, work: Workload, objectives: PlanObjectives) -> float | None:
    return busy_s(copy, work) if prefill_s(copy, work) <= objectives.ttft_s else None


def _tokens_s(copy: Copy, work: Workload, objectives: PlanObjectives) -> float | None:
    return None if copy.parallel.pipeline > 1 else decode_s(copy, work, objectives.tpot_s)


def _one(role: Role, copy: Copy, seconds: float) -> CandidatePool:
    return CandidatePool(role=role, copy=copy, replicas=1, seconds=seconds)


def smallest(kind: Kind, rate_per_s: float) -> CandidateFleet:
    """The least of it that is busy no more than all the time."""
    return CandidateFleet(
        tuple(_with(pool, max(1, ceil(rate_per_s * pool.seconds))) for pool in kind)
    )


def fastest(kind: Kind, budget_per_hour: float, stock: Mapping[str, int]) -> CandidateFleet | None:
    """The most of it that the budget and the stock allow, in balance. None: not one of each."""
    best: CandidateFleet | None = None
    for first in range(1, _most(kind[0], budget_per_hour, stock) + 1):
        fleet = _completed(kind, first, budget_per_hour, stock)
        if fleet is not None and (best is None or fleet.most_rate_per_s > best.most_rate_per_s):
            best = fleet
    return best


def _most(pool: CandidatePool, budget_per_hour: float, stock: Mapping[str, int]) -> int:
    price = pool.copy.price_per_hour
    affordable = floor(budget_per_hour / price) if price else inf
    return int(min(affordable, stock[pool.copy.device] // pool.copy.parallel.devices))


def _completed(
    kind: Kind, first: int, budget_per_hour: float, stock: Mapping[str, int]
) -> CandidateFleet | None:
    """With `first` of the first pool, and as many of the other as are left."""
    begun = CandidateFleet((_with(kind[0], first),))
    if len(kind) == 1:
        return begun
    left = {name: count - begun.devices[name] for name, count in stock.items()}
    second = _most(kind[1], budget_per_hour - begun.price_per_hour, left)
    return CandidateFleet((*begun.pools, _with(kind[1], second))) if second > 0 else None


def fits(fleet: CandidateFleet, stock: Mapping[str, int]) -> bool:
    return all(count <= stock[name] for name, count in fleet.devices.items())


def grown(fleet: CandidateFleet, index: int) -> CandidateFleet:
    """A tenth more of one pool, at least one."""
    pool = fleet.pools[index]
    more = _with(pool, pool.replicas + max(1, pool.replicas // 10))
    return CandidateFleet((*fleet.pools[:index], more, *fleet.pools[index + 1 :]))


def _with(pool: CandidatePool, replicas: int) -> CandidatePool:
    return CandidatePool(role=pool.role, copy=pool.copy, replicas=replicas, seconds=pool.seconds)


_BLOCK_TOKENS = 128
_MIXED_CHUNK, _ALONE_CHUNK = 2048, 8192
"""Prefill tokens of a step: few where others decode in it (Sarathi-Serve's relaxed budget)."""
_MOST_SEQUENCES = 1024
_SENDING_SLABS = 4
"""As kvpool.transport.send_buffers has them, where a fleet is on several machines."""


def fleet_limits(facts: PlannedModel, memory_fraction: float) -> EngineLimits:
    """Of a worker of any of these fleets at most. A slab holds a part of the longest chunks: it
    would take four times as much of the memory."""
    limits = planned_limits(memory_fraction)
    slab_bytes = HEADER_BYTES + ceil(_MIXED_CHUNK * facts.kv_bytes_per_token)
    return replace(
        limits,
        prefill_chunk_tokens=_ALONE_CHUNK,
        max_running_requests=_MOST_SEQUENCES,
        staging_bytes=limits.staging_slabs * slab_bytes,
        sending_slabs=_SENDING_SLABS,
    )


def cluster_file(
    fleet: CandidateFleet, model: str, facts: PlannedModel, objectives: PlanObjectives
) -> dict[str, object]:
    """Each transfer is charged the slowest end's links."""
    bandwidth = min(pool.copy.bytes_per_s for pool in fleet.pools)
    return {
        "workers": [{"role": str(p.role), "replicas": p.replicas} for p in fleet.pools],
        "scheduler": {
            "prefill_chunk_tokens": _chunk_tokens(fleet),
            "max_running_requests": _MOST_SEQUENCES,
        },
        "simulation": {
            "block_size": _BLOCK_TOKENS,
            "pools": [_pool(pool, model, facts) for pool in fleet.pools],
            "kv": simulated_kv(facts),
            "fabric": {"bandwidth": f"{bandwidth:.0f}B"},
            "slo": {
                "ttft": f"{objectives.ttft_s * 1e3:.6f}ms",
                "tpot": f"{objectives.tpot_s * 1e3:.6f}ms",
            },
        },
    }


def _chunk_tokens(fleet: CandidateFleet) -> int:
    if any(pool.role is Role.BOTH for pool in fleet.pools):
        return _MIXED_CHUNK
    stages = max(pool.copy.parallel.pipeline for pool in fleet.pools)
    return PIPELINE_CHUNK if stages > 1 else _ALONE_CHUNK


def _pool(pool: CandidatePool, model: str, facts: PlannedModel) -> dict[str, object]:
    return {
        "profile": pool.copy.profile(model, facts),
        "blocks": max(1, pool.copy.kv_tokens // _BLOCK_TOKENS),
    }


def servable_file(
    fleet: CandidateFleet,
    model: str,
    facts: PlannedModel,
    objectives: PlanObjectives,
    limits: EngineLimits,
) -> dict[str, object]:
    """The same with the model, its devices, and the memory that was planned, for `kvrelay serve`
    and `kvrelay simulate`."""
    dtype = {} if facts.dtype == "auto" else {"dtype": facts.dtype}
    eight = {"quantization": "fp8"} if facts.precision.weights == "float8" else {}
    return {
        "model": {"path": model} | dtype | eight,
        **cluster_file(fleet, model, facts, objectives),
        "workers": [_workers(pool) for pool in fleet.pools],
        "engine": {
            "memory_fraction": limits.memory_fraction,
            "kv_dtype": "fp8" if facts.precision.kv == "float8" else "auto",
        },
        "transfer": {"staging_bytes": f"{limits.staging_bytes}B"},
    }


def _workers(pool: CandidatePool) -> dict[str, object]:
    found = {"role": str(pool.role), "replicas": pool.replicas, "device": "cuda"}
    degrees = {key: count for key, count in asdict(pool.copy.parallel).items() if count > 1}
    return found | ({"parallel": degrees} if degrees else {})
