"""The thread on which a worker's model runs, one step at a time, beside the loop that decides.

While a step runs the loop goes on: it answers reservations, lends slabs, commits handoffs.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from cluster.worker.events import Crashed, Stepped
from engine.flight import Flight
from engine.layer_marks import LayerMarks
from engine.step import RunStep, StepBatch, StepDone, StepOutcome
from engine.threads import use_threads
from kvpool.copies import CopyPairs
from kvpool.handoff_events import LayersWritten


class StepEngine(Protocol):
    """What a device needs of an engine."""

    def run(self, batch: StepBatch, marks: LayerMarks | None = None) -> StepOutcome: ...

    def copy_blocks(self, pairs: CopyPairs) -> None: ...


class AheadEngine(StepEngine, Protocol):
    """Whose steps need not be over for the next one to be launched."""

    def launch(
        self, batch: StepBatch, marks: LayerMarks | None = None, before: Flight | None = None
    ) -> Flight: ...


class Device:
    """`cpu_threads` None leaves torch's own choice."""

    def __init__(
        self,
        engine: StepEngine,
        cpu_threads: int | None,
        post: Callable[[Stepped | LayersWritten | Crashed], None],
    ) -> None:
        self._engine = engine
        self._cpu_threads = cpu_threads
        self._post = post
        self._steps: queue.SimpleQueue[RunStep | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvrelay-device", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, step: RunStep) -> None:
        """The copies are made at once, in the caller's thread: the next event may free what they
        read."""
        for pairs in step.copies:
            self._engine.copy_blocks(pairs)
        self._steps.put(step)

    def close(self) -> None:
        """Returns when the running step has ended."""
        self._steps.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _marks(self, step: RunStep) -> LayerMarks | None:
        if not step.layer_marks:
            return None
        return LayerMarks(step.layer_marks, lambda layer: self._post(LayersWritten(layer)))

    def _run(self) -> None:
        if self._cpu_threads is not None:
            use_threads(self._cpu_threads)
        try:
            self._run_steps()
        except Exception as error:
            self._post(Crashed(error))

    def _run_steps(self) -> None:
        while (step := self._steps.get()) is not None:
            started_s = time.monotonic()
            outcome = self._engine.run(step.batch, self._marks(step))
            seconds = time.monotonic() - started_s
            self._post(Stepped(StepDone(outcome=outcome, seconds=seconds)))


class AheadDevice(Device):
    """Launches a step while the one before it runs; a second thread waits for the tokens."""

    def __init__(
        self,
        engine: AheadEngine,
        cpu_threads: int | None,
        post: Callable[[Stepped | LayersWritten | Crashed], None],
    ) -> None:
        super().__init__(engine, cpu_threads, post)
        self._launching = engine
        self._flights: queue.SimpleQueue[tuple[Flight, float] | None] = queue.SimpleQueue()
        self._waiter = threading.Thread(target=self._wait, name="kvrelay-tokens", daemon=True)

    def start(self) -> None:
        super().start()
        self._waiter.start()

    def close(self) -> None:
        super().close()
        if self._waiter.is_alive():
            self._waiter.join()

    def _run_steps(self) -> None:
        before = None
        try:
            while (step := self._steps.get()) is not None:
                started_s = time.monotonic()
                before = self._launching.launch(step.batch, self._marks(step), before)
                self._flights.put((before, started_s))
        finally:
            self._flights.put(None)

    def _wait(self) -> None:
        """A step's time begins when it could begin: at its launch, or when the one before ended."""
        ended_s = 0.0
        try:
            while (launched := self._flights.get()) is not None:
                flight, started_s = launched
                outcome = flight.collect()
                started_s, ended_s = max(started_s, ended_s), time.monotonic()
                seconds = ended_s - started_s
                self._post(Stepped(StepDone(outcome=outcome, seconds=seconds)))
        except Exception as error:
            self._post(Crashed(error))
