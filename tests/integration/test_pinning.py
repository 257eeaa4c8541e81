"""Workers of one host, as real processes, on CPUs of their own; the router on any."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from cluster.process.host_cpus import MOST_NICE, NICE, ranges
from kvrelay import Client
from tests.integration.plain_kit import KVRELAY, start_router
from tests.integration.ray_head import Marked, marked, until

CPUS = sorted(os.sched_getaffinity(0))
needs_two = pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
CLAIMS = f"test-{uuid4().hex[:8]}-"
"""Other workers of this machine have nothing to do with these."""
WORKER = f"""
from cluster.process import host_cpus
from cluster.cli import main as cli
host_cpus.NAMES = {CLAIMS!r}
cli.main()
"""

Process = subprocess.Popen[bytes]


class Host:
    """What it starts ends with it."""

    def __init__(self, environment: Marked, folder: Path) -> None:
        self.environment = environment
        self.folder = folder
        self.router, self.at = start_router(environment, folder / "router")
        self.workers: dict[str, Process] = {}

    def start(self, name: str, *more: str) -> Process:
        options = (
            "--join",
            self.at.internal,
            "--role",
            "both",
            "--cpu-threads",
            "1",
            "--name",
            name,
        )
        small = ("--set", "engine.kv_memory=16MiB", "--set", "engine.profile=off")
        command = (sys.executable, "-c", WORKER, "worker", *options, *small, *more)
        self.workers[name] = self.environment.start(*command, log=self.folder / name)
        return self.workers[name]

    def said(self, name: str) -> str:
        return (self.folder / name).read_text()

    def shown(self) -> dict[str, str]:
        """# worker |-> its own CPUs, as status shows them"""
        with Client(self.at.grpc, timeout_s=30) as client:
            return {worker.name: worker.cpus for worker in client.server_info().workers}

    def until_there(self, *names: str) -> dict[str, str]:
        until(lambda: self.shown().keys() == {*names})
        return self.shown()

    def close(self) -> None:
        for process in (self.router, *self.workers.values()):
            process.kill()
            process.wait()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with marked() as environment:
        host = Host(environment, tmp_path)
        yield host
        host.close()


def masks_of(process: Process) -> set[str]:
    """The kernel's word, for each of its threads that hasn't ended meanwhile."""
    masks: set[str] = set()
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            masks |= {*re.findall(r"Cpus_allowed_list:\t(\S+)", (task / "status").read_text())}
    return masks


def levels(process: Process) -> set[int]:
    """The nice level of each of its threads."""
    threads = psutil.Process(process.pid).threads()
    return {os.getpriority(os.PRIO_PROCESS, one.id) for one in threads}


@needs_two
def test_each_worker_has_cpus_that_no_other_has(host: Host) -> None:
    workers = {name: host.start(name) for name in ("a", "b")}
    shown = host.until_there("a", "b")
    assert len({*shown.values()}) == 2
    for name, process in workers.items():
        assert shown[name].isdecimal(), shown
        assert masks_of(process) == {shown[name]}
        assert f"pinned to CPUs {shown[name]}\n" in host.said(name)
    assert masks_of(host.router) == {ranges(CPUS)}
    gives_way = {min(os.nice(0) + NICE, MOST_NICE)}
    assert [levels(one) for one in workers.values()] == [gives_way] * 2
    assert levels(host.router) == {os.nice(0)}
    table = host.environment.run(KVRELAY, "status", "--address", host.at.internal)
    assert re.search(rf"a +both +ready +cpu +{shown['a']} ", table), table

    workers["a"].kill()
    host.until_there("b")
    host.start("again")
    assert host.until_there("b", "again")["again"] not in ("", shown["b"])


@pytest.mark.long
@needs_two
def test_who_finds_too_few_runs_anywhere_and_says_so(host: Host) -> None:
    anywhere = ranges(CPUS)
    host.start("all", "--cpu-threads", str(len(CPUS)))
    host.until_there("all")
    late, off = host.start("late"), host.start("off", "--cpu-pinning", "off")
    assert host.until_there("all", "late", "off") == {"all": anywhere, "late": "", "off": ""}
    assert masks_of(late) == masks_of(off) == {anywhere}
    assert f"not pinned: other workers leave fewer than 1 of {anywhere}" in host.said("late")
    assert host.said("late").count("pinned") == 1
    assert "pinned" not in host.said("off")
