"""A pytest plugin that writes down which functions of the product each test file runs, and that
keeps a mutated loop from taking all memory of the machine.

It is copied beside the tree under test, which may be an old one: it imports nothing of ours.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

import pytest

RESULT = "MUTATIONS_SEEN"
"""Environment variable: the file to write."""
MOST_CPU_S = "MUTATIONS_MOST_CPU_S"
"""Environment variable: seconds of CPU time after which the process is ended."""
MOST_TEST_CPU_S = "MUTATIONS_MOST_TEST_CPU_S"
"""Environment variable: seconds of CPU time after which a test fails."""
MOST_BYTES = 8 * 2**30


class Seen:
    def __init__(self, root: Path, result: Path) -> None:
        self._root = root
        self._result = result
        self._codes: defaultdict[str, set[CodeType]] = defaultdict(set)  # test file |-> run
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._failed: list[str] = []

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        file = item.nodeid.split("::")[0]
        add = self._codes[file].add

        def entered(frame: FrameType, event: str, argument: object) -> None:
            add(frame.f_code)

        began_s = time.perf_counter()
        threading.settrace(entered)
        sys.settrace(entered)
        yield
        sys.settrace(None)
        threading.settrace(None)
        self._seconds[file] += time.perf_counter() - began_s

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        files = {
            file: {"seconds": self._seconds[file], "functions": sorted(self._functions(codes))}
            for file, codes in self._codes.items()
        }
        self._result.write_text(json.dumps({"files": files, "failed": self._failed}))

    def _functions(self, codes: set[CodeType]) -> Iterator[str]:
        for code in codes:
            path = Path(code.co_filename)
            if path.is_relative_to(self._root):
                yield f"{path.relative_to(self._root)}::{code.co_qualname}"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    signal.setitimer(signal.ITIMER_PROF, float(os.environ.get(MOST_TEST_CPU_S, 0)))
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)


def _hangs(number: int, frame: FrameType | None) -> None:
    pytest.fail("it hangs")


def pytest_configure(config: pytest.Config) -> None:
    signal.signal(signal.SIGPROF, _hangs)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, hard))
    if most_s := os.environ.get(MOST_CPU_S):
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (int(float(most_s)), hard))
    if result := os.environ.get(RESULT):
        config.pluginmanager.register(Seen(config.rootpath, Path(result)))
