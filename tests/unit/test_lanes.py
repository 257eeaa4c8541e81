"""Lanes: order in each, none waits for another, bounded, and gone when idle."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Callable

import pytest

from cluster.worker import lanes
from cluster.worker.lanes import Lanes
from tests.contract.transport_kit import until


def no_crash(error: BaseException) -> None:
    raise AssertionError from error


def alive(name: str) -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith(name)]


def test_each_lane_keeps_its_order() -> None:
    done: dict[str, list[int]] = defaultdict(list)
    rng = random.Random(1)
    jobs = [(rng.choice("abc"), i) for i in range(500)]
    worked = Lanes[tuple[str, int]]("order", lambda job: done[job[0]].append(job[1]), no_crash)
    for lane, i in jobs:
        assert worked.put(lane, (lane, i))
    until(lambda: sum(map(len, done.values())) == len(jobs))
    worked.close()
    assert done == {name: [i for lane, i in jobs if lane == name] for name in "abc"}


class Gate:
    """Jobs of lane `a` hang until it opens."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.begun = threading.Event()
        self.done: list[str] = []

    def work(self, job: str) -> None:
        if job.startswith("a"):
            self.begun.set()
            self.opened.wait()
        self.done.append(job)


def test_a_lane_that_hangs_holds_up_no_other_and_takes_only_so_many() -> None:
    gate = Gate()
    worked = Lanes[str]("hang", gate.work, no_crash, most=3)
    assert worked.put("a", "a0")
    assert gate.begun.wait(20)
    assert [worked.put("a", f"a{i}") for i in range(1, 6)] == [True, True, True, False, False]
    assert worked.put("b", "b0")
    until(lambda: gate.done == ["b0"])
    worked.clear("a")
    assert worked.put("a", "a9")
    gate.opened.set()
    until(lambda: gate.done == ["b0", "a0", "a9"])
    worked.close()
    assert not alive("hang")


def test_close_drops_what_waits_and_leaves_what_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "FAREWELL_S", 0.05)
    gate = Gate()
    worked = Lanes[str]("closing", gate.work, no_crash)
    for job in ("a0", "a1"):
        worked.put("a", job)
    assert gate.begun.wait(20)
    worked.close()
    worked.put("a", "a2")
    gate.opened.set()
    until(lambda: not alive("closing"))
    assert gate.done == ["a0"]


def test_an_idle_thread_ends_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "LINGER_S", 0.01)
    done: list[int] = []
    worked = Lanes[int]("idle", done.append, no_crash)
    for i in range(3):
        worked.put("a", i)
        until(lambda: not alive("idle"))
    assert done == [0, 1, 2] and not worked._lanes
    worked.close()


def test_no_job_is_lost_while_threads_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "LINGER_S", 0.0)
    done: list[int] = []
    worked = Lanes[int]("churn", done.append, no_crash)
    for i in range(2000):
        worked.put("a", i)
    until(lambda: len(done) == 2000)
    assert done == sorted(done)
    worked.close()


def test_a_bug_is_told() -> None:
    told: list[BaseException] = []
    worked: Lanes[Callable[[], None]] = Lanes("bug", lambda job: job(), told.append)
    worked.put("a", lambda: (_ for _ in ()).throw(ZeroDivisionError()))  # type: ignore[arg-type]
    until(lambda: bool(told))
    worked.close()
