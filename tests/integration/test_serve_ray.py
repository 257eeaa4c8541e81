"""`kvrelay serve` on Ray: as a job, as the container's command, and on a Ray of its own.

However it ends, nothing of kvrelay is left: no actor, process, shared memory or socket.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from cluster.on_ray.launch import ONE_PRESS_S
from kvrelay import Client
from kvrelay.errors import KvrelayError
from tests.integration.manifests import DEPLOY, base_groups, cluster_file, group_resources, one
from tests.integration.ray_head import BIN, Head, Marked, marked, ray_head, until

pytestmark = pytest.mark.ray

KVRELAY = BIN / "kvrelay"
OWN_PORTS = ("--http-port", "0", "--grpc-port", "0")
PLAIN = (*OWN_PORTS, "--set", "pool.enabled=off")
"""Without a pool node, which would start while the test goes on."""


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    """With the custom resources of the pods that the Kubernetes manifests describe."""
    resources: dict[str, float] = {}
    for spec in base_groups():
        resources |= group_resources(spec)
    with ray_head(resources, with_dashboard=True) as started:
        yield started


def submit(head: Head, name: str, log: Path) -> subprocess.Popen[bytes]:
    """`ray job submit`, which prints what the job prints and lives as long as it. A Ray that has
    just started may lack an agent for jobs; then it is submitted again, once."""
    job = submit_once(head, name, log)
    until(lambda: "submitted successfully" in log.read_text() or job.poll() is not None)
    return submit_once(head, name, log) if "No available agent" in log.read_text() else job


def submit_once(head: Head, name: str, log: Path) -> subprocess.Popen[bytes]:
    serve = [KVRELAY, "serve", "local.yaml", "--name", name, *PLAIN]
    options = ["--address", head.dashboard, "--submission-id", name]
    folder = ["--working-dir", DEPLOY / "configs"]
    command = [BIN / "ray", "job", "submit", *options, *folder, "--", *serve]
    return head.marked.start(*command, log=log)


def addresses(process: subprocess.Popen[bytes], log: Path) -> tuple[str, str]:
    """HTTP and gRPC, once the cluster serves."""

    def printed() -> tuple[str, str] | None:
        found = re.search(r"HTTP  (\S+)/v1\n  gRPC  (\S+)\n", log.read_text())
        assert found or process.poll() is None, log.read_text()
        return (found[1], found[2]) if found else None

    found = until(printed)
    assert found is not None
    return found


def all_addresses(process: subprocess.Popen[bytes], log: Path) -> list[tuple[str, str]]:
    """HTTP and gRPC of both routers, in order, once each is ready."""

    def told() -> list[tuple[str, str, str]]:
        assert process.poll() is None, log.read_text()
        found = re.findall(r"(router-\d) serves on (\S+) and (\S+)\n", log.read_text())
        return found if len(found) == 2 else []

    found = [(http, grpc) for _, http, grpc in sorted(until(told))]
    until(lambda: all(ready(http) for http, _ in found))
    return found


def listener(here: Marked, address: str) -> psutil.Process:
    """The process that serves there."""
    found = listeners(here, address)
    assert found, f"nobody listens on {address}"
    return found[0]


def listeners(here: Marked, address: str) -> list[psutil.Process]:
    port = int(address.rpartition(":")[2])
    return [process for process in here.processes() if listens(process, port)]


def listens(process: psutil.Process, port: int) -> bool:
    with suppress(psutil.Error):
        sockets = process.net_connections("tcp")
        return any(s.laddr.port == port and s.status == psutil.CONN_LISTEN for s in sockets)
    return False


def ask_both_faces(http: str, grpc: str) -> None:
    with urllib.request.urlopen(f"{http}/ready", timeout=30) as reply:
        assert reply.status == 200
    body = json.dumps({"prompt": "It was", "max_tokens": 8, "ignore_eos": True}).encode()
    request = urllib.request.Request(
        f"{http}/v1/completions", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert json.load(reply)["usage"]["completion_tokens"] == 8
    with Client(grpc, timeout_s=60) as client:
        answer = client.generate("It was", max_tokens=8, ignore_eos=True)
    assert len(answer.token_ids) == 8


def assert_nothing_is_left(here: Marked, *addresses: str) -> None:
    try:
        until(lambda: not here.left_of_kvrelay(), patience_s=60)
    except TimeoutError:
        pytest.fail(f"left behind: {here.left_of_kvrelay()}")
    for address in addresses:
        assert not listeners(here, address), f"{address} still listens"


def title(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def kill_one(here: Marked, of: str) -> None:
    """The first process whose title says so."""
    next(process for process in here.processes() if of in title(process)).kill()


def phase(head: Head, name: str) -> object:
    status = head.status(name)
    return None if status is None else status["phase"]


def states(head: Head, name: str) -> list[str]:
    status = head.status(name)
    assert status is not None
    return [process["state"] for process in status["processes"]]  # type: ignore[attr-defined]


def ready(http: str) -> bool:
    try:
        with urllib.request.urlopen(f"{http}/ready", timeout=10) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def test_a_submitted_job_serves_survives_a_crash_and_stops(head: Head, tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    job = submit(head, "job", log)
    http, grpc = addresses(job, log)
    ask_both_faces(http, grpc)

    status = head.status("job")
    assert status is not None
    assert status["phase"] == "ready"
    assert [p["name"] for p in status["processes"]] == ["router-0", "prefill-0", "decode-0"]  # type: ignore[attr-defined]
    assert {p["doing"] for p in status["processes"]} == {""}, "all serve"  # type: ignore[attr-defined]
    internal = head.internal("job", "internal_grpc_port")
    told = head.marked.run(KVRELAY, "status", "--address", internal)
    assert re.search(r"decode-0 started in [\d.]+ s: place [\d.]+, import [\d.]+, .*join", told)

    twin = subprocess.run(
        [KVRELAY, "serve", "--name", "job"], env=head.joined().env, capture_output=True, text=True
    )
    assert twin.returncode == 2
    assert "kvrelay: a cluster named job already runs on this Ray" in twin.stderr

    kill_one(head.marked, "ray::WorkerHost")
    until(lambda: len(re.findall(r"(?:prefill|decode)-0 serves on", log.read_text())) == 3)
    until(lambda: ready(http))
    ask_both_faces(http, grpc)

    head.marked.run(BIN / "ray", "job", "stop", "--address", head.dashboard, "job")
    assert_nothing_is_left(head.marked, http, grpc)
    job.wait(60)
    assert head.status("job") is None


def test_a_killed_router_comes_back_at_its_ports(head: Head, tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    two = ["--name", "two", "--set", "router.replicas=2", "--set", "workers=[{role: both}]"]
    driver = head.joined().start(KVRELAY, "serve", *two, *PLAIN, log=log)
    first, second = all_addresses(driver, log)
    for http, grpc in (first, second):
        ask_both_faces(http, grpc)
    table = head.joined().run(KVRELAY, "status", "--name", "two")
    assert re.search(r"router-0: ready, .*\nrouter-1: ready", table), table

    listener(head.marked, second[1]).kill()
    ask_both_faces(*first)
    until(lambda: len(re.findall(r"router-1 serves on", log.read_text())) == 2)
    until(lambda: ready(second[0]))
    ask_both_faces(*second)
    ask_both_faces(*first)
    served = re.findall(r"router-1 serves on (\S+) and (\S+)", log.read_text())
    assert served == [second, second]

    driver.terminate()
    assert driver.wait(60) == 0, log.read_text()
    assert_nothing_is_left(head.marked, *first, *second)


def test_a_worker_that_hangs_is_killed_and_started_again(head: Head, tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    hangs = ["--name", "hangs", "--set", "ray.hang_timeout=8s", "--set", "workers=[{role: both}]"]
    driver = head.joined().start(KVRELAY, "serve", *hangs, *PLAIN, log=log)
    http, grpc = addresses(driver, log)
    ask_both_faces(http, grpc)

    hung = next(p for p in head.marked.processes() if "ray::WorkerHost" in title(p))
    hung.suspend()
    until(lambda: len(re.findall(r"both-0 serves on", log.read_text())) == 2)
    told = "both-0 is lost: it has not answered for 8 s; starting it again in 1 s"
    assert told in log.read_text()
    until(lambda: not hung.is_running())
    until(lambda: ready(http))
    ask_both_faces(http, grpc)

    driver.terminate()
    assert driver.wait(60) == 0, log.read_text()
    assert_nothing_is_left(head.marked, http, grpc)


def test_the_containers_exact_command_serves_beyond_its_end(head: Head, tmp_path: Path) -> None:
    """The entry point of the RayJob, with the rendered cluster file where the pod has it. Another
    job finds nothing to change."""
    path = tmp_path / "cluster.yaml"
    # Other ports than the pod's, which this machine may use.
    text = cluster_file("cpu").replace("http_port: 8000", "http_port: 0")
    text = text.replace("grpc_port: 50051", "grpc_port: 0")
    path.write_text(text)
    here = Marked(head.joined().env | {"KVRELAY_CONFIG": str(path)})
    command = one("cpu", "RayJob")["spec"]["entrypoint"]
    log = tmp_path / "serve.log"
    driver = here.start("bash", "-c", f"exec {command}", log=log)
    http, grpc = addresses(driver, log)
    ask_both_faces(http, grpc)
    driver.kill()
    driver.wait()
    assert "nothing changes" in here.run("bash", "-c", command.removesuffix(" --follow"))
    ask_both_faces(http, grpc)
    here.run(KVRELAY, "stop")
    assert_nothing_is_left(head.marked, http, grpc)


@pytest.mark.long
def test_a_detached_cluster_lives_until_it_is_stopped(head: Head, tmp_path: Path) -> None:
    options = ["--name", "detached", *PLAIN]
    pool = ["--set", "workers=[{role: both}]"]
    head.joined().run(KVRELAY, "serve", "--detach", *options, *pool)
    status = head.status()
    assert status is not None
    assert (status["name"], status["phase"]) == ("detached", "ready")
    for unset in ("", "local"):  # neither names a Ray: the one that was started here is found
        here = Marked(head.marked.env | {"RAY_ADDRESS": unset})
        assert "detached" in here.run(KVRELAY, "status")
    assert_a_silent_controller_is_one_line(head)
    said = head.joined().run(KVRELAY, "stop")
    assert "stopped, nothing is left" in said
    assert_nothing_is_left(head.marked)


def assert_a_silent_controller_is_one_line(head: Head) -> None:
    controller = next(p for p in head.marked.processes() if "ray::Controller" in title(p))
    controller.suspend()
    done = subprocess.run(
        [KVRELAY, "status"], env=head.joined().env, capture_output=True, text=True, timeout=120
    )
    controller.resume()
    assert done.returncode == 2
    assert done.stderr == "kvrelay: the controller of detached is silent for 10 s\n"


@pytest.mark.long
def test_a_worker_that_has_no_room_is_told_of(head: Head, tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    options = ["--name", "roomless", "--device", "cuda", "--set", "ray.startup_timeout=18s"]
    driver = head.joined().start(KVRELAY, "serve", *options, *PLAIN, log=log)
    assert driver.wait(90) == 2
    said = log.read_text()
    assert "starting prefill-0 ..." in said
    waits = r"prefill-0: waits for resources, needs \{CPU: \S+ GPU: 1\}, decode-0: waits"
    assert re.search(f"still waiting for .*{waits}", said), said
    assert_nothing_is_left(head.marked)


def test_a_machine_without_the_gpu_is_told_at_once(tmp_path: Path) -> None:
    with marked(CUDA_VISIBLE_DEVICES="") as here:
        done = subprocess.run(
            [KVRELAY, "serve", DEPLOY / "configs" / "one-gpu.yaml", *PLAIN],
            env=here.env,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 2
    both = r"workers.0.device: cuda:0, and .*; workers.1.device: cuda:0, and .*"
    assert re.fullmatch(rf"kvrelay: {both}\n", done.stderr), done.stderr
    assert done.stdout == "", "nothing was started"


def test_a_second_ctrl_c_ends_at_once_and_leaves_nothing(head: Head, tmp_path: Path) -> None:
    """While a long answer holds up the drain, on a Ray that goes on."""
    log = tmp_path / "serve.log"
    options = ["--name", "cut", "--set", "drain_timeout=300s", "--set", "workers=[{role: both}]"]
    driver = head.joined().start(KVRELAY, "serve", *options, *PLAIN, log=log)
    http, grpc = addresses(driver, log)
    worker = next(p for p in head.marked.processes() if "ray::WorkerHost" in title(p))
    with Client(grpc, timeout_s=120) as client:
        stream = client.stream("It was", max_tokens=1500, ignore_eos=True)
        next(stream)
        worker.suspend()  # the answer stands still, and with it the drain
        driver.send_signal(signal.SIGINT)
        pressed_s = time.monotonic()
        until(lambda: "stopping: asked to stop" in log.read_text())
        until(lambda: time.monotonic() - pressed_s > 2 * ONE_PRESS_S)
        driver.send_signal(signal.SIGINT)
        assert driver.wait(60) == 130, log.read_text()
        with pytest.raises(KvrelayError):
            list(stream)
    assert "ending at once: running requests are cut" in log.read_text()
    assert "Traceback" not in log.read_text()
    assert_nothing_is_left(head.marked, http, grpc)


def test_a_checkpoint_that_is_none_ends_in_one_line(head: Head, tmp_path: Path) -> None:
    done = subprocess.run(
        [KVRELAY, "serve", "--name", "bad", "--model", tmp_path, *PLAIN],
        env=head.joined().env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("kvrelay: ")
    assert str(tmp_path) in last
    assert "Traceback" not in done.stderr
    assert_nothing_is_left(head.marked)


def test_on_a_ray_of_its_own_a_signal_drains_what_runs(tmp_path: Path) -> None:
    """SIGTERM to the whole group, as a supervisor sends it, in the middle of an answer. Nothing is
    configured, so that there is a pool node too, and nothing is built yet."""
    log = tmp_path / "serve.log"
    with marked(XDG_CACHE_HOME=str(tmp_path / "cache")) as here:
        driver = here.start(KVRELAY, "serve", *OWN_PORTS, log=log)
        _, grpc = addresses(driver, log)
        (ray,) = re.findall(r"Ray has started at (\S+)", log.read_text())
        beside = Marked(here.env | {"RAY_AUTH_MODE": "token"})  # its token is in HOME
        status = json.loads(beside.run(KVRELAY, "status", "--ray-address", ray, "--format", "json"))
        assert (status["name"], status["phase"]) == ("kvrelay", "ready")
        running = here.processes()
        assert here.left_of_kvrelay(), "the check sees a cluster that runs"
        chosen = r"pool-\w+: \d+\.\d GiB of host memory \(.* \d+\.\d GiB available\)"
        until(lambda: re.search(chosen, log.read_text()))
        until(lambda: re.search(r"pool-\w+ serves on", log.read_text()))
        with Client(grpc, timeout_s=120) as client:
            stream = client.stream("It was", max_tokens=300, ignore_eos=True)
            tokens = len(next(stream).token_ids)
            os.killpg(driver.pid, signal.SIGTERM)
            tokens += sum(len(chunk.token_ids) for chunk in stream)
        assert tokens == 300
        assert driver.wait(60) == 0, log.read_text()
        said = log.read_text()
        assert "stopped, nothing is left" in said
        assert "lost the worker" not in said
        assert "waits for resources" not in said
        assert "decode-0: device " in said
        assert "prefill-0 loads its libraries" in said
        assert "prefill-0 compiles" in said
        until(lambda: not any(p.is_running() for p in running), patience_s=60)
