"""A node of Ray ends under load, and no request fails. Told to end as Kubernetes tells a pod, its
workers leave before; with its raylet gone, they die at once."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import psutil
import pytest
import yaml

from tests.integration import kuberay
from tests.integration.manifests import DEPLOY, Manifest, base_cluster
from tests.integration.ray_head import (
    BIN,
    NOTHING_BUILT,
    Head,
    Marked,
    free_ports,
    head_at,
    marked,
    until,
)
from tests.integration.test_apply_ray import Askers
from tests.integration.test_ray_head_restarts import MortalHead, mortal_head
from tests.integration.test_serve_ray import KVRELAY, PLAIN, title

pytestmark = pytest.mark.ray

PLACE = "cpu_threads: 1, resources: {room: 1, CPU: 0.5}"
JOB = "kvrelay-serve"
PORTS = ("8000", "50051", "8900", "50951")
"""Of routers."""
CHANGED = {
    "model": {"dtype": "float32"},
    "engine": {"compile": "off", "profile": "off"},
    "attention": {"backend": "sdpa"},
    "pool": {"enabled": "off"},
    "workers": [
        {
            "role": "both",
            "replicas": 2,
            "cpu_threads": 1,
            "resources": {"kvrelay-both": 1, "CPU": 3},
        }
    ],
}
"""Of the manifests' cluster file. It builds nothing; a pod of `both` has room for one worker."""
ROOM_FOR_TWO = {"num-cpus": "8"}


def start_node(mortal: MortalHead, log: Path, **resources: int) -> subprocess.Popen[bytes]:
    """As in a pod: the process that a signal reaches runs as long as the node. Two that start at
    once on one address confuse Ray."""
    node = mortal.here.start(
        *(BIN / "ray", "start", "--block", f"--address={mortal.address}", "--num-cpus=4"),
        *("--node-ip-address=127.0.0.1", f"--dashboard-agent-listen-port={free_ports(1)[0]}"),
        *("--disable-usage-stats", "--object-store-memory=100000000"),
        f"--resources={json.dumps(resources)}",
        log=log,
    )
    until(lambda: "will now block" in log.read_text() or node.poll() is not None)
    return node


def homes(head: Head) -> dict[str, str]:
    """# process |-> its state"""
    status = head.status()
    assert status is not None
    return {one["name"]: one["state"] for one in status["processes"]}  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Pods:
    """Those of the manifests' RayCluster, on this machine: each runs KubeRay's command with the
    environment of its container. `free`: ports that nobody has taken yet."""

    here: Marked
    folder: Path
    ports: list[int]
    free: list[int]
    cluster: Manifest = field(default_factory=base_cluster)

    def start(
        self, group: str, name: str, **more: str
    ) -> AbstractContextManager[subprocess.Popen[bytes]]:
        """Two that start at once on one address confuse Ray."""
        gcs, dashboard, client = self.ports
        agent, metrics = str(self.free.pop()), str(self.free.pop())
        changes = {"node-ip-address": "127.0.0.1", "address": f"127.0.0.1:{gcs}"}
        if group == "head":
            ports = {"port": gcs, "dashboard-port": dashboard, "ray-client-server-port": client}
            changes = {"node-ip-address": "127.0.0.1"} | {k: str(v) for k, v in ports.items()}
        changes |= {"dashboard-agent-listen-port": agent, "metrics-export-port": metrics}
        env = self.here.env | kuberay.environment(self.cluster, group, name)
        if group == "head":
            env["KVRELAY_CONFIG"] = str(self.folder / "cluster.yaml")
        command = kuberay.command(self.cluster, group, changes | more)
        return kuberay.pod(Marked(env), command, self.folder / f"{name}.log")

    def submit(self, job: Manifest) -> None:
        """As the operator does for `submissionMode: HTTPMode`; Ray's agent may need a moment."""
        made = {"entrypoint": job["spec"]["entrypoint"], "submission_id": JOB}

        def accepted() -> bool:
            answer = httpx.post(f"{self.jobs}/", json=made, headers=self.token, timeout=60)
            return answer.is_success

        until(accepted)

    @property
    def jobs(self) -> str:
        return f"http://127.0.0.1:{self.ports[1]}/api/jobs"

    @property
    def token(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.here.env['RAY_AUTH_TOKEN']}"}

    def grpc(self) -> str:
        """Once the job has printed it; its log is kept for who looks for what went wrong."""
        log = self.job("/logs")["logs"]
        (self.folder / "job.log").write_text(log)
        found = re.search(r"  gRPC  (\S+)\n", log)
        return found[1] if found else ""

    def job(self, what: str = "") -> Any:
        return httpx.get(f"{self.jobs}/{JOB}{what}", headers=self.token, timeout=60).json()


