"""The device's two threads: one launches, the other waits for tokens. No model is run."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from cluster.core.worker.watchdog import StepWatch
from cluster.worker.device import AheadDevice
from cluster.worker.events import Crashed
from engine.core.step import RunStep, StepBatch, StepDone, StepOutcome
from engine.core.step_times import LinearTimes
from engine.device.layer_marks import LayerMarks
from engine.flight import Flight
from kvpool.core.blocks.holding import CopyPairs
from kvpool.core.transfer.commands import LayersWritten

PATIENCE_S = 20.0
STEP = RunStep(batch=StepBatch(slices=()))


class Gpu:
    """Steps end when the test says so."""

    def __init__(self) -> None:
        self.launches: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()
        self.may_end = threading.Semaphore(0)
        self.fails = False
        self.writes: int | None = None  # a layer that each step writes at once

    def launch(
        self, batch: StepBatch, marks: LayerMarks | None = None, before: Flight | None = None
    ) -> Flight:
        self.launches.put(before)
        if self.fails:
            raise RuntimeError("no more")
        if marks is not None and self.writes is not None:
            marks.wrote(self.writes)
        return Flight(batch, None, None, self.wait, self.finish)  # type: ignore[arg-type]

    def wait(self) -> None:
        assert self.may_end.acquire(timeout=PATIENCE_S)

    def finish(self, flight: Flight) -> StepOutcome:
        return StepOutcome(sampled=())

    def run(self, batch: StepBatch, marks: LayerMarks | None = None) -> StepOutcome:
        raise AssertionError("it launches")

    def copy_blocks(self, pairs: CopyPairs) -> None: ...


Posts = queue.SimpleQueue[StepDone | LayersWritten | Crashed]


@contextmanager
def running(gpu: Gpu, cpu_threads: int | None = None) -> Iterator[tuple[AheadDevice, Posts]]:
    posts: Posts = queue.SimpleQueue()
    device = AheadDevice(gpu, cpu_threads, posts.put, StepWatch(LinearTimes(), 0.0))
    device.start()
    try:
        yield device, posts
    finally:
        for _ in range(9):
            gpu.may_end.release()
        device.close()
    assert not any(t.name.startswith("kvrelay-") for t in threading.enumerate())


def test_a_step_is_launched_while_the_one_before_runs() -> None:
    gpu = Gpu()
    with running(gpu) as (device, posts):
        device.submit(STEP)
        device.submit(STEP)
        assert gpu.launches.get(timeout=PATIENCE_S) is None
        assert isinstance(gpu.launches.get(timeout=PATIENCE_S), Flight)
        assert posts.empty(), "neither has ended"
        gpu.may_end.release()
        assert isinstance(posts.get(timeout=PATIENCE_S), StepDone)
        assert posts.empty()
        gpu.may_end.release()
        assert isinstance(posts.get(timeout=PATIENCE_S), StepDone)


def test_marks_say_which_step_they_are_of() -> None:
    """Those of the second step may come before the end of the first one is told."""
    gpu = Gpu()
    gpu.writes = 0
    with running(gpu) as (device, posts):
        for number in (4, 5):
            device.submit(replace(STEP, layer_marks=frozenset({0}), number=number))
        found = [posts.get(timeout=PATIENCE_S) for _ in range(2)]
        assert found == [LayersWritten(0, 4), LayersWritten(0, 5)]


def test_both_threads_compute_with_as_many_of_torch_s_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: dict[str, int] = {}

    def use_threads(count: int) -> None:
        told[threading.current_thread().name] = count

    monkeypatch.setattr("cluster.worker.device.use_threads", use_threads)
    gpu = Gpu()
    with running(gpu, cpu_threads=3) as (device, posts):
        device.submit(STEP)
        gpu.may_end.release()
        assert isinstance(posts.get(timeout=PATIENCE_S), StepDone)
        assert told == {"kvrelay-device": 3, "kvrelay-tokens": 3}


def test_a_failed_launch_is_told() -> None:
    gpu = Gpu()
    gpu.fails = True
    with running(gpu) as (device, posts):
        device.submit(STEP)
        crashed = posts.get(timeout=PATIENCE_S)
        assert isinstance(crashed, Crashed) and str(crashed.error) == "no more"


def test_tokens_that_never_come_are_told() -> None:
    gpu = Gpu()
    gpu.finish = None  # type: ignore[method-assign, assignment]
    with running(gpu) as (device, posts):
        device.submit(STEP)
        gpu.may_end.release()
        assert isinstance(posts.get(timeout=PATIENCE_S), Crashed)
