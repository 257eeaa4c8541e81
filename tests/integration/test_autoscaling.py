"""Ray's own autoscaler adds nodes as a cluster asks for them, and removes those that are empty.

The node types are the worker groups of the Kubernetes manifests. The provider is Ray's fake one: a
node is one more raylet on this machine. `AutoscalingCluster` would run it too, but begins by ending
every Ray of the machine.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest

from tests.integration.manifests import base_groups, group_resources
from tests.integration.ray_head import BIN, NOTHING_BUILT, Head, free_ports, head_at, marked, until
from tests.integration.test_apply_ray import Askers
from tests.integration.test_serve_ray import (
    KVRELAY,
    addresses,
    assert_nothing_is_left,
    title,
)

pytestmark = pytest.mark.ray

IDLE_S = 6.0
LATE_S = 5.0
# Named as a user's own: the defaults of `type: fake_multinode` are not in Ray's wheel.
FAKE_PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
HEAD_ID = "f" * 51 + "0" * 5
HEAD_TYPE = "ray.head.default"
"""What that provider calls its head."""
CLUSTER = """
name: growing
model: {dtype: float32}
pool: {enabled: "off"}
drain_timeout: 60s
router: {http_port: 0, grpc_port: 0, resources: {kvrelay-router: 1}}
workers:
  - {role: prefill, cpu_threads: 1, resources: {kvrelay-prefill: 1}}
  - {role: decode, cpu_threads: 1, resources: {kvrelay-decode: 1}}
"""


def node_types() -> dict[str, dict[str, Any]]:
    """The manifests' groups `prefill` and `decode`; the head offers what the router asks for."""
    small = {"CPU": 4, "object_store_memory": 100_000_000}
    groups = {
        spec["groupName"]: {
            "resources": {**small, **group_resources(spec)},
            "node_config": {},
            "min_workers": spec["minReplicas"],
            "max_workers": spec["maxReplicas"],
        }
        for spec in base_groups()
        if spec["groupName"] in ("prefill", "decode")
    }
    head = {"resources": {"kvrelay-router": 1}, "node_config": {}, "max_workers": 0}
    return {HEAD_TYPE: head, **groups}


def autoscaling(gcs: str) -> dict[str, Any]:
    provider = {
        "type": "external",
        "module": FAKE_PROVIDER,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
        "launch_multiple": True,
        "head_node_id": HEAD_ID,
        "gcs_address": gcs,
    }
    lists = ("cluster_synced_files", "rsync_exclude", "rsync_filter", "initialization_commands")
    commands = ("setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
    return {
        "cluster_name": "growing",
        "max_workers": 8,
        "provider": provider,
        "available_node_types": node_types(),
        "head_node_type": HEAD_TYPE,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": IDLE_S / 60,
        "auth": {},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        **{name: [] for name in (*lists, *(f"{command}_commands" for command in commands))},
    }


@contextmanager
def growing_ray(folder: Path) -> Iterator[Head]:
    """A head with the autoscaler, version 2, and no other node."""
    port, client, agent = free_ports(3)
    gcs = f"127.0.0.1:{port}"
    file = folder / "autoscaling.json"
    file.write_text(json.dumps(autoscaling(gcs)))
    env = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": uuid4().hex,
        "RAY_FAKE_CLUSTER": "1",
        "RAY_enable_autoscaler_v2": "1",
        "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
        "RAY_NODE_TYPE_NAME": "head",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    }
    with marked(**env) as here:
        here.run(
            *(BIN / "ray", "start", "--head", f"--autoscaling-config={file}", "--num-cpus=0"),
            *("--node-ip-address=127.0.0.1", f"--port={port}", "--include-dashboard=false"),
            *(f"--ray-client-server-port={client}", f"--dashboard-agent-listen-port={agent}"),
            *("--disable-usage-stats", "--object-store-memory=100000000"),
            f"--resources={json.dumps({'kvrelay-router': 1})}",
        )
        with head_at(here, gcs) as head:
            yield head


def nodes(head: Head) -> Counter[str]:
    """# group |-> its nodes; each is a raylet that knows its type."""
    found: Counter[str] = Counter()
    for process in head.marked.processes():
        with suppress(psutil.Error):
            if process.name() == "raylet":
                found[process.environ()["RAY_NODE_TYPE_NAME"]] += 1
    return found


def workers(head: Head) -> int:
    return sum(title(p).startswith("ray::WorkerHost") for p in head.marked.processes())


def assert_they_leave_in_time(head: Head, left: Counter[str], count: int) -> None:
    """Nodes end soon after their workers have."""
    until(lambda: workers(head) == count)
    empty_s = time.monotonic()
    until(lambda: nodes(head) == left)
    assert time.monotonic() - empty_s <= IDLE_S + LATE_S


@pytest.mark.timeout(600)
@pytest.mark.parametrize("most", [2, pytest.param(3, marks=pytest.mark.long)])
def test_nodes_come_with_the_workers_and_leave_after_them(tmp_path: Path, most: int) -> None:
    file, log = tmp_path / "cluster.yaml", tmp_path / "serve.log"
    file.write_text(CLUSTER)
    small = Counter(head=1, prefill=1, decode=1)
    with growing_ray(tmp_path) as head:
        here = head.joined()
        assert nodes(head) == Counter(head=1)
        driver = here.start(KVRELAY, "apply", file, "--yes", "--follow", *NOTHING_BUILT, log=log)
        http, grpc = addresses(driver, log)
        assert nodes(head) == small
        few, more = Askers(grpc), [Askers(grpc) for _ in range(most - 1)]
        with few.asking():
            few.more()
            with ExitStack() as busy:
                for askers in more:
                    busy.enter_context(askers.asking())
                here.run(KVRELAY, "scale", f"decode={most}")
                assert nodes(head) == Counter(head=1, prefill=1, decode=most)
                few.more()
            here.run(KVRELAY, "scale", "decode=1")
            assert_they_leave_in_time(head, small, count=2)
            few.more()
        asked = [few, *more]
        assert not [error for askers in asked for error in askers.errors]
        assert len(set[tuple[int, ...]]().union(*(askers.answers for askers in asked))) == 1
        driver.terminate()
        driver.wait(60)
        here.run(KVRELAY, "stop")
        assert_they_leave_in_time(head, Counter(head=1), count=0)
        assert_nothing_is_left(head.marked, http, grpc)
