"""Replaces each "auto" of a cluster file by what this machine or Ray cluster offers. Pure.

`dtype`, `max_model_len`, `kv_memory` and `staging_bytes` stay "auto": only a worker that has loaded
the checkpoint and measured its device can tell. So does the pool: each host decides for itself. On
a Ray that was joined so does `cpu_pinning`: its nodes may come later.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor
from pathlib import PurePath

from cluster.config.schema import Config, ModelSection
from cluster.config.workers import WorkerPool
from cluster.core.desired import process_name

LOOPBACK = "127.0.0.1"
ROUTERS = "router"
"""The pool of the routers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where the cluster will run. `host` is the workers' address, or None for each node's own.
    `spans_hosts`: Ray has several nodes."""

    total_cpus: float
    node_cpus: int
    host: str | None
    bundled_path: str
    gpus: float = 0.0
    spans_hosts: bool = False


def resolve(config: Config, site: Site) -> Config:
    """The same cluster with no choice left to the machine; idempotent. Device "auto" stays: the
    worker takes the GPU that Ray reserves for it, if there is one."""
    given = share_gpus(config.workers, site.gpus)
    share = threads_per_rank(given, site)
    pools = tuple(_resolve_pool(pool, given, share, site) for pool in given)
    threads = sum(pool.replicas.max * (pool.cpu_threads or 0) for pool in pinned(pools))
    if site.host is not None and threads > site.total_cpus:
        pools = tuple(pool.model_copy(update={"cpu_pinning": "off"}) for pool in pools)
    network = config.network.model_copy(update={"host": config.network.host or site.host})
    internal = config.router.internal_host or ("node" if site.spans_hosts else LOOPBACK)
    router = config.router.model_copy(update={"internal_host": internal})
    model = _resolve_model(config.model, site)
    update = {"model": model, "workers": pools, "network": network, "router": router}
    return config.model_copy(update=update)


def router_names(replicas: int) -> tuple[str, ...]:
    return tuple(process_name(ROUTERS, number) for number in range(replicas))


def worker_names(pools: tuple[WorkerPool, ...]) -> tuple[tuple[str, ...], ...]:
    """# pool |-> names of its workers"""
    return tuple(
        tuple(process_name(pool.label, number) for number in range(pool.replicas.min))
        for pool in pools
    )


def device_share(pool: WorkerPool, pools: tuple[WorkerPool, ...]) -> int:
    """How many workers use the device of one worker of `pool`, itself included.

    Where Ray picks the GPU, the pool's GPU fraction says how many fit on it.
    """
    if pool.on_gpu and ":" not in pool.device:
        return max(1, floor(1 / (pool.resources.get("GPU") or 1)))
    if not pool.on_gpu:
        return sum(other.replicas.max for other in pools if not other.on_gpu)
    return sum(other.replicas.max for other in pools if other.device == pool.device)


def share_gpus(pools: tuple[WorkerPool, ...], gpus: float) -> tuple[WorkerPool, ...]:
    """Gives each pool of device "auto" its part of the GPUs that the other pools leave. That is one
    GPU for each rank. If there are fewer and no worker has several ranks, workers share GPUs; else
    there are none."""
    part = _gpu_part(pools, gpus)
    return tuple(_with_gpu(pool, part) if part and _shares_gpus(pool) else pool for pool in pools)


def _with_gpu(pool: WorkerPool, part: float) -> WorkerPool:
    resources = {**pool.resources, "GPU": part * pool.parallel.ranks}
    return pool.model_copy(update={"resources": resources})


def _gpu_part(pools: tuple[WorkerPool, ...], gpus: float) -> float:
    sharing = [pool for pool in pools if _shares_gpus(pool)]
    ranks = sum(map(_ranks, sharing))
    free = floor(gpus - _gpus_taken(pools))
    if free >= ranks:
        return 1.0
    if free < 1 or any(pool.parallel.ranks > 1 for pool in sharing):
        return 0.0
    return floor(1e4 / ceil(ranks / free)) / 1e4


def _shares_gpus(pool: WorkerPool) -> bool:
    return pool.device == "auto" and "GPU" not in pool.resources


def _gpus_taken(pools: tuple[WorkerPool, ...]) -> float:
    numbered = {pool.device for pool in pools if ":" in pool.device}
    others = [p for p in pools if p.device == "cuda" or (p.device == "auto" and p.on_gpu)]
    asked = (p.replicas.max * p.resources.get("GPU", p.parallel.ranks) for p in others)
    return len(numbered) + sum(asked)


def threads_per_rank(pools: tuple[WorkerPool, ...], site: Site) -> int:
    """CPU threads of each rank of a CPU worker without a given number: an equal share, at least
    one."""
    asked = sum(pool.replicas.max * (pool.cpu_threads or 0) for pool in pools)
    on_gpus = sum(_ranks(p) for p in pools if p.on_gpu and p.cpu_threads is None)
    sharing = sum(_ranks(p) for p in pools if not p.on_gpu and p.cpu_threads is None)
    spare = floor((site.total_cpus - asked - on_gpus) / max(1, sharing))
    return max(1, min(spare, site.node_cpus))


def pinned(pools: tuple[WorkerPool, ...]) -> tuple[WorkerPool, ...]:
    """The pools whose workers shall get their own CPUs."""
    return tuple(pool for pool in pools if not pool.on_gpu and pool.cpu_pinning == "auto")


def squeezed(pools: tuple[WorkerPool, ...], site: Site) -> tuple[str, ...]:
    """The pools whose ranks get one CPU thread each because there are no more CPUs."""
    asking = [pool for pool in pools if not pool.on_gpu and pool.cpu_threads is None]
    return tuple(pool.label for pool in asking if site.total_cpus < sum(map(_ranks, pools)))


def _resolve_pool(
    pool: WorkerPool, pools: tuple[WorkerPool, ...], share: int, site: Site
) -> WorkerPool:
    size = pool.parallel.ranks
    each = min(share, max(1, site.node_cpus // size)) if not pool.on_gpu else 1
    threads = pool.cpu_threads or size * each
    ranks = sum(_ranks(p) for p in pools)
    fits = 0 < site.total_cpus < ranks and pool.cpu_threads is None
    cpus = size * floor(site.total_cpus / ranks * 100) / 100 if fits else float(threads)
    resources = {"CPU": cpus}
    if pool.device.startswith("cuda"):
        part = floor(1e4 / device_share(pool, pools)) / 1e4
        resources["GPU"] = part if size == 1 else float(size)
    return pool.model_copy(update={"cpu_threads": threads, "resources": resources | pool.resources})


def _ranks(pool: WorkerPool) -> int:
    return pool.replicas.max * pool.parallel.ranks


def _resolve_model(model: ModelSection, site: Site) -> ModelSection:
    path = model.path or site.bundled_path
    served = model.served_name or ("kvrelay-tiny" if model.path is None else _name_of(path))
    return model.model_copy(update={"path": path, "served_name": served})


def _name_of(path: str) -> str:
    """A hub id stays as it is; of a folder the last part counts."""
    parts = PurePath(path).parts
    return path if len(parts) <= 2 and not path.startswith(("/", ".", "~")) else parts[-1]
