"""Who holds which KV, as a router tells it of workers and pool nodes that joined it."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.cli.main import app
from cluster.cli.status.kv import of_router
from cluster.core.settings import host_pool_address
from kvpool.core.layout.hashes import tenant_label
from kvrelay.types import Role
from kvrelay.v1.admin_pb2 import GetKvResponse
from kvrelay.v1.worker_pb2 import DebugKvResponse
from router.live import pool_nodes
from tests.access import ACCESS
from tests.integration.pool_kit import Node
from tests.integration.split_kit import (
    Cluster,
    WorkerHost,
    running_cluster,
    wait_until,
    worker_settings,
)

ACME = tenant_label("acme")
HOST_STATES = {"free", "granted", "fenced", "loading", "cached"}


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    started: list[Node] = []

    def start(name: str, *options: str) -> Node:
        started.append(Node(tmp_path / "node", name, *options))
        return started[-1]

    yield start
    for node in started:
        if node.is_alive:
            node.kill()


def kv(cluster: Cluster) -> GetKvResponse:
    return of_router(cluster.internal_grpc, ACCESS)


def states(found: GetKvResponse, tier: str) -> dict[str, int]:
    (node,) = found.pool_nodes
    (one,) = (t for t in node.tiers if t.tier == tier)
    counted = {state.state: state.blocks for state in one.states}
    assert sum(counted.values()) == one.total_blocks, "every place is in one state"
    return counted


def orphaned(cluster: Cluster) -> dict[str, float]:
    """# worker or pool node |-> blocks that no one holds"""
    families = text_string_to_metric_families(cluster.metrics())
    samples = (sample for family in families for sample in family.samples)
    return {s.labels["worker"]: s.value for s in samples if s.name == "kvrelay:blocks_orphaned"}


def test_blocks_are_seen_by_tier_state_tenant_and_holder(
    long_llama: Path,
    hosts: tuple[WorkerHost, WorkerHost],
    tmp_path: Path,
    nodes: Callable[..., Node],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = f"kv-{uuid4().hex[:8]}"
    address = host_pool_address(name)
    workers = [
        (hosts[0], worker_settings("prefill-0", Role.PREFILL, long_llama, pool_address=address)),
        (hosts[1], worker_settings("decode-0", Role.DECODE, long_llama, pool_address=address)),
    ]
    with running_cluster(long_llama, workers) as cluster:
        disk = ("--disk", str(tmp_path / "disk"), "--disk-size", "64MiB")
        node = nodes(name, "--join", cluster.internal_grpc, *disk)
        wait_until(lambda: bool(kv(cluster).pool_nodes), "the pool node has joined")
        wait_until(lambda: node.text.count(" joined (") == 2, "both workers use it")
        assert_a_running_request_is_shown(cluster, capsys)
        wait_until(lambda: states(kv(cluster), "disk")["cached"] >= 6, "the KV is on disk")
        assert states(kv(cluster), "host").keys() == HOST_STATES
        wait_until(lambda: not kv(cluster).pool_nodes[0].held, "nothing is held when idle")
        wait_until(lambda: len(orphaned(cluster)) == 3, "its metrics are scraped")
        assert orphaned(cluster).keys() > {"prefill-0", "decode-0"}
        assert set(orphaned(cluster).values()) == {0}

        monkeypatch.setattr(pool_nodes, "PATIENCE_S", 0.5)
        node.suspend()
        (silent,) = kv(cluster).silent
        assert "127.0.0.1:" in silent.address
        wait_until(lambda: len(orphaned(cluster)) == 2, "nothing old is told of it")
        cluster.completion([5] * 100, max_tokens=4)
        node.signal(signal.SIGCONT)
        wait_until(lambda: bool(kv(cluster).pool_nodes), "it answers again")
        node.stop()
        wait_until(lambda: not (kv(cluster).pool_nodes or kv(cluster).silent), "it has left")


def assert_a_running_request_is_shown(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    body = {"model": "test-model", "prompt": [7] * 100, "max_tokens": 8000, "stream": True}
    body |= {"ignore_eos": True, "cache_salt": "acme"}
    with cluster.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(line for line in lines if line.startswith("data: {"))
        wait_until(lambda: bool(tenants(kv(cluster))), "it holds blocks")
        assert tenants(kv(cluster)) == {ACME}
        options = ["status", "--kv", "--address", cluster.internal_grpc]
        app(options, standalone_mode=False)
        table = capsys.readouterr().out
        app([*options, "--format", "json"], standalone_mode=False)
        facts = json.loads(capsys.readouterr().out)
    assert {worker["worker"] for worker in facts["workers"]} == {"prefill-0", "decode-0"}
    assert facts["pool_nodes"][0]["tiers"][1]["tier"] == "disk"
    assert "acme" not in table + json.dumps(facts), "who knows the salt finds the cache"
    (row,) = (line for line in table.splitlines() if "decode-0" in line and ACME in line)
    assert row.split()[:3] == ["decode-0", "device", "active"]
    assert row.rstrip().endswith(" s")
    assert_cached_blocks_are_the_tenants(cluster, capsys)


def assert_cached_blocks_are_the_tenants(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.completion([9] * 40, max_tokens=1)
    wait_until(lambda: not tenants(kv(cluster)), "the requests are over")
    wait_until(lambda: worker(cluster, "prefill-0").cached_blocks == 8, "the pool node has it")
    acmes, nobodys = worker(cluster, "prefill-0").cached
    assert (nobodys.tenant, nobodys.blocks, acmes.tenant, acmes.blocks) == ("", 2, ACME, 6)
    assert acmes.oldest_s >= acmes.newest_s > nobodys.newest_s >= 0
    app(
        ["status", "--kv", "--address", cluster.internal_grpc, "--tenant", "acme"],
        standalone_mode=False,
    )
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "cached" in line][1:]
    assert [row[:5] for row in rows if row[0] == "prefill-0"] == [
        ["prefill-0", "device", "cached", "-", ACME]
    ]
    assert all(row[4] == ACME for row in rows)
    (node,) = kv(cluster).pool_nodes
    assert [tier.tier for tier in node.tiers] == ["host", "disk"]
    for tier in node.tiers:
        wait_until(
            lambda tier=tier: whose(cluster, tier.tier) == {"": 2, ACME: acme_blocks(cluster)},
            "it is stored",
        )


def worker(cluster: Cluster, name: str) -> DebugKvResponse:
    (found,) = (one for one in kv(cluster).workers if one.worker == name)
    return found


def whose(cluster: Cluster, tier: str) -> dict[str, int]:
    """# label |-> the pool node's blocks"""
    (node,) = kv(cluster).pool_nodes
    (one,) = (t for t in node.tiers if t.tier == tier)
    assert all(c.oldest_s >= c.newest_s >= 0 for c in one.cached)
    assert sum(c.blocks for c in one.cached) == {s.state: s.blocks for s in one.states}["cached"]
    return {c.tenant: c.blocks for c in one.cached}


def acme_blocks(cluster: Cluster) -> int:
    """The decode worker's: those of the prompt and of the answer."""
    return {c.tenant: c.blocks for c in worker(cluster, "decode-0").cached}.get(ACME, 0)


def tenants(found: GetKvResponse) -> set[str]:
    """Of requests: what is on its way to the pool node is held too, for no one."""
    held = (held for worker in found.workers for held in worker.held)
    return {one.tenant for one in held if not one.holder.startswith("offer")}
