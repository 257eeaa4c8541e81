"""The `kvrelay` commands of the pages about operating run as they stand, in a folder with the files
that they name. That the program takes those of all pages is in tests/unit/test_docs_commands.py."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from kvrelay import Client
from tests.integration.plain_kit import (
    RouterAddresses,
    here,
    start_router,
    start_worker,
    until_joined,
)
from tests.integration.ray_head import BIN, NOTHING_BUILT, Head, Marked, ray_head, until
from tests.integration.test_apply_ray import names
from tests.integration.test_serve_ray import assert_nothing_is_left
from tests.unit.test_docs import REPOSITORY
from tests.unit.test_docs_commands import in_blocks, in_sentences

__all__ = ["here"]

OPERATING = ("operating.md", "tuning.md", "elastic.md", "deploy-kubernetes.md")
ON_RAY = (
    "kvrelay apply cluster.yaml",
    "kvrelay status",
    "kvrelay status --kv",
    "kvrelay top",
    "kvrelay trace ID",
    "kvrelay scale prefill=2",
    "kvrelay scale decode=3",
    "kvrelay flip decode-1 prefill",
    "kvrelay drain decode-1",
    "kvrelay scale decode=1",
    "kvrelay stop",
)
"""In an order in which each finds what it names."""
AS_PROCESSES = (
    "kvrelay top --address 127.0.0.1:50951 --once",
    "kvrelay controller --join HOST:PORT",
    "kvrelay flip WORKER ROLE --address HOST:PORT",
    "kvrelay drain WORKER --address HOST:PORT",
)
ALONE = (
    "kvrelay doctor",
    "kvrelay simulate deploy/configs/simulation.yaml --trace trace.jsonl",
)
ELSEWHERE = {
    "kvrelay serve": "test_serve_ray.py",
    "kvrelay apply --yes --follow": "test_apply_ray.py",
    "kvrelay apply": "test_apply_ray.py",
    "kvrelay scale": "test_apply_ray.py",
    "kvrelay scale decode=3 --address HOST:PORT": "test_apply_ray.py",
    "kvrelay simulate": "test_simulated_replay.py",
    "kvrelay pool-node": "test_kubernetes_plain.py",
    "kvrelay controller": "test_kubernetes_plain.py",
}
"""Named without what they need, or run where their page's own files are."""
NOT_RUN = {
    "kubectl": "it needs an API server; what it would send is in test_kubernetes*.py",
    "docker": "it needs a daemon; test_image.py runs the steps",
    "curl": "it asks through kubectl's port-forward",
}
CLUSTER = """
model: {dtype: float32}
engine: {compile: "off", profile: "off"}
attention: {backend: sdpa}
router: {http_port: 0, grpc_port: 0}
pool: {enabled: "off"}
workers:
  - {role: prefill, cpu_threads: 1, resources: {CPU: 0.5}}
  - {role: decode, cpu_threads: 1, resources: {CPU: 0.5}}
"""
REQUEST = {"timestamp": 0, "input_length": 600, "output_length": 4, "hash_ids": [0, 1]}
ENDS_BY_CTRL_C = ("kvrelay top", "kvrelay controller")


def text_of(page: str) -> str:
    return (REPOSITORY / "docs" / page).read_text()


def commands(page: str) -> set[str]:
    text = text_of(page)
    found = (*in_blocks(text), *in_sentences(text))
    return {line.partition(" #")[0].strip() for line in found}


@pytest.mark.parametrize("page", OPERATING)
def test_each_command_is_run_by_a_test(page: str) -> None:
    run = {*ON_RAY, *AS_PROCESSES, *ALONE}
    assert commands(page) <= run | {*ELSEWHERE}
    assert all((Path(__file__).parent / test).exists() for test in ELSEWHERE.values())


def test_each_command_that_is_run_is_on_a_page() -> None:
    on_pages = set[str]().union(*map(commands, OPERATING))
    assert {*ON_RAY, *AS_PROCESSES, *ALONE, *ELSEWHERE} <= on_pages


def test_other_programs_are_those_that_cannot_run_here() -> None:
    fenced = re.findall(r"^ *```(\w*)\n(.*?)^ *```", text_of("deploy-kubernetes.md"), re.S | re.M)
    shell = "\n".join(block for language, block in fenced if language in ("", "sh"))
    lines = shell.replace("\\\n", "").splitlines()
    assert {line.split()[0] for line in lines if line.strip()} <= {*NOT_RUN}
    folders = re.findall(r"kubectl apply -k (deploy/\S+)", text_of("deploy-kubernetes.md"))
    assert folders
    assert all((REPOSITORY / folder / "kustomization.yaml").exists() for folder in folders)


def run(here: Marked, line: str, folder: Path) -> str:
    """What it prints, errors included."""
    words = shlex.split(line)
    with subprocess.Popen(
        [BIN / words[0], *words[1:]],
        cwd=folder,
        env=here.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        if line.startswith(ENDS_BY_CTRL_C) and "--once" not in line:
            first = process.stdout.readline()
            process.send_signal(signal.SIGINT)
        else:
            first = ""
        printed = first + process.communicate(timeout=240)[0]
    assert process.returncode == 0, (line, printed)
    return printed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the files that the pages name."""
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    (tmp_path / "trace.jsonl").write_text(json.dumps(REQUEST) + "\n")
    (tmp_path / "deploy").symlink_to(REPOSITORY / "deploy")
    return tmp_path


@pytest.mark.parametrize("line", ALONE)
def test_what_needs_no_cluster_runs(here: Marked, folder: Path, line: str) -> None:
    assert run(here, line, folder)


def test_processes_are_operated_by_the_pages_commands(here: Marked, folder: Path) -> None:
    router, at = start_router(here, folder / "router.log")
    workers = {
        role: start_worker(here, [at], role, folder / f"{role}.log", *NOTHING_BUILT)
        for role in ("prefill", "decode")
    }
    until_joined(at)
    names = {role: f"{role}-{process.pid}" for role, process in workers.items()}
    told = {line: run(here, placed(line, at, names["decode"]), folder) for line in AS_PROCESSES}
    assert names["decode"] in told[AS_PROCESSES[0]]
    assert workers["decode"].wait(60) == 0, "it was drained"
    for process in (workers["prefill"], router):
        process.terminate()
        assert process.wait(60) == 0


def placed(line: str, at: RouterAddresses, worker: str) -> str:
    """With this cluster's addresses and names in the places of those that a user fills in."""
    line = line.replace("127.0.0.1:50951", at.internal).replace("HOST:PORT", at.internal)
    return line.replace("WORKER", worker).replace("ROLE", "prefill")


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_cluster_on_ray_is_operated_by_the_pages_commands(folder: Path) -> None:
    with ray_head({}) as head:
        there = head.joined()
        for line in ON_RAY:
            printed = run(there, line.replace("ID", "asked") if "trace" in line else line, folder)
            if line == ON_RAY[0]:
                ask(head)
            if "trace" in line:
                assert "submitted" in printed
            if line == "kvrelay scale decode=1":
                assert len([name for name in names(head) if name.startswith("decode")]) == 1
        assert_nothing_is_left(head.marked)


def ask(head: Head) -> None:
    status = head.status()
    assert status is not None
    router: dict[str, object] = status["routers"][0]  # type: ignore[index]
    with Client(f"{router['host']}:{router['grpc_port']}", timeout_s=60) as client:
        until(lambda: client.server_info().ready)
        client.generate("It was", max_tokens=4, ignore_eos=True, request_id="asked")
