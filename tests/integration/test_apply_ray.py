"""A running cluster on Ray is scaled, drained and changed by its file. No request fails."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.bundled import checkpoint_path
from kvrelay import Client
from tests.access import token_file
from tests.integration.ray_head import NOTHING_BUILT, Head, Marked, ray_head, until
from tests.integration.test_controller_killed import processes
from tests.integration.test_serve_ray import (
    KVRELAY,
    addresses,
    assert_nothing_is_left,
    kill_one,
    ready,
)

pytestmark = pytest.mark.ray

FILE = """
name: changing
model: {{dtype: float32}}
router: {{http_port: 0, grpc_port: 0, replicas: 1}}
pool: {{enabled: "off"}}
drain_timeout: 60s
scheduler: {{max_running_requests: {most}}}
workers:
  - {{role: prefill, cpu_threads: 1, resources: {{CPU: 0.5}}}}
  - {{role: decode, cpu_threads: 1, resources: {{CPU: 0.5}}, name: {name}}}
"""
PAUSE_S = 0.2
"""Between the requests of one asker: workers that start also need processors."""
ASKED: dict[str, Any] = {"max_tokens": 48, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with ray_head({}) as started:
        yield started


class Askers:
    """Streams that follow each other; each answer must be whole and the same."""

    def __init__(self, grpc: str | Sequence[str]) -> None:
        self.answers: set[tuple[int, ...]] = set()
        self.count = 0
        self.errors: list[Exception] = []
        self._grpc, self._over = grpc, threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(3)]

    def _ask(self) -> None:
        with Client(self._grpc, timeout_s=120) as client:
            while not self._over.wait(PAUSE_S):
                try:
                    answer = client.generate("It was", **ASKED)
                except Exception as error:
                    self.errors.append(error)
                    return
                self.answers.add(tuple(answer.token_ids))
                self.count += 1

    @contextmanager
    def asking(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in self._threads:
                thread.join()

    def more(self) -> None:
        """Some answers from now on."""
        seen = self.count
        until(lambda: self.count >= seen + 5 or self.errors)


def names(head: Head) -> list[str]:
    status = head.status()
    assert status is not None
    return [process["name"] for process in status["processes"]]  # type: ignore[attr-defined]


def without_ray(head: Head) -> Marked:
    """For commands that could not find the head."""
    env = {key: value for key, value in head.joined().env.items() if key != "RAY_ADDRESS"}
    return Marked(env)


def at_router(head: Head) -> tuple[str, str]:
    """The option that names its internal gRPC address."""
    status = head.status()
    assert status is not None
    router: dict[str, object] = status["routers"][0]  # type: ignore[index]
    return "--address", f"{router['internal_host']}:{router['internal_grpc_port']}"


def refused(head: Head, *command: str | Path) -> str:
    """What the command says that it can't do."""
    here = without_ray(head) if "--address" in command else head.joined()
    done = subprocess.run(
        [*map(str, (KVRELAY, *command))],
        env=here.env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stdout
    return done.stderr


@pytest.mark.timeout(600)
def test_a_cluster_is_scaled_drained_and_changed_while_it_serves(
    head: Head, tmp_path: Path
) -> None:
    log, file, here = tmp_path / "serve.log", tmp_path / "c.yaml", head.joined()

    def write(most: int = 16, name: str = "decode") -> None:
        file.write_text(FILE.format(most=most, name=name))

    write()
    driver = here.start(KVRELAY, "apply", file, "--yes", "--follow", *NOTHING_BUILT, log=log)
    http, grpc = addresses(driver, log)
    askers = Askers(grpc)
    with askers.asking():
        router, apart = at_router(head), without_ray(head)
        told = apart.run(KVRELAY, "scale", "decode=2", *router)
        assert told.startswith("decode: 1 -> 2 workers\ndecode-1 ")
        assert told.endswith("\nevery process serves\n")
        assert names(head) == ["router-0", "prefill-0", "decode-0", "decode-1"]
        askers.more()

        told = here.run(KVRELAY, "drain", "decode-0")
        assert told.startswith("decode-0: leaves, and another one replaces it\n")
        assert names(head) == ["router-0", "prefill-0", "decode-1", "decode-2"]
        told = apart.run(KVRELAY, "drain", "decode-1", "--remove", *router)
        assert told == "decode: 2 -> 1 workers\ndecode-1 has left\n"
        until(lambda: names(head) == ["router-0", "prefill-0", "decode-2"])
        askers.more()

        # Other settings for all workers; the controller dies while they are replaced.
        write(most=8)
        assert "give --yes" in refused(head, "apply", file, *NOTHING_BUILT)
        told = here.run(KVRELAY, "apply", file, "--yes", "--no-wait", *NOTHING_BUILT)
        assert "decode: replaced one by one: max_running_requests 16 -> 8\n" in told
        until(lambda: len(processes(head, "WorkerHost")) == 4)
        kill_one(head.marked, "ray::Controller")
        until(lambda: names(head) == ["router-0", "prefill-1", "decode-0"])
        assert here.run(KVRELAY, "apply", file, "--yes", *NOTHING_BUILT) == (
            "nothing changes\nevery process of changing serves\n"
        )
        askers.more()

        # A pool of another name takes over from one that is no more.
        write(most=8, name="fast")
        here.run(KVRELAY, "apply", file, "--yes", *NOTHING_BUILT)
        assert names(head) == ["router-0", "prefill-1", "fast-0"]
        askers.more()
    assert not askers.errors
    assert len(askers.answers) == 1, "the same tokens"
    assert "no fast worker" not in refused(head, "scale", "decode=1")
    assert "no decode worker would be left" in refused(head, "drain", "fast-0", "--remove")
    assert "serve another model as another cluster" in refused(
        head, "apply", file, "--set", "model.path=/m"
    )
    stranger = ("--token-file", token_file(tmp_path))
    assert "another token than that of the cluster changing" in refused(
        head, "apply", file, "--yes", *stranger
    )
    driver.terminate()
    driver.wait()
    assert names(head) == ["router-0", "prefill-1", "fast-0"], "its end stops nothing"
    here.run(KVRELAY, "stop")
    assert_nothing_is_left(head.marked, http, grpc)


@pytest.mark.timeout(600)
def test_apply_ends_with_the_reason_where_a_worker_is_refused(head: Head, tmp_path: Path) -> None:
    """Another model has come to lie under the same path. What serves goes on."""
    log, file, here = tmp_path / "serve.log", tmp_path / "c.yaml", head.joined()
    model = Path(shutil.copytree(checkpoint_path(), tmp_path / "model"))
    file.write_text(FILE.format(most=16, name="decode"))
    command = ("apply", file, "--yes", "--set", f"model.path={model}", *NOTHING_BUILT)
    driver = here.start(KVRELAY, *command, "--follow", log=log)
    http, grpc = addresses(driver, log)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    told = refused(head, *command, "--set", "workers.1.replicas=2")
    assert "router-0 refused decode-1: worker decode-1 serves another model than " in told
    told = refused(head, "scale", "decode=2", *at_router(head))
    assert "router-0 refused decode-1: worker decode-1 serves another model than " in told
    with Client(grpc, timeout_s=120) as client:
        assert client.generate("It was", **ASKED).token_ids
    driver.terminate()
    driver.wait()
    here.run(KVRELAY, "stop")
    assert_nothing_is_left(head.marked, http, grpc)


LAME_DUCK = ("--name", "led", "--set", "router.lame_duck=10m", "--set", "workers=[{role: both}]")


@pytest.mark.timeout(600)
def test_a_router_that_is_replaced_is_left_before_it_refuses(head: Head, tmp_path: Path) -> None:
    """Where the whole cluster stops, nobody is led away: it does not take the 10 minutes."""
    log, file, here = tmp_path / "serve.log", tmp_path / "c.yaml", head.joined()
    file.write_text(FILE.format(most=16, name="decode"))
    command = (KVRELAY, "apply", file, "--yes", *LAME_DUCK, *NOTHING_BUILT)
    driver = here.start(*command, "--follow", log=log)
    http, grpc = addresses(driver, log)
    with Client(grpc, timeout_s=120) as client:
        whole = client.generate("It was", **ASKED)
        told = here.run(*command, "--no-wait", "--set", "router.max_body=3MB")
        assert told.startswith("router: replaced one by one: max_body_bytes ")
        until(lambda: not ready(http))
        assert client.generate("It was", **ASKED).token_ids == whole.token_ids
    assert states(head)["router-0"] == "draining"
    here.run(KVRELAY, "stop", "--name", "led")
    assert driver.wait(60) == 0, log.read_text()
    assert_nothing_is_left(head.marked, http, grpc)


def states(head: Head) -> dict[str, str]:
    """# process |-> its state"""
    status = head.status("led")
    assert status is not None
    return {one["name"]: one["state"] for one in status["processes"]}  # type: ignore[attr-defined]


def roles(head: Head) -> dict[str, str]:
    """# worker |-> its role, as the router knows it"""
    status = head.status()
    servers = status["servers"] if status is not None else {}
    known = [worker for router in servers.values() for worker in router.get("workers", [])]  # type: ignore[attr-defined]
    return {worker["name"]: worker["role"] for worker in known}


@pytest.mark.timeout(600)
def test_a_flip_outlives_the_worker_and_the_controller_until_the_file_is_applied(
    head: Head, tmp_path: Path
) -> None:
    log, file, here = tmp_path / "serve.log", tmp_path / "c.yaml", head.joined()
    file.write_text(FILE.format(most=16, name="decode"))
    two = ("--set", "workers.1.replicas=2", *NOTHING_BUILT)
    driver = here.start(KVRELAY, "apply", file, "--yes", "--follow", *two, log=log)
    http, grpc = addresses(driver, log)
    until(lambda: "decode-1" in roles(head))  # one of each role is enough to serve
    router, apart = at_router(head), without_ray(head)
    stranger = ("--token-file", token_file(tmp_path))
    flip = ("flip", "decode-1", "prefill", *router)
    assert "the token is of another cluster" in refused(head, *flip, *stranger)
    assert roles(head)["decode-1"] == "decode"
    assert apart.run(KVRELAY, *flip) == "decode-1 is a prefill worker\n"
    flipped = {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "prefill"}
    assert roles(head) == flipped
    for way in ((), router):
        assert "no process is named decode-7" in refused(head, "flip", "decode-7", "prefill", *way)
    assert "no pool of workers is named x" in refused(head, "scale", "x=1", *router)
    other = ("apply", file, "--name", "other", *router)
    assert "this router is of the cluster changing" in refused(head, *other)

    before = processes(head, "WorkerHost")
    for process in before.values():
        process.kill()
    kill_one(head.marked, "ray::Controller")
    until(lambda: len(processes(head, "WorkerHost").keys() - before.keys()) == 3)
    until(lambda: roles(head) == flipped)

    kill_one(head.marked, "ray::Controller")
    told = apart.run(KVRELAY, "apply", file, "--yes", *two, *router)
    assert told.startswith("decode-1: prefill -> decode\n"), "by the next controller"
    assert told.endswith("\nevery process serves\n")
    until(lambda: roles(head) == {**flipped, "decode-1": "decode"})
    driver.terminate()
    driver.wait()
    here.run(KVRELAY, "stop")
    assert_nothing_is_left(head.marked, http, grpc)
