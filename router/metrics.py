"""What `/metrics` says, by vLLM's names and units under the prefix `kvrelay:`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvrelay.messages import Counters
from kvrelay.types import PrefixOrigin
from router.generation import Dispatcher, LinkStatus, WorkerStatus

TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
ITL_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
E2E_BUCKETS_S = (
    *(0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0),
)


REFUSAL_BUCKETS_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.5)
ERROR_BUCKETS = (
    *(0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 0.95, 1.0),
    *(1.05, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0),
)

LABELS = ("model_name", "worker", "role")


def _usage(worker: WorkerStatus) -> float:
    """Cached blocks that no request holds are not in use."""
    available = worker.counters.free_blocks + worker.counters.cached_blocks
    return 1 - available / worker.total_blocks if worker.total_blocks else 0.0


class RouterMetrics:
    """One registry of its own, so that several routers can live in one process."""

    def __init__(self, dispatcher: Dispatcher, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name}
        self.ttft = self._histogram("time_to_first_token_seconds", "", TTFT_BUCKETS_S)
        self.itl = self._histogram("inter_token_latency_seconds", "", ITL_BUCKETS_S)
        self.e2e = self._histogram("e2e_request_latency_seconds", "", E2E_BUCKETS_S)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens admitted.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._success = Counter(
            "kvrelay:request_success",
            "Requests finished, by reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._refused = Counter(
            "kvrelay:request_rejections",
            "Requests refused or invalid, by reason.",
            ["model_name", "reason", "tier"],
            registry=self.registry,
        )
        self.refusal = self._histogram(
            "refusal_seconds", "From a request's first byte to its refusal.", REFUSAL_BUCKETS_S
        )
        self._phases = Histogram(
            "kvrelay:request_phase_seconds",
            "Time of each phase of a request's ledger.",
            ["model_name", "phase"],
            buckets=TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self._prediction_errors = Histogram(
            "kvrelay:prediction_error_ratio",
            "Predicted by actual time to first token, and per token after it.",
            ["model_name", "kind"],
            buckets=ERROR_BUCKETS,
            registry=self.registry,
        )
        self.registry.register(ClusterGauges(dispatcher, model_name))

    def exposition(self) -> bytes:
        return generate_latest(self.registry)

    def refused(self, reason: str, tier: str, after_s: float) -> None:
        """`after_s`: since the face received it."""
        self.refusal.observe(after_s)
        self.invalid(reason, tier)

    def invalid(self, reason: str, tier: str) -> None:
        self._refused.labels(**self._labels, reason=reason, tier=tier).inc()

    def started(self, received_s: float, prompt_tokens: int) -> RequestTimer:
        self.prompt_tokens.inc(prompt_tokens)
        return RequestTimer(self, received_s)

    def finished(self, reason: str, ledger: Mapping[str, float]) -> None:
        self._success.labels(**self._labels, finished_reason=reason).inc()
        for phase, seconds in ledger.items():
            self._phases.labels(**self._labels, phase=phase).observe(seconds)

    def predicted(self, ratios: Mapping[str, float]) -> None:
        """`ratios`: # ttft, tpot |-> predicted by actual seconds of one request"""
        for kind, ratio in ratios.items():
            self._prediction_errors.labels(**self._labels, kind=kind).observe(ratio)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        documentation = text or name.replace("_", " ")
        return Histogram(
            f"kvrelay:{name}",
            documentation,
            ["model_name"],
            buckets=buckets,
            registry=self.registry,
        ).labels(**self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"kvrelay:{name}", text, ["model_name"], registry=self.registry).labels(
            **self._labels
        )


