"""Which CPUs a worker gets for itself, and what a control group leaves it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.process import host_cpus
from cluster.process.host_cpus import chosen, cores, quota, ranges

PAIRS = {cpu: (0, cpu % 4) for cpu in range(8)}
"""Four cores; CPU n and n + 4 are the same one."""
ALONE = {cpu: (cpu // 4, cpu) for cpu in range(8)}
"""Two packages of four cores."""


@pytest.mark.parametrize(
    ("threads", "free", "of", "expected"),
    [
        (2, range(8), PAIRS, (0, 4)),
        (4, range(8), PAIRS, (0, 4, 1, 5)),
        (1, {1, 2, 3, 4, 5, 6, 7}, PAIRS, (1,)),
        (2, {4, 5, 6, 3, 7}, PAIRS, (3, 7)),
        (4, range(2, 8), ALONE, (2, 3, 4, 5)),
        (8, range(8), PAIRS, (0, 4, 1, 5, 2, 6, 3, 7)),
        (3, {0, 1}, ALONE, ()),
    ],
)
def test_whole_cores_first_then_neighbours(
    threads: int,
    free: set[int],
    of: dict[int, tuple[int, int]],
    expected: tuple[int, ...],
) -> None:
    assert chosen(threads, set(free), of) == expected


def test_cores_as_the_kernel_describes_them(tmp_path: Path) -> None:
    for cpu, package, core in ((0, 0, 7), (3, 1, 7)):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{package}\n")
        (folder / "core_id").write_text(f"{core}\n")
    assert cores([0, 3, 5], tmp_path) == {0: (0, 7), 3: (1, 7), 5: (0, 5)}


@pytest.mark.parametrize(
    ("cpus", "text"), [((), ""), ((5,), "5"), ((2, 0, 1), "0-2"), ((0, 1, 4, 8, 9), "0-1,4,8-9")]
)
def test_ranges(cpus: tuple[int, ...], text: str) -> None:
    assert ranges(cpus) == text


V2 = "0::/pods/one\n"
V1 = "4:memory:/x\n3:cpu,cpuacct:/pods/one\n2:cpuset:/\n0::/\n"


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        (V2, {}, None),
        (V2, {"pods/one/cpu.max": "max 100000"}, None),
        (V2, {"pods/one/cpu.max": "250000 100000"}, 2.5),
        (V2, {"pods/one/cpu.max": "400000 100000", "pods/cpu.max": "300000 100000"}, 3.0),
        ("0::/\n", {"cpu.max": "50000 100000"}, 0.5),
        (V1, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        (V1, {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2.0),
        (V1, {"cpu/pods/cpu.cfs_quota_us": "1", "cpu/pods/cpu.cfs_period_us": "2"}, 0.5),
    ],
)
def test_quota_is_the_least_around(
    own: str, files: dict[str, str], expected: float | None, tmp_path: Path
) -> None:
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text + "\n")
    assert quota(tmp_path / "own", tmp_path / "groups") == expected


def test_claims_are_taken_once_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_cpus, "NAMES", f"test-{os.getpid()}-")
    first = host_cpus.Pinned(host_cpus._claim(2, [0, 1, 2]))
    assert len(first.cpus) == 2
    assert host_cpus._claim(2, [0, 1, 2]) == {}
    second = host_cpus.Pinned(host_cpus._claim(1, [0, 1, 2]))
    assert sorted([*first.cpus, *second.cpus]) == [0, 1, 2]
    first.release()
    third = host_cpus.Pinned(host_cpus._claim(2, [0, 1, 2]))
    assert len(third.cpus) == 2
    second.release()
    third.release()


def test_a_time_quota_leaves_it_unpinned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_cpus, "allowed", lambda: frozenset(range(64)))
    monkeypatch.setattr(host_cpus, "quota", lambda: 2.0)
    with caplog.at_level(logging.INFO):
        assert host_cpus.pin(2).cpus == ()
    assert "not pinned: it may use the time of 2 CPUs, on any of 64" in caplog.text


SCRIPT = """
import os, sys, threading
from cluster.process import host_cpus
host_cpus.NAMES = sys.argv[1]
gate = threading.Event()
there = threading.Thread(target=gate.wait)
there.start()
pinned = host_cpus.pin(1)
masks = {tuple(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")}
masks |= {tuple(os.sched_getaffinity(0))}
print(sorted(masks) == [pinned.cpus])
gate.set()
"""


@pytest.mark.processes
def test_every_thread_of_the_process_is_moved() -> None:
    assert output(SCRIPT, f"test-{os.getpid()}-") == "True\n"


def output(script: str, *arguments: str) -> str:
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


GIVES_WAY = """
import os, sys, threading
from cluster.process import host_cpus
host_cpus.has_gpu_files = lambda: sys.argv[2] == "GPU"
gate = threading.Event()
threading.Thread(target=gate.wait).start()
own = os.nice(0)
host_cpus.give_way(sys.argv[1])
threading.Thread(target=gate.wait).start()
tasks = map(int, os.listdir("/proc/self/task"))
print({os.getpriority(os.PRIO_PROCESS, task) - own for task in tasks})
gate.set()
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("device", "files", "nice"),
    [
        ("cpu", "", host_cpus.NICE),
        ("cpu", "GPU", host_cpus.NICE),
        ("auto", "", host_cpus.NICE),
        ("auto", "GPU", 0),
        ("cuda:0", "GPU", 0),
    ],
)
def test_a_worker_on_cpus_gives_way_with_all_its_threads(
    device: str, files: str, nice: int
) -> None:
    least = min(nice, host_cpus.MOST_NICE - os.nice(0))
    assert output(GIVES_WAY, device, files) == f"{ {least} }\n"
