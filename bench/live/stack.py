"""The cluster under load: one prefill and one decode worker, each on a core, and its routers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.live.offered import Offered
from bench.live.outcome import Objectives, Outcome
from bench.live.sending import send
from bench.serving.plain_cluster import PlainCluster, WorkerPlan, plain_cluster

PLANS = (
    WorkerPlan(role="prefill", cores=(0,), nice=5),
    WorkerPlan(role="decode", cores=(1,), nice=5),
)
OTHERS = (0, 1)
"""The router and the load generator run on whichever of the workers' cores is idle, and go first:
in production they have cores of their own."""
WORKERS: dict[str, object] = {
    "engine.kv_memory": "1GiB",
    "scheduler.max_running_requests": 32,
    "scheduler.prefill_chunk_tokens": 256,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """`ladder`: tiers are tightened when their latencies leave the objectives. `queue_limit` counts
    only with that admission policy."""

    admission: str
    ladder: bool = False
    queue_limit: int = 8

    def settings(self, objectives: Objectives | None) -> dict[str, object]:
        """Keys of the cluster file."""
        given: dict[str, object] = {
            "router.admission.policy": self.admission,
            "router.admission.queue_limit": self.queue_limit,
            "qos.ladder.enabled": self.ladder,
        }
        if objectives is not None:
            given["qos.tiers"] = {"default": {**durations(objectives), "default": True}}
        return given


def durations(objectives: Objectives) -> dict[str, str]:
    """As a cluster file has them."""
    ms = {"ttft": 1000 * objectives.ttft_s, "tpot": 1000 * objectives.tpot_s}
    return {name: f"{value:.3f}ms" for name, value in ms.items()}


def cluster_file(policy: Policy, objectives: Objectives) -> dict[str, object]:
    """The same as a cluster file, for the simulator."""
    raw: dict[str, object] = {
        "workers": [{"role": plan.role, "replicas": 1, "device": plan.device} for plan in PLANS]
    }
    for key, value in (WORKERS | policy.settings(objectives)).items():
        section: dict[str, object] = raw
        *path, last = key.split(".")
        for name in path:
            section = section.setdefault(name, {})  # type: ignore[assignment]
        section[last] = value
    return raw


@contextmanager
def stack(
    policy: Policy,
    objectives: Objectives | None,
    record: Path | None = None,
    *,
    model: Path,
    routers: int = 1,
    traces: Path | None = None,
) -> Iterator[PlainCluster]:
    """The router writes all that it hears to `record`, and the workers theirs to `traces`."""
    settings, workers = policy.settings(objectives), dict(WORKERS)
    if record is not None:
        settings["router.record"] = str(record)
    if traces is not None:
        workers["observability.trace_dir"] = str(traces)
    with processes(workers, settings, model=model, routers=routers) as cluster:
        yield cluster


@contextmanager
def processes(
    workers: Mapping[str, object], router: Mapping[str, object], *, model: Path, routers: int = 1
) -> Iterator[PlainCluster]:
    """By keys of the cluster file."""
    with plain_cluster(
        model,
        PLANS,
        _options(workers),
        router_settings=_options(router),
        router_cores=OTHERS,
        routers=routers,
    ) as cluster:
        yield cluster


def _options(settings: Mapping[str, object]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in settings.items()]


def load(
    cluster: PlainCluster,
    offered: Sequence[Offered],
    *,
    patience_s: float = 10.0,
    at_once: int | None = None,
) -> list[Outcome]:
    """From another process; to the routers in turn."""
    cores = ("taskset", "-c", ",".join(map(str, OTHERS)))
    return send(cluster.http_ports, offered, patience_s=patience_s, at_once=at_once, under=cores)
