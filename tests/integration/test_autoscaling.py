"""Three times the load, and nodes come; it falls, and they leave. Nobody scales by hand: the
cluster asks for workers as work is offered, and Ray's own autoscaler adds and removes the nodes.

The head is started as KubeRay starts it, and the node types are the worker groups of the manifests.
The provider is Ray's fake one: a node is one more raylet on this machine. `AutoscalingCluster`
would run it too, but begins by ending every Ray of the machine.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any
from uuid import uuid4

import psutil
import pytest
import yaml

from kvrelay import Client
from tests.integration import kuberay
from tests.integration.manifests import base_cluster, base_groups, group_resources
from tests.integration.ray_head import Head, free_ports, head_at, marked, until
from tests.integration.test_apply_ray import Askers
from tests.integration.test_node_drains import homes
from tests.integration.test_serve_ray import (
    KVRELAY,
    addresses,
    assert_nothing_is_left,
    title,
)

pytestmark = pytest.mark.ray

IDLE_S = 6.0
# Named as a user's own: the defaults of `type: fake_multinode` are not in Ray's wheel.
FAKE_PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
HEAD_ID = "f" * 51 + "0" * 5
HEAD_TYPE = "ray.head.default"
"""What that provider calls its head."""
CLUSTER = """
name: growing
model: {dtype: float32}
engine: {compile: "off", profile: TIMES}
attention: {backend: sdpa}
pool: {enabled: "off"}
drain_timeout: 60s
router: {http_port: 0, grpc_port: 0, resources: {kvrelay-router: 1}}
elastic: {window: 3s, cooldown: 4s, start_up: 10s}
workers:
  - {role: prefill, cpu_threads: 1, resources: {kvrelay-prefill: 1}}
  - role: decode
    replicas: {min: 1, max: 3}
    cpu_threads: 1
    resources: {kvrelay-decode: 1}
"""
EVERY_S, AT_ONCE, TOKENS = 1 / 3, 16, 6
ASKED: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
BUSY = 0.65
"""Of one decode worker, as it is said to be, by the usual load: three times as much is more than
two could do."""
MANY = 64
TIMES = {
    "prefill_overhead_s": 0.0,
    "prefill_token_s": 1e-4,
    "prefill_pair_s": 0.0,
    "decode_knots": [[1, 0.01], [MANY, BUSY * MANY * EVERY_S / TOKENS]],
    "decode_kv_token_s": 0.0,
}
"""Much slower than this machine, which serves with ease what such workers could not."""


class Offering(Askers):
    """Requests at a fixed pace, however fast they are answered."""

    def __init__(self, grpc: str) -> None:
        super().__init__(grpc)
        self._threads = [Thread(target=self._offer)]

    def _offer(self) -> None:
        with Client(self._grpc, timeout_s=120) as client, ThreadPoolExecutor(AT_ONCE) as pool:
            while not self._over.wait(EVERY_S):
                pool.submit(self._ask_once, client)

    def _ask_once(self, client: Client) -> None:
        try:
            answer = client.generate("It was", **ASKED)
        except Exception as error:
            self.errors.append(error)
            return
        self.answers.add(tuple(answer.token_ids))
        self.count += 1


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
    """A head with the autoscaler that the manifest names, and no other node. Its monitor does
    here what KubeRay's sidecar does beside it."""
    port, client, agent, metrics = free_ports(4)
    gcs, cluster = f"127.0.0.1:{port}", base_cluster()
    file = folder / "autoscaling.json"
    file.write_text(json.dumps(autoscaling(gcs)))
    command = kuberay.command(
        cluster,
        "head",
        {
            "no-monitor": None,
            "autoscaling-config": str(file),
            "node-ip-address": "127.0.0.1",
            "port": str(port),
            "include-dashboard": "false",
            "ray-client-server-port": str(client),
            "dashboard-agent-listen-port": str(agent),
            "metrics-export-port": str(metrics),
            "resources": shlex.quote(json.dumps({"kvrelay-router": 1})),
        },
    )
    env = kuberay.environment(cluster, "head", HEAD_ID) | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": uuid4().hex,
        "RAY_FAKE_CLUSTER": "1",
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    }
    with (
        marked(**env) as here,
        kuberay.pod(here, command, folder / "head.log"),
        head_at(here, gcs) as head,
    ):
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


def wait_until_they_leave(head: Head, left: Counter[str], count: int) -> None:
    """First the workers, then their nodes."""
    until(lambda: workers(head) == count)
    until(lambda: nodes(head) == left)


@pytest.mark.timeout(600)
def test_nodes_come_with_three_times_the_load_and_leave_after_it(tmp_path: Path) -> None:
    file, times, log = (tmp_path / name for name in ("cluster.yaml", "times.yaml", "serve.log"))
    times.write_text(yaml.safe_dump(TIMES))
    file.write_text(CLUSTER.replace("TIMES", str(times)))
    small, grown = (Counter(headgroup=1, prefill=1, decode=count) for count in (1, 3))
    with growing_ray(tmp_path) as head:
        here = head.joined()
        assert nodes(head) == Counter(headgroup=1)
        assert any("autoscaler/v2/monitor.py" in title(one) for one in here.processes())
        driver = here.start(KVRELAY, "apply", file, "--yes", "--follow", log=log)
        http, grpc = addresses(driver, log)
        assert nodes(head) == small
        usual, more = Offering(grpc), [Offering(grpc), Offering(grpc)]
        with usual.asking():
            usual.more()
            with more[0].asking(), more[1].asking():
                until(lambda: [*homes(head).values()].count("serving") == 5)
                assert nodes(head) == grown
                more[0].more()
            wait_until_they_leave(head, small, count=2)
            usual.more()
        asked = [usual, *more]
        assert not [error for askers in asked for error in askers.errors]
        assert len(set[tuple[int, ...]]().union(*(askers.answers for askers in asked))) == 1
        driver.terminate()
        driver.wait(60)
        here.run(KVRELAY, "stop")
        assert_nothing_is_left(head.marked, http, grpc)
