"""Which memory a process may have: that of its host, as control groups limit it."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from engine.device.host_memory import available_bytes, total_bytes

MIB = 2**20
ROWS = "anon 5\nfile 7\ninactive_file {cache}\ntotal_inactive_file {cache}\n"


def group(folder: Path, limit: str, used: int, cache: int = 0, *, version: int = 2) -> None:
    names = ("memory.max", "memory.current")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in zip(names, (limit, str(used)), strict=True):
        (folder / name).write_text(f"{text}\n")
    (folder / "memory.stat").write_text(ROWS.format(cache=cache))


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "cgroup"
    path.write_text("0::/pod/worker\n")
    return path


def test_a_container_sees_its_own_group_as_the_root(own: Path, tmp_path: Path) -> None:
    group(tmp_path / "groups", str(9 * MIB), 4 * MIB)
    assert total_bytes(own, tmp_path / "groups") == 9 * MIB
    assert available_bytes(own, tmp_path / "groups") == 5 * MIB


def test_the_narrowest_group_around_it_counts(own: Path, tmp_path: Path) -> None:
    groups = tmp_path / "groups"
    group(groups / "pod" / "worker", "max", 3 * MIB)
    group(groups / "pod", str(20 * MIB), 18 * MIB)
    group(groups, str(30 * MIB), 29 * MIB, cache=7 * MIB)
    assert total_bytes(own, groups) == 20 * MIB
    assert available_bytes(own, groups) == 2 * MIB, "in the last one a cache can be dropped"


def test_a_full_group_has_nothing_left(own: Path, tmp_path: Path) -> None:
    group(tmp_path / "groups", str(MIB), 2 * MIB)
    assert available_bytes(own, tmp_path / "groups") == 0


def test_the_first_version_of_groups_counts_too(tmp_path: Path) -> None:
    own, groups = tmp_path / "cgroup", tmp_path / "groups"
    own.write_text("4:memory:/job\n3:cpuset:/\n0::/\n")
    group(groups / "memory" / "job", str(8 * MIB), 7 * MIB, cache=MIB, version=1)
    assert available_bytes(own, groups) == 2 * MIB
    group(groups / "memory" / "job", str(2**63 - 4096), 7 * MIB, version=1)
    assert total_bytes(own, groups) == psutil.virtual_memory().total, "no limit"


def test_without_groups_the_machine_counts(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    assert total_bytes(absent, absent) == psutil.virtual_memory().total
    assert 0 < available_bytes(absent, absent) <= total_bytes(absent, absent)
