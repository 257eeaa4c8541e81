"""Writes down which tests ended, which failed, and which of those start processes. A plugin of
`tests.run`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

FOLDERS = ("tests/integration/", "tests/contract/")
"""All tests there start processes, or talk to some."""


def starts_processes(nodeid: str, keywords: object) -> bool:
    """A test whose own process died has left no keywords."""
    marked = isinstance(keywords, dict) and "processes" in keywords
    return marked or nodeid.startswith(FOLDERS)


class Failures:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed: dict[str, bool] = {}  # test |-> whether it starts processes
        self._ended: list[str] = []
        self._broken: list[str] = []

    def pytest_internalerror(self, excrepr: object) -> None:
        """Of this process, or of one of its workers: then the run may go on without it."""
        self._broken += str(excrepr).splitlines()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed[report.nodeid] = starts_processes(report.nodeid, report.keywords)
        if report.when == "teardown":
            self._ended.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._failed[report.nodeid] = False

    def pytest_sessionfinish(self) -> None:
        written = {"failed": self._failed, "ended": self._ended, "broken": self._broken}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(written))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--failures", type=Path, help="where to write which tests ended and failed")
    parser.addoption("--leave-out", type=Path, help="tests to leave out: what --failures wrote")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--failures")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failures(path))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    path = config.getoption("--leave-out")
    if path is not None:
        known = json.loads(path.read_text())
        out = {*known["ended"], *known["failed"]}
        items[:] = [item for item in items if item.nodeid not in out]
