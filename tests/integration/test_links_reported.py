"""A cluster whose workers share only their second choice: what routers, metrics and status say."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.cli.status.asked import of_router
from cluster.cli.status.tables import print_table
from kvrelay.counters import speed_text
from kvrelay.types import Role
from router.core.state.generation import LinkStatus
from tests.access import ACCESS
from tests.integration.split_kit import (
    Cluster,
    WorkerHost,
    running_cluster,
    wait_until,
    worker_settings,
)
from tests.models import random_checkpoint


def links(cluster: Cluster) -> list[LinkStatus]:
    workers = cluster.router.workers()
    return [link for worker in workers for link in worker.links]


def gauges(text: str, labels: dict[str, str]) -> dict[str, float]:
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return {sample.name: sample.value for sample in samples if sample.labels == labels}


def test_the_common_transport_is_used_measured_and_reported(
    hosts: tuple[WorkerHost, WorkerHost], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = random_checkpoint(tmp_path / "llama", "llama")
    both, one = ("shm", "nixl"), ("nixl",)
    workers = [
        (hosts[0], worker_settings("prefill-0", Role.PREFILL, model, transports=both)),
        (hosts[1], worker_settings("decode-0", Role.DECODE, model, transports=one)),
    ]
    with running_cluster(model, workers) as cluster:
        assert not links(cluster)
        cluster.completion(list(range(2, 100)), max_tokens=4)
        wait_until(lambda: any(link.bytes_per_s for link in links(cluster)), "it is measured")
        (link,) = links(cluster)
        assert (link.peer, link.transport) == ("decode-0", "nixl")
        text = cluster.metrics()
        labels = {"src": "prefill-0", "dst": "decode-0", "transport": "nixl"}
        assert gauges(text, labels | {"model_name": "test-model"}) == {
            "kvrelay:link_info": 1,
            "kvrelay:link_bandwidth_bytes_per_second": link.bytes_per_s,
            "kvrelay:link_latency_seconds": link.latency_s,
        }
        facts = of_router(cluster.internal_grpc, ACCESS)
        print_table(facts)
        shown = f"prefill-0 -> decode-0 over nixl: {speed_text(link.bytes_per_s)}, "
        assert shown in capsys.readouterr().out
