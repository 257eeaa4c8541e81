"""What `/metrics` says of requests, by vLLM's names and units under the prefix `kvrelay:`."""

from __future__ import annotations

import time
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from router.cluster_gauges import ClusterGauges
from router.generation import ClusterSnapshot

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
