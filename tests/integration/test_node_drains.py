"""A node of Ray ends under load, and no request fails. Told to end as Kubernetes tells a pod, its
workers leave before; with its raylet gone, they die at once."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.integration.ray_head import BIN, NOTHING_BUILT, Head, free_ports, until
from tests.integration.test_apply_ray import Askers
from tests.integration.test_ray_head_restarts import MortalHead, mortal_head
from tests.integration.test_serve_ray import KVRELAY, PLAIN

pytestmark = pytest.mark.ray

PLACE = "cpu_threads: 1, resources: {room: 1, CPU: 0.5}"
POOLS = f"workers=[{{role: both, replicas: 2, {PLACE}}}]"


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


@pytest.mark.timeout(600)
def test_the_workers_of_a_node_that_ends_go_on_elsewhere(tmp_path: Path) -> None:
    """The node has more time than two workers take to start, however busy the machine is."""
    with mortal_head(RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S="240") as mortal:
        mortal.start()
        head = mortal.head
        nodes = [start_node(mortal, tmp_path / "door.log", door=1)]
        ends = start_node(mortal, tmp_path / "ends.log", room=3)
        door = ("--set", "router.resources={door: 1}")
        options = [*door, *NOTHING_BUILT, "--set", POOLS, *PLAIN]
        head.joined().run(KVRELAY, "serve", "--detach", *options, timeout_s=240)
        until(lambda: set(homes(head).values()) == {"serving"})
        status = head.status()
        assert status is not None
        router: dict[str, object] = status["routers"][0]  # type: ignore[index]

        nodes.append(start_node(mortal, tmp_path / "stays.log", room=3))
        askers = Askers(f"{router['host']}:{router['grpc_port']}")
        with askers.asking():
            askers.more()
            ends.send_signal(signal.SIGTERM)
            assert ends.wait(300) is not None
            askers.more()
        assert not askers.errors
        assert len(askers.answers) == 1
        known = homes(head)
        assert set(known.values()) == {"serving"}
        assert known.keys() == {"router-0", "both-2", "both-3"}
        head.joined().run(KVRELAY, "stop")
        for node in nodes:
            node.kill()
            node.wait()


def raylet_of(node: subprocess.Popen[bytes]) -> psutil.Process:
    started = psutil.Process(node.pid).children(recursive=True)
    (found,) = [process for process in started if process.name() == "raylet"]
    return found


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


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