def write_cluster_file(ours: Pods) -> None:
    """That of the manifests, with this machine's ports and files."""
    text = (DEPLOY / "kubernetes" / "base" / "cluster.yaml").read_text()
    for port in PORTS:
        text = re.sub(rf"\b{port}\b", str(ours.free.pop()), text)
    text = text.replace("/run/secrets/kvrelay", str(ours.folder))
    for name in ("token", "key"):
        (ours.folder / name).write_text(uuid4().hex * 2)
        (ours.folder / name).chmod(0o600)
    made = yaml.safe_load(text) | CHANGED
    (ours.folder / "cluster.yaml").write_text(yaml.safe_dump(made))


def group_with(here: Marked, actor: str) -> str:
    """The group of the pod in which this actor is."""
    (found,) = [one for one in here.processes() if title(one).startswith(actor)]
    raylet = found.parent()
    assert raylet is not None
    return raylet.environ()["RAY_NODE_TYPE_NAME"]


@contextmanager
def pods(folder: Path) -> Iterator[Pods]:
    with marked(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=uuid4().hex) as here:
        gcs, dashboard, client, *free = free_ports(11 + len(PORTS))
        ours = Pods(here, folder, [gcs, dashboard, client], free)
        write_cluster_file(ours)
        yield ours


@pytest.mark.timeout(600)
def test_the_worker_of_a_pod_that_ends_goes_on_elsewhere(tmp_path: Path) -> None:
    """The pod has the time that its manifest gives it."""
    (job,) = yaml.safe_load_all((DEPLOY / "kubernetes" / "base" / "rayjob.yaml").read_text())
    with pods(tmp_path) as ours, ExitStack() as running:
        running.enter_context(ours.start("head", "head"))
        running.enter_context(ours.start("router", "router"))
        ends = running.enter_context(ours.start("both", "ends"))
        ours.submit(job)
        grpc = until(ours.grpc, patience_s=240)
        assert group_with(ours.here, "ray::Controller") == "headgroup", "others can become idle"

        running.enter_context(ours.start("both", "stays", **ROOM_FOR_TWO))
        address, askers = f"127.0.0.1:{ours.ports[0]}", Askers(grpc)
        head = running.enter_context(head_at(ours.here, address))
        until(lambda: homes(head) == serving("router-0", "both-0", "both-1"))
        with askers.asking():
            askers.more()
            ends.send_signal(signal.SIGTERM)
            spec = kuberay.group_of(ours.cluster, "both")["template"]["spec"]
            ends.wait(spec["terminationGracePeriodSeconds"])
            askers.more()
        assert not askers.errors
        assert len(askers.answers) == 1
        until(lambda: homes(head) == serving("router-0", "both-1", "both-2"))
        head.joined().run(KVRELAY, "stop")
        until(lambda: ours.job()["status"] == "SUCCEEDED")


def serving(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "serving")


def raylet_of(node: subprocess.Popen[bytes]) -> psutil.Process:
    started = psutil.Process(node.pid).children(recursive=True)
    (found,) = [process for process in started if process.name() == "raylet"]
    return found


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_raylet_that_ends_takes_its_worker_but_no_request(tmp_path: Path) -> None:
    """Ray drains nothing then: streams go on from where their decode worker died."""
    pools = (
        f"workers=[{{role: prefill, {PLACE.replace('room', 'first')}}}, "
        f"{{role: decode, replicas: 2, {PLACE}}}]"
    )
    with mortal_head() as mortal:
        mortal.start()
        head = mortal.head
        nodes = [start_node(mortal, tmp_path / "stays.log", door=1, first=1, room=1)]
        ends = start_node(mortal, tmp_path / "ends.log", room=1)
        door = ("--set", "router.resources={door: 1}")
        head.joined().run(
            *(KVRELAY, "serve", "--detach", *door, *NOTHING_BUILT, "--set", pools, *PLAIN),
            timeout_s=240,
        )
        until(lambda: set(homes(head).values()) == {"serving"})
        status = head.status()
        assert status is not None
        router: dict[str, object] = status["routers"][0]  # type: ignore[index]

        askers = Askers(f"{router['host']}:{router['grpc_port']}")
        with askers.asking():
            askers.more()
            raylet = raylet_of(ends)
            raylet.send_signal(signal.SIGTERM)
            until(lambda: has_ended(raylet))
            ends.kill()  # it would stay, with nothing to wait for
            ends.wait()
            askers.more()
            until(lambda: [*homes(head).values()].count("serving") == 3)
            askers.more()
        assert not askers.errors
        assert len(askers.answers) == 1
        nodes.append(start_node(mortal, tmp_path / "comes.log", room=1))
        until(lambda: set(homes(head).values()) == {"serving"})
        head.joined().run(KVRELAY, "stop")
        for node in nodes:
            node.kill()
            node.wait()
