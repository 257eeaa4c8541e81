"""Metrics of the cluster that a router knows: workers, pool nodes, tiers, promises."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from kvrelay.gc_pauses import GcPauses
from router.generation import ClusterSnapshot, WorkerStatus
from router.worker_metrics import of_links, of_workers, orphaned_blocks

POOL_LABELS = ("model_name", "pool_node", "tier", "state")


class ClusterGauges(Collector):
    """Of one scrape. Rendered beside the event loop."""

    def __init__(self, snapshot: ClusterSnapshot, model_name: str) -> None:
        self._snapshot = snapshot
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        told = self._snapshot
        text = "Requests admitted and unfinished."
        yield self._gauge("num_requests_running", text, told.running_requests)
        yield self._gauge("ready", "1 when requests can be served.", told.ready)
        text = "Pairs of workers kept out of placement."
        yield self._gauge("pairs_quarantined", text, told.quarantined_pairs)
        text = "Prompts that wait at the router for a prefill worker."
        yield self._gauge("shared_queue_prompts", text, told.queued_prompts)
        text = "Requests moved to another decode worker."
        yield self._counter("requests_moved", text, told.moved_requests)
        text = "Prompts that a decode worker took to compute itself."
        yield self._counter("local_prefills", text, told.local_prefills)
        yield self._promises()
        yield from of_workers(told.workers, self._model_name)
        yield from of_links(told.workers, told.linked, self._model_name)
        yield self._orphaned(told.workers)
        yield self._pool_nodes()
        yield from self._tiers()
        yield from self._pauses()

    def _pauses(self) -> Iterable[Metric]:
        """Of the router itself, of each worker and of each pool node."""
        text = "Pauses of Python's garbage collector, since the process has started."
        labels = ("model_name", "process")
        pauses = SummaryMetricFamily("kvrelay:gc_pause_seconds", text, labels=labels)
        text = "The longest of these pauses."
        longest = GaugeMetricFamily("kvrelay:gc_longest_pause_seconds", text, labels=labels)
        for process, one in self._paused():
            pauses.add_metric((self._model_name, process), one.count, one.total_s)
            longest.add_metric((self._model_name, process), one.longest_s)
        return pauses, longest

    def _paused(self) -> Iterator[tuple[str, GcPauses]]:
        yield "router", self._snapshot.pauses
        for worker in self._snapshot.workers:
            told = worker.counters
            yield worker.name, GcPauses(told.gc_pauses, told.gc_pause_s, told.gc_longest_pause_s)
        for node in self._snapshot.pool_nodes:
            yield node.name, node.pauses

    def _tiers(self) -> Iterable[Metric]:
        """Of QoS tiers with objectives."""
        text = "0 normal, 1 tightened, 2 output capped, 3 only the tier's reserve is served."
        labels = ("model_name", "tier")
        step = GaugeMetricFamily("kvrelay:qos_ladder_step", text, labels=labels)
        text = "Quantiles of the latest latencies, ttft and tpot, since the ladder's last step."
        by_kind = (*labels, "kind", "quantile")
        latency = GaugeMetricFamily("kvrelay:qos_latency_seconds", text, labels=by_kind)
        for tier in self._snapshot.tiers:
            step.add_metric((self._model_name, tier.name), tier.step)
            for (kind, quantile), seconds in tier.latencies_s.items():
                latency.add_metric((self._model_name, tier.name, kind, quantile), seconds)
        return step, latency

    def _promises(self) -> Metric:
        text = "Retry times told with refusals: whether clients came back, and got in."
        counter = CounterMetricFamily(
            "kvrelay:retry_promises", text, labels=("model_name", "outcome")
        )
        for outcome, count in self._snapshot.promises.items():
            counter.add_metric((self._model_name, outcome), float(count))
        return counter

    def _orphaned(self, workers: Sequence[WorkerStatus]) -> Metric:
        gauge = orphaned_blocks(workers, self._model_name)
        for node in self._snapshot.pool_nodes:
            gauge.add_metric((self._model_name, node.name, "pool-node"), node.orphaned_blocks)
        return gauge

    def _pool_nodes(self) -> Metric:
        text = "Blocks of a pool node by tier and state."
        gauge = GaugeMetricFamily("kvrelay:pool_blocks", text, labels=POOL_LABELS)
        for node in self._snapshot.pool_nodes:
            for (tier, state), blocks in node.blocks.items():
                gauge.add_metric((self._model_name, node.name, tier, state), blocks)
        return gauge

    def _counter(self, name: str, text: str, value: int) -> CounterMetricFamily:
        counter = CounterMetricFamily(f"kvrelay:{name}", text, labels=("model_name",))
        counter.add_metric((self._model_name,), value)
        return counter

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(f"kvrelay:{name}", text, labels=("model_name",))
        gauge.add_metric((self._model_name,), float(value))
        return gauge
