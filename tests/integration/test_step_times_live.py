"""Real workers time their steps, tell it, and correct it: predictions against what clients saw."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import engine.bundled
from cluster.cli.status.asked import of_router
from cluster.cli.status.tables import print_table
from engine.core.step_times import decode_work, prefill_work
from kvrelay.types import Role
from router.core.load.step_times import WorkerTimes
from router.core.state.worker_view import WorkerView
from tests.access import ACCESS
from tests.integration.split_kit import (
    Cluster,
    WorkerHost,
    running_cluster,
    wait_until,
    worker_settings,
)

BUNDLED = Path(engine.bundled.__file__).parent / "checkpoint"
PROMPT_TOKENS, OUTPUT_TOKENS, REQUESTS = 400, 48, 12
TOLERANCE = 3.0
"""Below the fastest request and above the slowest: other processes may take their cores."""


@pytest.fixture
def cluster(hosts: tuple[WorkerHost, WorkerHost]) -> Iterator[Cluster]:
    changes = {"profile": "auto", "dtype": "bfloat16", "prefill_chunk_tokens": 256}
    workers = [
        (host, worker_settings(f"{role}-0", role, BUNDLED, **changes))
        for host, role in zip(hosts, (Role.PREFILL, Role.DECODE), strict=True)
    ]
    with running_cluster(BUNDLED, workers) as running:
        yield running


def view(cluster: Cluster, role: Role) -> WorkerView:
    views = cluster.router.process.dispatcher.core.state.workers.values()
    (found,) = [view for view in views if view.hello.role is role]
    return found


def times(cluster: Cluster, role: Role) -> WorkerTimes:
    found = view(cluster, role)
    return WorkerTimes.of(found.hello).corrected(found.counters)


class Clock:
    """What a histogram's mean was of what has come since it was last read."""

    def __init__(self, cluster: Cluster, metric: str) -> None:
        self.cluster, self.metric, self.before = cluster, f"kvrelay:{metric}", (0.0, 0.0)

    def read_s(self) -> float:
        text = self.cluster.metrics()
        values = {
            sample.name: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        now = values[f"{self.metric}_sum"], values[f"{self.metric}_count"]
        total_s, count = now[0] - self.before[0], now[1] - self.before[1]
        self.before = now
        return total_s / count


def test_what_workers_tell_predicts_what_clients_see(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    ttft = Clock(cluster, "time_to_first_token_seconds")
    itl = Clock(cluster, "inter_token_latency_seconds")
    actual: dict[str, list[float]] = {"ttft": [], "itl": []}
    for i in range(REQUESTS):
        cluster.completion(
            [3 + i, *range(4, 3 + PROMPT_TOKENS)], max_tokens=OUTPUT_TOKENS, ignore_eos=True
        )
        actual["ttft"].append(ttft.read_s())
        actual["itl"].append(itl.read_s())
    wait_until(lambda: view(cluster, Role.DECODE).counters.running == 0, "the last one is told")
    decode = times(cluster, Role.DECODE)
    predicted = {
        "ttft": times(cluster, Role.PREFILL).step_s(prefill_work(PROMPT_TOKENS)),
        "itl": decode.step_s(decode_work(1, PROMPT_TOKENS + (OUTPUT_TOKENS - 1) // 2)),
    }
    with capsys.disabled():
        print(f"\npredicted {predicted}, actual {actual}")
        print_table(of_router(cluster.internal_grpc, ACCESS))
    for kind, seconds in actual.items():
        assert min(seconds) / TOLERANCE < predicted[kind] < max(seconds) * TOLERANCE, kind


def test_a_worker_tells_what_it_runs(cluster: Cluster) -> None:
    told = view(cluster, Role.DECODE)
    ends, timed = {1, 16}, {rows for rows, _ in told.hello.step_times.decode_knots}
    assert ends <= timed <= {1, 2, 4, 8, 16}
    assert told.hello.step_times.error > 0 or timed == ends, "nothing was held out"
    cluster.completion([*range(3, 100)], max_tokens=4)
    wait_until(lambda: told.counters.decode_correction != 1, "a step was compared")
    prefill = view(cluster, Role.PREFILL)
    wait_until(lambda: prefill.counters.prefill_correction != 1, "a chunk was compared")
    assert prefill.counters.decode_correction == 1
    wait_until(lambda: told.counters.decode_sequences == 0, "the sequence is gone")
    assert told.counters.decode_kv_tokens == told.counters.reserved_sequences == 0


def test_status_shows_times_and_corrections(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    print_table(of_router(cluster.internal_grpc, ACCESS))
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("decode-0 step times: ")]
    assert "; decode x 1.00 (good) of {1: " in line
    assert lines.index(line) > next(i for i, row in enumerate(lines) if "out tok/s" in row)
