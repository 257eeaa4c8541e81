"""`python -m bench.gpu_day`, without a device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu_day.parts import PARTS

ROOT = Path(__file__).parents[2]


def _day(folder: Path, *options: str) -> str:
    """The page of results."""
    command = [sys.executable, "-m", "bench.gpu_day", "--out", str(folder), *options]
    subprocess.run(command, cwd=ROOT, capture_output=True, timeout=300, check=True)
    return (folder / "page.md").read_text()


@pytest.mark.processes
def test_a_rehearsal_runs_the_parts_on_the_cpu(tmp_path: Path) -> None:
    page = _day(tmp_path, "--rehearse", "--only", "collate", "transfer", "pull", "mixed")
    assert page.count("\n## ") == 3, "mixed batches make no sense without a device"
    for name, unit in (("collate", "GB/s"), ("transfer", "GB/s"), ("pull", "ms")):
        assert f"\n## {name}: exit 0, " in page, page
        assert unit in (tmp_path / f"{name}.log").read_text()


@pytest.mark.processes
def test_a_part_that_fails_or_has_no_time_is_told(tmp_path: Path) -> None:
    page = _day(tmp_path, "--only", "mixed", "fp8", "--minutes", "0.05")
    assert "\n## mixed: " in page and "mixed: exit 0" not in page
    assert "\n## fp8: " in page and "fp8: exit 0" not in page
    assert "no time left" in _day(tmp_path, "--only", "fp8", "--minutes", "0")


def test_every_part_has_a_limit_and_all_fit_half_an_hour() -> None:
    assert len({part.name for part in PARTS}) == len(PARTS)
    assert sum(part.limit_s for part in PARTS) <= 30 * 60
