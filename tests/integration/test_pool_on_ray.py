"""`kvrelay serve` with a pool on a real Ray: the pool node is used, seen, comes back."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.access import HEADERS
from tests.integration.ray_head import BIN, Head, ray_head, until
from tests.integration.test_serve_ray import (
    OWN_PORTS,
    addresses,
    assert_nothing_is_left,
    kill_one,
)

pytestmark = pytest.mark.ray

KVRELAY = BIN / "kvrelay"
POOL = ("--set", "pool.enabled=on", "--set", "pool.host_memory=64MiB")
SMALL = ("--set", "engine.kv_memory=16MiB")


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with ray_head({"pools": 1.0}) as started:
        yield started


def ask(http: str, start: int) -> None:
    """A prompt of 20 blocks that no other start below 3,000 shares."""
    prompt = [3 + (start + i) % 3000 for i in range(320)]
    body = {"prompt": prompt, "max_tokens": 20, "ignore_eos": True}
    request = urllib.request.Request(
        f"{http}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert json.load(reply)["usage"]["completion_tokens"] == 20


def samples(head: Head, **labels: str) -> dict[tuple[str, str | None], float]:
    """# (metric, state) |-> value, of those with these labels"""
    at = head.internal("pooled", "internal_http_port")
    asked = urllib.request.Request(f"http://{at}/metrics", headers=HEADERS)
    with urllib.request.urlopen(asked, timeout=10) as reply:
        families = text_string_to_metric_families(reply.read().decode())
        return {
            (sample.name, sample.labels.get("state")): sample.value
            for family in families
            for sample in family.samples
            if labels.items() <= sample.labels.items()
        }


def in_host_memory(head: Head) -> int:
    """Blocks that the pool node keeps there."""
    for node in head.kv("pooled")["pool_nodes"]:
        for tier in node["tiers"]:  # type: ignore[attr-defined]
            if tier["tier"] == "host":
                return next(int(s["blocks"]) for s in tier["states"] if s["state"] == "cached")
    return 0


def pool_processes(head: Head) -> list[dict[str, object]]:
    status = head.status("pooled")
    assert status is not None
    return [p for p in status["processes"] if p["name"].startswith("pool-")]  # type: ignore[attr-defined]


def lives(head: Head) -> list[tuple[object, object]]:
    return [(p["state"], p["starts"]) for p in pool_processes(head)]


def test_a_pool_node_serves_survives_its_death_and_goes(head: Head, tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    options = ("--name", "pooled", *OWN_PORTS, *POOL, *SMALL, "--set", "pool.resources={pools: 1}")
    driver = head.joined().start(KVRELAY, "serve", *options, log=log)
    http, grpc = addresses(driver, log)
    (pool,) = pool_processes(head)
    assert lives(head) == [("serving", 1)]

    ask(http, 10)
    until(lambda: in_host_memory(head) >= 20)
    internal = head.internal("pooled", "internal_grpc_port")
    shown = head.joined().run(KVRELAY, "status", "--kv", "--address", internal)
    assert str(pool["name"]) in shown and " host " in shown
    name = str(pool["name"])
    blocks, orphaned = ("kvrelay:pool_blocks", "cached"), ("kvrelay:blocks_orphaned", None)
    until(lambda: samples(head, pool_node=name).get(blocks, 0) >= 20)
    until(lambda: samples(head, worker=name).get(orphaned) == 0)

    kill_one(head.marked, "ray::PoolNodeHost")
    ask(http, 600)
    until(lambda: lives(head) == [("serving", 2)])

    fresh = count(1200, 401)  # 3,000 of them differ

    def stored_anew() -> bool:
        ask(http, next(fresh))
        return in_host_memory(head) >= 20

    until(stored_anew)
    driver.terminate()
    assert driver.wait(90) == 0, log.read_text()
    assert_nothing_is_left(head.marked, http, grpc)


def test_by_default_a_pool_node_starts_once_the_cluster_is_ready(
    head: Head, tmp_path: Path
) -> None:
    log = tmp_path / "serve.log"
    options = ("--name", "pooled", *OWN_PORTS, *SMALL, "--set", "workers=[{role: both}]")
    driver = head.joined().start(KVRELAY, "serve", *options, log=log)
    http, grpc = addresses(driver, log)
    until(lambda: lives(head) == [("serving", 1)])
    said = until(lambda: text if "starting pool-" in (text := log.read_text()) else "")
    assert said.index("both-0 serves on") < said.index("starting pool-"), "nothing waits for it"
    until(lambda: "joined (shm:pool-" in log.read_text())
    ask(http, 10)
    until(lambda: in_host_memory(head) >= 20)
    chosen = r"pool-\w+ .* \d+\.\d GiB of host memory \(.* \d+\.\d GiB available\)"
    assert re.search(chosen, head.joined().run(KVRELAY, "status", "--name", "pooled"))
    driver.terminate()
    assert driver.wait(90) == 0, log.read_text()
    assert_nothing_is_left(head.marked, http, grpc)


@pytest.mark.long
def test_by_default_a_cluster_serves_without_a_pool_node_that_can_not_start(
    head: Head, tmp_path: Path
) -> None:
    log = tmp_path / "serve.log"
    options = ("--name", "pooled", *OWN_PORTS, *SMALL, "--set", "workers=[{role: both}]")
    disk = ("--set", "pool.disk=/proc/nowhere")
    driver = head.joined().start(KVRELAY, "serve", *options, *disk, log=log)
    http, grpc = addresses(driver, log)
    until(lambda: lives(head) == [("left out", 1)])
    assert "pool.disk: /proc/nowhere" in str(pool_processes(head)[0]["doing"])
    until(lambda: "is left out: pool.disk: /proc/nowhere" in log.read_text())
    ask(http, 10)
    assert lives(head) == [("left out", 1)], "it is not tried again"
    driver.terminate()
    assert driver.wait(90) == 0, log.read_text()
    assert_nothing_is_left(head.marked, http, grpc)


def test_a_pool_that_can_not_start_ends_in_one_line(head: Head) -> None:
    command = [KVRELAY, "serve", "--name", "bad", *OWN_PORTS, *POOL, *SMALL]
    done = subprocess.run(
        [*command, "--set", "pool.disk=/proc/nowhere", "--set", "workers=[{role: both}]"],
        env=head.joined().env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("kvrelay: pool-"), done.stderr
    assert "pool.disk: /proc/nowhere" in done.stderr
    assert_nothing_is_left(head.marked)
