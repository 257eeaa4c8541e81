"""The controller is killed in each phase of a cluster on Ray. It goes on where it was, and no
request fails."""

from __future__ import annotations

import re
import shutil
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from engine.bundled import checkpoint_path
from kvrelay import Client
from tests.integration.ray_head import NOTHING_BUILT, Head, ray_head, until
from tests.integration.test_serve_ray import (
    KVRELAY,
    PLAIN,
    addresses,
    ask_both_faces,
    assert_nothing_is_left,
    kill_one,
    title,
)

pytestmark = pytest.mark.ray

TWO = ["--set", "workers=[{role: both, replicas: 2}]"]
RECORDS = """
import ray
from ray.experimental import internal_kv
ray.init(address="auto", logging_level="ERROR")
print(internal_kv._internal_kv_list("", namespace=b"kvrelay"))
"""


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with ray_head({}) as started:
        yield started


def processes(head: Head, of: str) -> dict[int, psutil.Process]:
    return {p.pid: p for p in head.marked.processes() if title(p).startswith(f"ray::{of}")}


def restarted(log: Path, phase: str) -> bool:
    return f"the controller was restarted; the cluster was {phase}" in log.read_text()


def states(head: Head) -> list[str]:
    status = head.status()
    assert status is not None
    return [process["state"] for process in status["processes"]]  # type: ignore[attr-defined]


def ask(grpc: str, tokens: int) -> int:
    with Client(grpc, timeout_s=240) as client:
        return len(client.generate("It was", max_tokens=tokens, ignore_eos=True).token_ids)


def records(head: Head) -> str:
    return head.joined().run(sys.executable, "-c", RECORDS).strip()


def test_a_controller_is_killed_in_each_phase(head: Head, tmp_path: Path) -> None:
    log, model = tmp_path / "serve.log", shutil.copytree(checkpoint_path(), tmp_path / "model")
    options = ["--name", "phases", "--model", model, *TWO, *NOTHING_BUILT, *PLAIN]
    driver = head.joined().start(KVRELAY, "serve", *options, log=log)

    until(lambda: len(processes(head, "WorkerHost")) == 2)
    started = processes(head, "WorkerHost")
    kill_one(head.marked, "ray::Controller")
    http, grpc = addresses(driver, log)
    assert restarted(log, "starting")
    assert processes(head, "WorkerHost").keys() == started.keys(), "nothing is started twice"
    ask_both_faces(http, grpc)

    until(lambda: states(head) == ["serving"] * 3)  # it is ready before both workers are

    # One worker dies with it and can't come back, which would end a cluster that starts. Its
    # driver is silent meanwhile, which is no wish to stop.
    config = (model / "config.json").rename(tmp_path / "config.json")
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(ask, grpc, 60) for _ in range(4)]
        driver.send_signal(signal.SIGSTOP)
        kill_one(head.marked, "ray::WorkerHost")
        kill_one(head.marked, "ray::Controller")
        assert [answer.result() for answer in answers] == [60] * 4
    until(lambda: "serving" in states(head) and "backing off" in states(head))
    driver.send_signal(signal.SIGCONT)
    until(lambda: restarted(log, "ready"))
    failed = r"both-\d is lost: .*has no config.json"
    until(lambda: re.search(failed, log.read_text()))
    ask_both_faces(http, grpc)
    config.rename(model / "config.json")
    until(lambda: states(head) == ["serving"] * 3)

    # A suspended worker holds up the drain.
    workers = processes(head, "WorkerHost").values()
    with Client(grpc, timeout_s=240) as client:
        stream = client.stream("It was", max_tokens=150, ignore_eos=True)
        tokens = len(next(stream).token_ids)
        for worker in workers:
            worker.suspend()
        driver.terminate()
        until(lambda: "stopping: asked to stop" in log.read_text())
        kill_one(head.marked, "ray::Controller")
        until(lambda: restarted(log, "stopping"))
        for worker in workers:
            worker.resume()
        tokens += sum(len(chunk.token_ids) for chunk in stream)
    assert tokens == 150
    assert driver.wait(60) == 0, log.read_text()
    assert_nothing_is_left(head.marked, http, grpc)
    assert records(head) == "[]"


def test_a_killed_driver_is_a_request_to_stop_also_for_a_restarted_controller(
    head: Head, tmp_path: Path
) -> None:
    log = tmp_path / "serve.log"
    options = ["--name", "orphan", "--set", "workers=[{role: both}]", *NOTHING_BUILT, *PLAIN]
    driver = head.joined().start(KVRELAY, "serve", *options, log=log)
    http, grpc = addresses(driver, log)
    assert "orphan/" in records(head)
    driver.kill()
    driver.wait()
    kill_one(head.marked, "ray::Controller")
    assert_nothing_is_left(head.marked, http, grpc)
    assert records(head) == "[]"
