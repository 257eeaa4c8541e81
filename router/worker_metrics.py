"""Metrics of the workers, as a router knows them: a series for each, or for each of their links."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvrelay.activity import kv_used
from kvrelay.messages import Counters, LinkState
from kvrelay.types import PrefixOrigin
from router.generation import WorkerStatus
from router.placement import Pair

Family = TypeVar("Family", GaugeMetricFamily, CounterMetricFamily)
LABELS = ("model_name", "worker", "role")


def _usage(worker: WorkerStatus) -> float:
    return kv_used(worker.counters, worker.total_blocks)


WORKER_GAUGES: tuple[tuple[str, str, Callable[[WorkerStatus], float]], ...] = (
    ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", _usage),
    ("num_requests_waiting", "Requests waiting at the worker.", lambda w: w.counters.waiting),
    ("worker_requests_running", "Requests running at the worker.", lambda w: w.counters.running),
    ("kv_blocks_total", "KV blocks of the worker.", lambda w: w.total_blocks),
    ("kv_blocks_free", "KV blocks neither held nor cached.", lambda w: w.counters.free_blocks),
    ("kv_blocks_cached", "KV blocks kept for reuse.", lambda w: w.counters.cached_blocks),
)

WORKER_COUNTERS: tuple[tuple[str, str, Callable[[WorkerStatus], float]], ...] = (
    ("worker_steps", "Engine steps.", lambda w: w.counters.steps),
    ("worker_busy_seconds", "Time spent in engine steps.", lambda w: w.counters.busy_s),
    ("worker_prompt_tokens", "Prompt tokens computed.", lambda w: w.counters.prompt_tokens),
    ("worker_generated_tokens", "Tokens decoded.", lambda w: w.counters.generated_tokens),
    ("num_preemptions", "Sequences preempted.", lambda w: w.counters.preemptions),
    (
        "prefix_cache_queries",
        "Prompt tokens looked up.",
        lambda w: w.counters.prefix_queried_tokens,
    ),
    ("prefix_cache_hits", "Prompt tokens found cached.", lambda w: w.counters.prefix_hit_tokens),
    ("pool_queries", "Prompt tokens sought in a pool.", lambda w: w.counters.pool_queried_tokens),
    ("pool_host_hits", "Fetched from a host tier.", lambda w: w.counters.pool_host_tokens),
    ("pool_disk_hits", "Fetched from a disk tier.", lambda w: w.counters.pool_disk_tokens),
    (
        "pool_remote_hits",
        "Fetched from another host's pool.",
        lambda w: w.counters.pool_remote_tokens,
    ),
    ("pool_declined", "There, but faster computed.", lambda w: w.counters.pool_declined_tokens),
    ("peer_hits", "Pulled out of another worker's cache.", lambda w: w.counters.peer_tokens),
    ("kv_transfers", "Slabs written or scattered.", lambda w: w.counters.transfers),
    ("kv_transfer_bytes", "KV bytes written or scattered.", lambda w: w.counters.transfer_bytes),
    ("kv_transfer_seconds", "Time in gather and scatter.", lambda w: w.counters.transfer_s),
)


CANARY_RESULTS: tuple[tuple[str, Callable[[Counters], int]], ...] = (
    ("passed", lambda c: c.canaries_passed),
    ("mismatched", lambda c: c.canaries_mismatched),
)


MOST_LINKS = 1000
LINK_LABELS = ("model_name", "src", "dst", "transport")
LINK_GAUGES: tuple[tuple[str, str, Callable[[LinkState], float]], ...] = (
    ("link_info", "1 for each link between two workers.", lambda link: 1.0),
    ("link_bandwidth_bytes_per_second", "Speed of one write.", lambda link: link.bytes_per_s),
    ("link_latency_seconds", "One message, one way.", lambda link: link.latency_s),
)


def of_workers(workers: Sequence[WorkerStatus], model_name: str) -> Iterator[Metric]:
    """All but the orphaned blocks, which pool nodes have too."""
    for name, text, value in WORKER_GAUGES:
        gauge = GaugeMetricFamily(f"kvrelay:{name}", text, labels=LABELS)
        yield _per_worker(gauge, value, workers, model_name)
    for name, text, value in WORKER_COUNTERS:
        counter = CounterMetricFamily(f"kvrelay:{name}", text, labels=LABELS)
        yield _per_worker(counter, value, workers, model_name)
    yield _canaries(workers, model_name)
    yield _prefix_sources(workers, model_name)


def of_links(
    workers: Sequence[WorkerStatus], linked: Iterable[Pair], model_name: str
) -> Iterator[Metric]:
    """One series for each connection between two workers of `linked`: those of every pair of
    workers would be too many."""
    names = {worker.incarnation: worker.name for worker in workers}
    links = [
        ((model_name, names[src], names[dst], link.transport), link)
        for src, dst, link in islice(_connections(workers, linked), MOST_LINKS)
    ]
    for name, text, value in LINK_GAUGES:
        gauge = GaugeMetricFamily(f"kvrelay:{name}", text, labels=LINK_LABELS)
        for labels, link in links:
            gauge.add_metric(labels, value(link))
        yield gauge


def _connections(
    workers: Sequence[WorkerStatus], linked: Iterable[Pair]
) -> Iterator[tuple[str, str, LinkState]]:
    """Both ways of each pair, as far as they are here."""
    links = {
        (worker.incarnation, link.peer): link
        for worker in workers
        for link in worker.counters.links
    }
    here = {worker.incarnation for worker in workers}
    for pair in linked:
        for src, dst in ((pair.prefill, pair.decode), (pair.decode, pair.prefill)):
            if dst in here and (src, dst) in links:
                yield src, dst, links[src, dst]


def orphaned_blocks(workers: Sequence[WorkerStatus], model_name: str) -> GaugeMetricFamily:
    text = "KV blocks that no one holds."
    gauge = GaugeMetricFamily("kvrelay:blocks_orphaned", text, labels=LABELS)
    return _per_worker(gauge, lambda w: w.counters.orphaned_blocks, workers, model_name)


def _canaries(workers: Sequence[WorkerStatus], model_name: str) -> Metric:
    """By worker, as the decode side counts them."""
    text = "Handed-over KV whose digest was compared with that of the prefill worker."
    checks = CounterMetricFamily("kvrelay:canary_checks", text, labels=(*LABELS, "result"))
    for worker in workers:
        labels = (model_name, worker.name, worker.role)
        for result, count in CANARY_RESULTS:
            checks.add_metric((*labels, result), float(count(worker.counters)))
    return checks


def _prefix_sources(workers: Sequence[WorkerStatus], model_name: str) -> Metric:
    counter = CounterMetricFamily(
        "kvrelay:prefix_source",
        "Sequences begun, by where the KV of their prefix came from.",
        labels=(*LABELS, "source"),
    )
    for worker in workers:
        for origin in PrefixOrigin:
            labels = (model_name, worker.name, worker.role, origin)
            counter.add_metric(labels, getattr(worker.counters, f"prefixes_{origin}"))
    return counter


def _per_worker(
    metric: Family,
    value: Callable[[WorkerStatus], float],
    workers: Iterable[WorkerStatus],
    model_name: str,
) -> Family:
    for worker in workers:
        metric.add_metric((model_name, worker.name, worker.role), float(value(worker)))
    return metric