class RequestTimer:
    """Times one request. All arguments and readings are perf_counter seconds."""

    def __init__(self, metrics: RouterMetrics, received_s: float) -> None:
        self._metrics = metrics
        self._received_s = received_s
        self._last_token_s: dict[int, float] = {}  # choice |-> its latest token

    def tokens(self, choice: int, count: int, now_s: float) -> None:
        if not count:
            return
        self._metrics.generation_tokens.inc(count)
        previous_s = self._last_token_s.get(choice)
        if previous_s is not None:
            self._metrics.itl.observe(now_s - previous_s)
        elif not self._last_token_s:
            self._metrics.ttft.observe(now_s - self._received_s)
        self._last_token_s[choice] = now_s

    def finished(self, reason: str, ledger: Mapping[str, float]) -> None:
        self._metrics.e2e.observe(time.perf_counter() - self._received_s)
        self._metrics.finished(reason, ledger)


WORKER_GAUGES: tuple[tuple[str, str, Callable[[WorkerStatus], float]], ...] = (
    ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", _usage),
    ("num_requests_waiting", "Requests waiting at the worker.", lambda w: w.counters.waiting),
    ("worker_requests_running", "Requests running at the worker.", lambda w: w.counters.running),
    ("kv_blocks_total", "KV blocks of the worker.", lambda w: w.total_blocks),
    ("kv_blocks_free", "KV blocks neither held nor cached.", lambda w: w.counters.free_blocks),
    ("kv_blocks_cached", "KV blocks kept for reuse.", lambda w: w.counters.cached_blocks),
    ("blocks_orphaned", "KV blocks that no one holds.", lambda w: w.counters.orphaned_blocks),
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


POOL_LABELS = ("model_name", "pool_node", "tier", "state")
CANARY_RESULTS: tuple[tuple[str, Callable[[Counters], int]], ...] = (
    ("passed", lambda c: c.canaries_passed),
    ("mismatched", lambda c: c.canaries_mismatched),
    ("skipped", lambda c: c.canaries_skipped),
)


LINK_LABELS = ("model_name", "src", "dst", "transport")
LINK_GAUGES: tuple[tuple[str, str, Callable[[LinkStatus], float]], ...] = (
    ("link_info", "1 for each link between two workers.", lambda link: 1.0),
    ("link_bandwidth_bytes_per_second", "Speed of one write.", lambda link: link.bytes_per_s),
    ("link_latency_seconds", "One message, one way.", lambda link: link.latency_s),
)


class ClusterGauges(Collector):
    """Read from the dispatcher at the moment of each scrape."""

    def __init__(self, dispatcher: Dispatcher, model_name: str) -> None:
        self._dispatcher = dispatcher
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        running = self._dispatcher.running_requests()
        yield self._gauge("num_requests_running", "Requests admitted and unfinished.", running)
        yield self._gauge("ready", "1 when requests can be served.", self._dispatcher.ready())
        pairs = len(self._dispatcher.quarantined())
        yield self._gauge("pairs_quarantined", "Pairs of workers kept out of placement.", pairs)
        told = self._dispatcher
        text = "Prompts that wait at the router for a prefill worker."
        yield self._gauge("shared_queue_prompts", text, told.queued_prompts())
        text = "Requests moved to another decode worker."
        yield self._counter("requests_moved", text, told.moved_requests())
        text = "Prompts that a decode worker took to compute itself."
        yield self._counter("local_prefills", text, told.local_prefills())
        yield self._promises()
        workers = self._dispatcher.workers()
        yield self._canaries(workers)
        for name, text, value in WORKER_GAUGES:
            gauge = GaugeMetricFamily(f"kvrelay:{name}", text, labels=LABELS)
            if name == "blocks_orphaned":
                self._orphaned_in_pools(gauge)
            yield self._per_worker(gauge, value, workers)
        for name, text, value in WORKER_COUNTERS:
            counter = CounterMetricFamily(f"kvrelay:{name}", text, labels=LABELS)
            yield self._per_worker(counter, value, workers)
        yield self._prefix_sources(workers)
        yield from self._links(workers)
        yield self._pool_nodes()
        yield from self._tiers()

    def _tiers(self) -> Iterable[Metric]:
        """Of QoS tiers with objectives."""
        text = "0 normal, 1 tightened, 2 output capped, 3 only the tier's reserve is served."
        labels = ("model_name", "tier")
        step = GaugeMetricFamily("kvrelay:qos_ladder_step", text, labels=labels)
        text = "Quantiles of the latest latencies, ttft and tpot, since the ladder's last step."
        by_kind = (*labels, "kind", "quantile")
        latency = GaugeMetricFamily("kvrelay:qos_latency_seconds", text, labels=by_kind)
        for tier in self._dispatcher.tiers():
            step.add_metric((self._model_name, tier.name), tier.step)
            for (kind, quantile), seconds in tier.latencies_s.items():
                latency.add_metric((self._model_name, tier.name, kind, quantile), seconds)
        return step, latency

    def _promises(self) -> Metric:
        text = "Retry times told with refusals: whether clients came back, and got in."
        counter = CounterMetricFamily(
            "kvrelay:retry_promises", text, labels=("model_name", "outcome")
        )
        for outcome, count in self._dispatcher.promises().items():
            counter.add_metric((self._model_name, outcome), float(count))
        return counter

    def _canaries(self, workers: Sequence[WorkerStatus]) -> Metric:
        """By worker, as the decode side counts them."""
        text = "Handed-over KV that was checked by recomputing the last prompt position."
        checks = CounterMetricFamily("kvrelay:canary_checks", text, labels=(*LABELS, "result"))
        for worker in workers:
            labels = (self._model_name, worker.name, worker.role)
            for result, count in CANARY_RESULTS:
                checks.add_metric((*labels, result), float(count(worker.counters)))
        return checks

    def _prefix_sources(self, workers: Sequence[WorkerStatus]) -> Metric:
        counter = CounterMetricFamily(
            "kvrelay:prefix_source",
            "Sequences begun, by where the KV of their prefix came from.",
            labels=(*LABELS, "source"),
        )
        for worker in workers:
            for origin in PrefixOrigin:
                labels = (self._model_name, worker.name, worker.role, origin)
                counter.add_metric(labels, getattr(worker.counters, f"prefixes_{origin}"))
        return counter

    def _links(self, workers: Sequence[WorkerStatus]) -> Iterable[Metric]:
        """One series per connection between two workers."""
        for name, text, value in LINK_GAUGES:
            gauge = GaugeMetricFamily(f"kvrelay:{name}", text, labels=LINK_LABELS)
            for worker in workers:
                for link in worker.links:
                    labels = (self._model_name, worker.name, link.peer, link.transport)
                    gauge.add_metric(labels, value(link))
            yield gauge

    def _orphaned_in_pools(self, gauge: GaugeMetricFamily) -> None:
        for node in self._dispatcher.pool_nodes():
            gauge.add_metric((self._model_name, node.name, "pool-node"), node.orphaned_blocks)

    def _pool_nodes(self) -> Metric:
        text = "Blocks of a pool node by tier and state."
        gauge = GaugeMetricFamily("kvrelay:pool_blocks", text, labels=POOL_LABELS)
        for node in self._dispatcher.pool_nodes():
            for (tier, state), blocks in node.blocks.items():
                gauge.add_metric((self._model_name, node.name, tier, state), blocks)
        return gauge

    def _per_worker(
        self,
        metric: GaugeMetricFamily | CounterMetricFamily,
        value: Callable[[WorkerStatus], float],
        workers: Iterable[WorkerStatus],
    ) -> Metric:
        for worker in workers:
            labels = (self._model_name, worker.name, worker.role)
            metric.add_metric(labels, float(value(worker)))
        return metric

    def _counter(self, name: str, text: str, value: int) -> CounterMetricFamily:
        counter = CounterMetricFamily(f"kvrelay:{name}", text, labels=("model_name",))
        counter.add_metric((self._model_name,), value)
        return counter

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(f"kvrelay:{name}", text, labels=("model_name",))
        gauge.add_metric((self._model_name,), float(value))
        return gauge
