"""What `make test` does with tests that fail: a second run for those that start processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
FAILS_ONCE = """
from pathlib import Path
import pytest

@pytest.mark.processes
def test_starved(): fail_once(Path("starved"))

@pytest.mark.{mark}
def test_other(): fail_once(Path("other"), {other})

@pytest.mark.long
def test_long(): pass

def fail_once(path, fails=True):
    first = not path.exists()
    path.touch()
    assert not (fails and first)
"""
FORGETS = "from pathlib import Path; Path('starved').unlink(missing_ok=True)"
CONFIG = """
[pytest]
markers =
  processes: starts processes
  pure: starts none
  long: takes long
  gpu: needs one
"""


def run(folder: Path, *options: str, mark: str = "pure", other: bool = False) -> tuple[int, str]:
    (folder / "test_it.py").write_text(FAILS_ONCE.format(mark=mark, other=other))
    (folder / "pytest.ini").write_text(CONFIG)
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "tests.run", "-q", *options]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout


def test_one_that_starts_processes_is_run_once_more_and_told_of(tmp_path: Path) -> None:
    code, said = run(tmp_path, "--numprocesses=2")
    assert code == 0, said
    *_, needed, log, summed = said.splitlines()
    assert needed == "needed a second run: test_it.py::test_starved"
    assert log == "the log of the first failures is build/test.log"
    assert summed.startswith("test: 1 failed, 1 passed in ")
    assert "assert not" in (tmp_path / "build" / "test.log").read_text()


def test_a_pure_test_gets_no_second_run(tmp_path: Path) -> None:
    code, said = run(tmp_path, other=True)
    assert code == 1
    assert "needed a second run: test_it.py::test_starved" in said
    assert "failed: test_it.py::test_other" in said


def test_what_fails_again_has_failed(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(FORGETS)
    code, said = run(tmp_path)
    assert code == 1
    assert "failed: test_it.py::test_starved" in said
    assert "needed a second run" not in said


def test_the_long_suites_end_with_one_line(tmp_path: Path) -> None:
    code, said = run(tmp_path, "--long")
    assert code == 0
    assert said.splitlines()[-1].startswith("test-long: 1 passed")


BREAKS_ONCE = """
from pathlib import Path

def pytest_runtest_logfinish(nodeid):
    if "starved" in nodeid and not Path("broke").exists():
        Path("broke").touch()
        raise ValueError("the run itself")
"""


@pytest.mark.parametrize("processes", ["0", "2"])
def test_a_run_that_breaks_goes_on_and_is_told_of(tmp_path: Path, processes: str) -> None:
    (tmp_path / "conftest.py").write_text(BREAKS_ONCE)
    code, said = run(tmp_path, f"--numprocesses={processes}", other=True)
    assert code == 1, said
    assert "failed: test_it.py::test_other" in said, "which the first run had not begun, or had"
    assert any(
        line.startswith("pytest broke: ") and line.endswith("ValueError: the run itself")
        for line in said.splitlines()
    )


def test_a_run_that_broke_behind_its_last_test_has_passed(tmp_path: Path) -> None:
    (tmp_path / "starved").touch()
    (tmp_path / "conftest.py").write_text(BREAKS_ONCE)
    code, said = run(tmp_path, "-k", "starved")
    assert code == 0, said
