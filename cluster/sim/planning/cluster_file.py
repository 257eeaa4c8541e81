"""A fleet as a cluster file: what is simulated, and what can be served. Pure."""

from __future__ import annotations

from cluster.sim.planning.candidates import Fleet, Pool
from cluster.sim.planning.copies import simulated_kv
from cluster.sim.planning.estimate import Objectives
from cluster.sim.profiles.capacity import ModelFacts
from kvrelay.types import Role

_BLOCK_TOKENS = 128
_MIXED_CHUNK, _ALONE_CHUNK = 2048, 8192
"""Prefill tokens of a step: few where others decode in it (Sarathi-Serve's relaxed budget)."""


def cluster_file(
    fleet: Fleet, model: str, facts: ModelFacts, objectives: Objectives
) -> dict[str, object]:
    """Each transfer is charged the slowest end's links."""
    mixed = any(pool.role is Role.BOTH for pool in fleet.pools)
    bandwidth = min(pool.copy.bytes_per_s for pool in fleet.pools)
    return {
        "workers": [{"role": str(p.role), "replicas": p.replicas} for p in fleet.pools],
        "scheduler": {
            "prefill_chunk_tokens": _MIXED_CHUNK if mixed else _ALONE_CHUNK,
            "max_running_requests": 1024,
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


def _pool(pool: Pool, model: str, facts: ModelFacts) -> dict[str, object]:
    return {
        "profile": pool.copy.profile(model, facts),
        "blocks": max(1, pool.copy.kv_tokens // _BLOCK_TOKENS),
    }


def servable_file(
    fleet: Fleet, model: str, facts: ModelFacts, objectives: Objectives
) -> dict[str, object]:
    """The same with the model and its devices, for `kvrelay serve` and `kvrelay simulate`."""
    raw = cluster_file(fleet, model, facts, objectives)
    return {"model": {"path": model}, **raw, "workers": [_workers(pool) for pool in fleet.pools]}


def _workers(pool: Pool) -> dict[str, object]:
    found = {"role": str(pool.role), "replicas": pool.replicas, "device": "cuda"}
    tensor = pool.copy.parallel.tensor
    return found if tensor == 1 else found | {"parallel": {"tensor": tensor}}


def obstacles(fleet: Fleet) -> list[str]:
    """Why `kvrelay serve` can't start it; empty when it can."""
    staged = [pool.copy.name for pool in fleet.pools if pool.copy.parallel.pipeline > 1]
    return [f"{name}: a worker's model isn't cut into pipeline stages" for name in staged]
