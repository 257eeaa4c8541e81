"""Ray's head dies and comes back, with the routers and workers on another node of this machine.

With a store for the head's state, on disk or in a Redis, requests go on, and so does the control
of the cluster. Without one everything ends, and nothing is left.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from kvrelay import Client
from tests.integration.manifests import Manifest, redis_manifest
from tests.integration.ray_head import (
    BIN,
    NOTHING_BUILT,
    Environment,
    Head,
    Marked,
    free_ports,
    head_at,
    marked,
    until,
)
from tests.integration.test_serve_ray import (
    KVRELAY,
    PLAIN,
    assert_nothing_is_left,
    kill_one,
    title,
)

pytestmark = pytest.mark.ray

Store = Callable[[Path], AbstractContextManager[Environment]]

# `ray start --head` refuses while a node of the same cluster runs on its machine.
START = (
    "import functools, ray._private.services as services; "
    "services.find_gcs_addresses = functools.cache(set); "
    "from ray.scripts.scripts import main; main()"
)
THERE = [
    *("--set", "router.resources={there: 1}"),
    *NOTHING_BUILT,
]


@dataclass(frozen=True, slots=True)
class MortalHead:
    """A head without room for actors that ask for resources."""

    here: Marked
    ports: list[int]
    head: Head
    """As commands find it."""

    @property
    def address(self) -> str:
        return self.head.address

    def start(self) -> list[psutil.Process]:
        """Returns its processes. Ray gives them 30 s, which is short on a busy machine: then it is
        started again, once."""
        before = {process.pid for process in self.here.processes()}
        try:
            self._start()
        except AssertionError:
            kill(self._since(before))
            self._start()
        return self._since(before)

    def _since(self, before: set[int]) -> list[psutil.Process]:
        return [process for process in self.here.processes() if process.pid not in before]

    def _start(self) -> None:
        port, client, agent, _ = self.ports
        password = self.here.env.get("REDIS_PASSWORD")
        self.here.run(
            *(sys.executable, "-c", START, "start", "--head", "--num-cpus=0"),
            *("--node-ip-address=127.0.0.1", f"--port={port}", "--include-dashboard=false"),
            *(f"--ray-client-server-port={client}", f"--dashboard-agent-listen-port={agent}"),
            *("--disable-usage-stats", "--object-store-memory=100000000"),
            *([f"--redis-password={password}"] if password else []),
        )

    def add_node(self) -> None:
        self.here.run(
            *(BIN / "ray", "start", f"--address={self.address}", "--num-cpus=4"),
            *("--node-ip-address=127.0.0.1", f"--dashboard-agent-listen-port={self.ports[3]}"),
            *("--disable-usage-stats", "--object-store-memory=100000000"),
            f"--resources={json.dumps({'there': 3})}",
        )


def kill(processes: list[psutil.Process]) -> None:
    """With all that they have started since."""
    for process in processes:
        with suppress(psutil.Error):
            for one in (process, *process.children(recursive=True)):
                one.kill()


@contextmanager
def mortal_head(**env: str) -> Iterator[MortalHead]:
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid4().hex}
    ports = free_ports(4)
    with marked(**token, **env) as here, head_at(here, f"127.0.0.1:{ports[0]}") as head:
        yield MortalHead(here, ports, head)


def ask(grpc: str, tokens: int = 8) -> int:
    with Client(grpc, timeout_s=60) as client:
        return len(client.generate("It was", max_tokens=tokens, ignore_eos=True).token_ids)


def serve_there(head: Head, workers: int) -> str:
    """Detached; returns the router's gRPC address."""
    pool = f"workers=[{{role: both, replicas: {workers}, resources: {{there: 1}}}}]"
    options = [*THERE, "--set", pool, *PLAIN]
    head.joined().run(KVRELAY, "serve", "--detach", *options, timeout_s=240)
    status = head.status()
    assert status is not None
    router: dict[str, object] = status["routers"][0]  # type: ignore[index]
    return f"{router['host']}:{router['grpc_port']}"


def all_serve(head: Head) -> bool:
    status = head.status()
    if status is None:
        return False
    states = [process["state"] for process in status["processes"]]  # type: ignore[attr-defined]
    return status["phase"] == "ready" and states == ["serving"] * 3


def workers(head: Head) -> set[int]:
    found = head.marked.processes()
    return {process.pid for process in found if title(process).startswith("ray::WorkerHost")}


@contextmanager
def on_disk(folder: Path) -> Iterator[Environment]:
    """What a head needs to keep its state in files of its own."""
    yield {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(folder)}


@contextmanager
def in_redis(folder: Path) -> Iterator[Environment]:
    """A Redis, run by the command of the manifests, and what KubeRay gives to the head for it."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    (port,), password = free_ports(1), uuid4().hex
    command = redis_command(redis_manifest("StatefulSet"), folder, port, password)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as redis:
        try:
            until(lambda: accepts(port) or redis.poll() is not None)
            yield {
                "RAY_REDIS_ADDRESS": f"127.0.0.1:{port}",
                "REDIS_PASSWORD": password,
                "RAY_external_storage_namespace": uuid4().hex,
            }
        finally:
            redis.terminate()


def redis_command(manifest: Manifest, folder: Path, port: int, password: str) -> list[str]:
    """As the kubelet runs it, but on this machine's port and folder."""
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    here = {"6379": str(port), "/data": str(folder), "$(REDIS_PASSWORD)": password}
    return [here.get(word, word) for word in (*container["command"], *container["args"])]


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize(
    "store",
    [pytest.param(on_disk, marks=pytest.mark.long, id="disk"), pytest.param(in_redis, id="redis")],
)
def test_with_a_store_requests_go_on_without_the_head(store: Store, tmp_path: Path) -> None:
    with store(tmp_path) as env:
        assert_requests_go_on(env | {"RAY_gcs_rpc_server_reconnect_timeout_s": "120"})


def assert_requests_go_on(env: Environment) -> None:
    with mortal_head(**env) as mortal:
        head_processes = mortal.start()
        mortal.add_node()
        head = mortal.head
        grpc = serve_there(head, workers=2)
        with Client(grpc, timeout_s=240) as client:
            stream = client.stream("It was", max_tokens=500, ignore_eos=True)
            tokens = len(next(stream).token_ids)
            kill(head_processes)
            assert ask(grpc) == 8, "while there is no head"
            mortal.start()
            assert ask(grpc) == 8, "while the nodes come back to it"
            tokens += sum(len(chunk.token_ids) for chunk in stream)
        assert tokens == 500
        until(lambda: all_serve(head))

        # The new head has the cluster's record and starts the controller again, which starts the
        # worker again.
        before = workers(head)
        kill_one(head.marked, "ray::WorkerHost")
        kill_one(head.marked, "ray::Controller")
        assert ask(grpc) == 8
        until(lambda: len(workers(head)) == 2 and workers(head) != before)
        until(lambda: all_serve(head))
        head.joined().run(KVRELAY, "stop")
        assert_nothing_is_left(head.marked, grpc)


def test_without_a_store_everything_ends_with_the_head() -> None:
    with mortal_head(RAY_gcs_rpc_server_reconnect_timeout_s="20") as mortal:
        head_processes = mortal.start()
        mortal.add_node()
        head = mortal.head
        grpc = serve_there(head, workers=1)
        kill(head_processes)
        assert ask(grpc) == 8, "the nodes wait for another head"
        assert_nothing_is_left(head.marked, grpc)
        assert head.status() is None
