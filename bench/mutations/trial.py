"""A copy of a tree, the map from its functions to its test files, and trials of mutations in it."""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from bench.mutations import seen

TESTS = ("tests/unit", "tests/sim")
PLUGINS = ("-p", "no:cacheprovider", "-p", "mutations_seen")
LEFT_OUT = ("test_trace_request.py",)
"""It counts calls, so that it would notice every mutation, also one without effect."""
MARKED = "not gpu and not families and not ray and not long and not processes"
HANGS_AFTER_S = 20.0, 60.0
"""A test that takes more CPU time hangs: the least and the most, between them as long as its files
took when the map was made."""
WAITS = 6
"""A test, and a trial, may take this many times its CPU time, on a busy machine."""
PASSED, NOT_RUN = 0, (4, 5)
"""Exit codes of pytest."""


class Fate(StrEnum):
    KILLED = "killed"
    SURVIVED = "survived"
    CUT = "cut"  # no test had failed when the time was over
    UNTESTED = "untested"  # no test runs the function


class TreeCopy:
    """Tracked files of a tree, and those that git does not ignore. Bytecode is never written for
    the mutated module: its time stamp has whole seconds."""

    def __init__(self, tree: Path, folder: Path) -> None:
        self.root = folder / "tree"
        self._plugins = folder / "plugins"
        self._plugins.mkdir(parents=True)
        shutil.copy(seen.__file__, self._plugins / "mutations_seen.py")
        for name in _files(tree):
            if (tree / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(tree / name, self.root / name)

    def modules(self, paths: Iterable[str]) -> list[str]:
        """Of modules and folders, relative to the tree."""
        found = (self.root / path for path in paths)
        files = (one.rglob("*.py") if one.is_dir() else (one,) for one in found)
        return sorted({str(one.relative_to(self.root)) for group in files for one in group})

    def source(self, path: str) -> bytes:
        return (self.root / path).read_bytes()

    def write(self, path: str, source: bytes) -> None:
        file = self.root / path
        file.write_bytes(source)
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
            compiled.unlink()

    def pytest(
        self, options: Sequence[str], variables: dict[str, str], most_s: float | None = None
    ) -> int | None:
        """Its exit code; None: it used `most_s` of CPU time, or waited for much longer, and is gone
        with all that it started."""
        places = (self.root, self.root / "proto", self._plugins)
        environment = os.environ | variables | {"PYTHONPATH": os.pathsep.join(map(str, places))}
        command = [sys.executable, "-m", "pytest", "-q", *PLUGINS, *options]
        with (self.root.parent / "pytest.log").open("wb") as log:
            process = subprocess.Popen(
                [*command, "-m", MARKED],
                cwd=self.root,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(None if most_s is None else WAITS * most_s)
                return None if code == -signal.SIGXCPU else code
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return None


def _files(tree: Path) -> list[str]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    told = subprocess.run(command, cwd=tree, capture_output=True, check=True, text=True)
    return [name for name in told.stdout.split("\0") if name]


@dataclass(frozen=True, slots=True, kw_only=True)
class TestMap:
    """Which test files run which functions, and how long each took while that was found out."""

    __test__ = False
    seconds: dict[str, float]  # test file |-> seconds
    files_of: dict[str, frozenset[str]]  # path::function, or path |-> test files
    failed: tuple[str, ...] = ()  # tests that fail without any mutation

    @staticmethod
    def load(path: Path) -> TestMap:
        found = json.loads(path.read_text())
        files_of: defaultdict[str, set[str]] = defaultdict(set)
        for file, told in found["files"].items():
            for function in told["functions"]:
                files_of[function].add(file)
                files_of[function.split("::")[0]].add(file)
        return TestMap(
            seconds={file: told["seconds"] for file, told in found["files"].items()},
            files_of={name: frozenset(files) for name, files in files_of.items()},
            failed=tuple(found["failed"]),
        )

    def files(self, path: str, function: str) -> list[str]:
        """Those that take least first. What stands outside of functions is run by all who use the
        module."""
        name = f"{path}::{function}" if function else path
        return sorted(self.files_of.get(name, ()), key=lambda file: self.seconds[file])


def find_tests(
    copy: TreeCopy, modules: Sequence[str], folders: Sequence[str], result: Path
) -> None:
    """Runs all tests that import a module once, and writes down which functions they run."""
    files = [*_importing(copy, {module_name(path) for path in modules}, folders)]
    copy.pytest(files, {seen.RESULT: str(result)})
    assert result.exists(), (copy.root.parent / "pytest.log").read_text()[-3000:]


def _importing(copy: TreeCopy, names: set[str], folders: Sequence[str]) -> Iterator[str]:
    """Test files that import one of these modules, themselves or through other test files."""
    for path in copy.modules(folders):
        file = Path(path)
        is_test = file.name.startswith("test_") and file.name not in LEFT_OUT
        if is_test and names & _imports(copy, path, set()):
            yield path


def _imports(copy: TreeCopy, path: str, known: set[str]) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(copy.source(path))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    kits = {name.replace(".", "/") + ".py" for name in found if name.startswith("tests.")} - known
    known |= kits
    for kit in kits:
        if (copy.root / kit).is_file():
            found |= _imports(copy, kit, known)
    return found


def module_name(path: str) -> str:
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return name.removeprefix("proto.")


@dataclass(frozen=True, slots=True, kw_only=True)
class MutationTrial:
    """One mutation, and what became of it. `test`: what noticed it."""

    path: str
    line: int
    function: str
    kind: str
    before: str
    after: str
    fate: Fate
    test: str = ""
    files: int = 0


@dataclass(slots=True)
class TrialBench:
    """Tries one mutation after the other in a copy."""

    copy: TreeCopy
    tests: TestMap
    most_s: float
    _deselected: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._deselected = [f"--deselect={test}" for test in self.tests.failed]

    def fate_of(self, path: str, function: str, source: bytes) -> tuple[Fate, str, int]:
        """With the test that failed, and how many test files run the function. The module is as
        before when this returns."""
        files = self.tests.files(path, function)
        if not files:
            return Fate.UNTESTED, "", 0
        before = self.copy.source(path)
        self.copy.write(path, source)
        try:
            test_s = self._limit_s(files)
            options = ["-x", f"--timeout={WAITS * test_s}", *self._deselected, *files]
            limits = {seen.MOST_CPU_S: str(self.most_s), seen.MOST_TEST_CPU_S: str(test_s)}
            variables = {"PYTHONDONTWRITEBYTECODE": "1", **limits}
            code = self.copy.pytest(options, variables, self.most_s)
        finally:
            self.copy.write(path, before)
        assert code not in NOT_RUN, f"pytest ends with {code}: {files}"
        if code is None:
            return Fate.CUT, "", len(files)
        if code == PASSED:
            return Fate.SURVIVED, "", len(files)
        return Fate.KILLED, self._failed_test(code), len(files)

    def _limit_s(self, files: Sequence[str]) -> float:
        least_s, most_s = HANGS_AFTER_S
        return min(most_s, max(least_s, *(self.tests.seconds[file] for file in files)))

    def _failed_test(self, code: int) -> str:
        log = (self.copy.root.parent / "pytest.log").read_text(errors="replace")
        told = [line for line in log.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        return told[0].split(" - ")[0] if told else f"exit code {code}"
