"""What a router's `/metrics` says, by vLLM's names and units under the prefix `kvrelay:`.

The router measures its requests itself (`RouterMetrics`). What it knows of workers, links, pool
nodes and tiers is read at each scrape (`ClusterGauges`). Which counters of a worker appear, and by
which names, is said in `kvrelay.counters.Counters`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvrelay.counters import SHOWN, LinkState, Shown, kv_used
from kvrelay.gc_pauses import GcPauses
from kvrelay.types import TAKES_ALL
from router.core.load import histograms
from router.core.state.generation import ClusterSnapshot, WorkerStatus
from router.core.state.quarantine import Pair

Family = TypeVar("Family", GaugeMetricFamily, CounterMetricFamily)
LABELS = ("model_name", "worker")
INFO_LABELS = (*LABELS, "role", "state", "device", "transport")
"""A role is no label of a counter: its series would end when the worker takes another one."""


MOST_LINKS = 1000
LINK_LABELS = ("model_name", "src", "dst", "transport")
LINK_GAUGES: tuple[tuple[str, str, Callable[[LinkState], float]], ...] = (
    ("link_info", "1 for each link between two workers.", lambda link: 1.0),
    ("link_bandwidth_bytes_per_second", "Speed of one write.", lambda link: link.bytes_per_s),
    ("link_latency_seconds", "One message, one way.", lambda link: link.latency_s),
)


def of_workers(workers: Sequence[WorkerStatus], model_name: str) -> Iterator[Metric]:
    """All but the orphaned blocks, which pool nodes have too."""
    yield _info(workers, model_name)
    yield _memory(workers, model_name)
    text = "Share of KV blocks in use, 0 to 1."
    usage = GaugeMetricFamily("kvrelay:kv_cache_usage_perc", text, labels=LABELS)
    yield _per_worker(usage, lambda w: kv_used(w.counters, w.total_blocks), workers, model_name)
    text = "KV blocks of the worker."
    total = GaugeMetricFamily("kvrelay:kv_blocks_total", text, labels=LABELS)
    yield _per_worker(total, lambda w: w.total_blocks, workers, model_name)
    for _, counted in groupby(SHOWN, lambda one: one[1].metric):
        yield _counted([*counted], workers, model_name)


def _info(workers: Sequence[WorkerStatus], model_name: str) -> Metric:
    text = "1 for each worker, with its role at present, and whether it serves or drains."
    gauge = GaugeMetricFamily("kvrelay:worker_info", text, labels=INFO_LABELS)
    for one in workers:
        state = "draining" if one.counters.draining else "serving"
        own = (model_name, one.name, one.role, state, one.device, one.transport)
        gauge.add_metric(own, 1.0)
    return gauge


def _memory(workers: Sequence[WorkerStatus], model_name: str) -> Metric:
    text = "Memory of the worker by what it is for, as divided at its start."
    gauge = GaugeMetricFamily("kvrelay:worker_memory_bytes", text, labels=(*LABELS, "part"))
    for worker in workers:
        for one in worker.memory:
            gauge.add_metric((model_name, worker.name, one.part), one.nbytes)
    return gauge


def _counted(
    counted: Sequence[tuple[str, Shown]], workers: Sequence[WorkerStatus], model_name: str
) -> Metric:
    """One metric, of one counter or of several with a label each."""
    shown = counted[0][1]
    kind = CounterMetricFamily if shown.is_total else GaugeMetricFamily
    labels = LABELS if shown.label is None else (*LABELS, shown.label[0])
    family = kind(f"kvrelay:{shown.metric}", shown.text, labels=labels)
    for worker in workers:
        own = (model_name, worker.name)
        for name, one in counted:
            label = () if one.label is None else one.label[1:]
            family.add_metric((*own, *label), float(getattr(worker.counters, name)))
    return family


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
    text = "KV blocks that no one holds, of a worker or pool node."
    gauge = GaugeMetricFamily("kvrelay:blocks_orphaned", text, labels=LABELS)
    return _per_worker(gauge, lambda w: w.counters.orphaned_blocks, workers, model_name)


def _per_worker(
    metric: Family,
    value: Callable[[WorkerStatus], float],
    workers: Iterable[WorkerStatus],
    model_name: str,
) -> Family:
    for worker in workers:
        metric.add_metric((model_name, worker.name), float(value(worker)))
    return metric


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
        text = "Requests moved to another decode worker from one that lives, by why they left it."
        yield self._by("requests_moved", text, "cause", told.moved_requests)
        text = "Prompts that a decode worker took to compute itself."
        yield self._counter("local_prefills", text, told.local_prefills)
        text = "Requests that ran alone, since they were in the last step of a worker that died."
        yield self._counter("requests_suspected", text, told.suspected_requests)
        text = "Requests refused for good, since they kill workers."
        yield self._counter("requests_poison", text, told.poison_requests)
        yield from self._directory()
        text = "Retry times told with refusals: whether clients came back, and got in."
        yield self._by("retry_promises", text, "outcome", told.promises)
        yield from of_workers(told.workers, self._model_name)
        yield from of_links(told.workers, told.linked, self._model_name)
        yield self._orphaned(told.workers)
        yield self._pool_nodes()
        yield from self._tiers()
        yield from self._offered()
        yield from self._prefilled()
        yield from self._needs()
        yield self._starts()
        yield self._shares()
        yield from self._pauses()

    def _offered(self) -> Iterable[Metric]:
        """Admitted and refused requests, each once however often it comes back."""
        sums = (
            ("requests", "Requests that clients have asked for."),
            ("prompt_tokens", "Tokens of their prompts that no worker has cached."),
            ("output_tokens", "Tokens that they are expected to have as output."),
        )
        for name, text in sums:
            labels = ("model_name", "tier")
            counter = CounterMetricFamily(f"kvrelay:offered_{name}", text, labels=labels)
            for tier, work in self._snapshot.offered.items():
                counter.add_metric((self._model_name, tier), getattr(work, name))
            yield counter
        text = "Requests beside these that not even an idle worker could serve in time."
        name = "kvrelay:offered_hopeless_requests"
        hopeless = CounterMetricFamily(name, text, labels=("model_name", "tier"))
        for tier, count in self._snapshot.hopeless.items():
            hopeless.add_metric((self._model_name, tier), count)
        yield hopeless

    def _prefilled(self) -> Iterable[Metric]:
        """By pool of workers, whoever of them is there."""
        labels = ("model_name", "pool")
        sums = (
            ("prompts", "Prompts that the pool's workers have begun to compute."),
            ("tokens", "Tokens of these prompts that were not cached."),
        )
        for attribute, text in sums:
            name = f"kvrelay:pool_prefilled_{attribute}"
            counter = CounterMetricFamily(name, text, labels=labels)
            for pool, work in self._snapshot.prefilled.items():
                counter.add_metric((self._model_name, pool), getattr(work, attribute))
            yield counter
        text = "1 for each pool that takes only some prompts, with its rule."
        rules = GaugeMetricFamily("kvrelay:pool_takes_info", text, labels=(*labels, "takes"))
        ruled = [one for one in self._snapshot.workers if one.takes != TAKES_ALL]
        for pool, rule in sorted({(one.pool, str(one.takes)) for one in ruled}):
            rules.add_metric((self._model_name, pool, rule), 1.0)
        yield rules

    def _needs(self) -> Iterable[Metric]:
        """By what was offered to this router over the last minute; sums over routers."""
        labels, needs = ("model_name", "role"), self._snapshot.needs
        text = "Workers that the offered work would keep busy all the time."
        busy = GaugeMetricFamily("kvrelay:busy_workers", text, labels=labels)
        text = "That work over what the workers there can do."
        saturation = GaugeMetricFamily("kvrelay:saturation", text, labels=labels)
        text = "Workers that keep the objectives of that work."
        by_pool = ("model_name", "pool", "role")
        desired = GaugeMetricFamily("kvrelay:desired_workers", text, labels=by_pool)
        for role, need in needs.items():
            busy.add_metric((self._model_name, role), need.busy)
            saturation.add_metric((self._model_name, role), need.saturation)
            for pool, workers in need.desired.items():
                desired.add_metric((self._model_name, pool, role), workers)
        return busy, saturation, desired

    def _starts(self) -> Metric:
        text = "Phases of the starts of workers, each counted by the router that it joined first."
        return self._histograms("start_seconds", text, "phase", self._snapshot.starts)

    def _shares(self) -> Metric:
        text = "Predicted times of admitted and refused requests over their objectives."
        return self._histograms("objective_share", text, "kind", self._snapshot.shares)

    def _histograms(
        self, name: str, text: str, label: str, found: Mapping[str, histograms.Histogram]
    ) -> Metric:
        labels = ("model_name", label)
        family = HistogramMetricFamily(f"kvrelay:{name}", text, labels=labels)
        for value, one in found.items():
            buckets = [(floatToGoString(border), count) for border, count in one.up_to().items()]
            family.add_metric((self._model_name, value), buckets, one.sum)
        return family

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

    def _directory(self) -> Iterable[Metric]:
        told = self._snapshot.directory
        text = "Different blocks in the router's directory."
        yield self._gauge("directory_blocks", text, told.blocks)
        text = "Memory that the directory takes, estimated."
        yield self._gauge("directory_bytes", text, told.used_bytes)
        text = "Blocks that the directory has dropped because it was full."
        yield self._counter("directory_dropped_blocks", text, told.dropped_blocks)

    def _by(self, name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
        counter = CounterMetricFamily(f"kvrelay:{name}", text, labels=("model_name", label))
        for value, count in values.items():
            counter.add_metric((self._model_name, value), float(count))
        return counter

    def _orphaned(self, workers: Sequence[WorkerStatus]) -> Metric:
        gauge = orphaned_blocks(workers, self._model_name)
        for node in self._snapshot.pool_nodes:
            gauge.add_metric((self._model_name, node.name), node.orphaned_blocks)
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


class RouterMetrics:
    """One registry of its own, so that several routers can live in one process."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name}
        self.ttft = self._histogram("time_to_first_token_seconds", "", TTFT_BUCKETS_S)
        self.itl = self._histogram("inter_token_latency_seconds", "", ITL_BUCKETS_S)
        self.e2e = self._histogram("e2e_request_latency_seconds", "", E2E_BUCKETS_S)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens admitted.")
        self.prompt_tokens_ahead = self._counter(
            "prompt_tokens_ahead", "Prompt tokens computed before their prompt was complete."
        )
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

    def exposition(self, snapshot: ClusterSnapshot) -> bytes:
        """Takes milliseconds, so in another thread than the event loop's."""
        cluster = ClusterGauges(snapshot, self._labels["model_name"])
        return generate_latest(self.registry) + generate_latest(cluster)

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
