"""Workers that start at once with one cache of compiled code: each part is made once, for all."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay import Client
from tests.integration.plain_kit import (
    Process,
    RouterAddresses,
    generate,
    start_router,
    start_worker,
)
from tests.integration.ray_head import Marked, marked, until

MADE = r"(?m)(?:built the CPU's ([\w ]+) in|compile: (captured) in)"


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Marked]:
    """Nothing is compiled yet."""
    with marked(XDG_CACHE_HOME=str(tmp_path / "cache")) as environment:
        yield environment


def made(*logs: Path) -> list[str]:
    """What they have compiled or captured."""
    return ["".join(one) for log in logs for one in re.findall(MADE, log.read_text())]


def end(*processes: Process) -> None:
    for process in processes:
        process.terminate()
    assert [process.wait(30) for process in processes] == [0] * len(processes)


def workers_at(router: RouterAddresses) -> int:
    with Client(router.grpc, timeout_s=30) as client:
        return len(client.server_info().workers)


def test_two_workers_that_start_at_once_compile_each_part_once(
    fresh: Marked, tmp_path: Path
) -> None:
    logs = [tmp_path / f"{name}.log" for name in "abc"]
    router, at = start_router(fresh, tmp_path / "r.log")
    workers = [start_worker(fresh, [at], "both", log) for log in logs[:2]]
    until(lambda: workers_at(at) == 2)
    once = made(*logs[:2])
    assert "captured" in once
    assert len(once) == len(set(once)) > 1, once
    tokens = generate(at)
    end(*workers)
    later = start_worker(fresh, [at], "both", logs[2])
    until(lambda: workers_at(at) == 1)
    assert generate(at) == tokens
    assert made(logs[2]) == []
    end(later, router)
