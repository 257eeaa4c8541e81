"""The thread on which a worker's model runs, one step at a time, beside the loop that decides.

While a step runs the loop goes on: it answers reservations, lends slabs, commits handoffs.

An engine whose steps show in a trace; in place of the engine only while one is written.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from cluster.process.trace import Trace, Value
from cluster.worker.events import Crashed
from engine.core.step import RunStep, StepBatch, StepDone, StepOutcome
from engine.device.clock import CudaStream
from engine.device.layer_marks import LayerMarks
from engine.device.threads import use_threads
from engine.flight import Launched
from kvpool.core.blocks.holding import CopyPairs
from kvpool.core.transfer.commands import LayersWritten


class StepEngine(Protocol):
    """What a device needs of an engine."""

    def run(self, batch: StepBatch, marks: LayerMarks | None = None) -> StepOutcome: ...

    def copy_blocks(self, pairs: CopyPairs) -> None: ...


class AheadEngine(StepEngine, Protocol):
    """Whose steps need not be over for the next one to be launched."""

    def launch(
        self, batch: StepBatch, marks: LayerMarks | None = None, before: Launched | None = None
    ) -> Launched: ...


class StepWatcher(Protocol):
    """Knows each step from its submission to its end."""

    def launched(self, step: RunStep) -> None: ...

    def ended(self) -> None: ...


class WorkerDevice:
    """`cpu_threads` None leaves torch's own choice."""

    def __init__(
        self,
        engine: StepEngine,
        cpu_threads: int | None,
        post: Callable[[StepDone | LayersWritten | Crashed], None],
        *watchers: StepWatcher,
    ) -> None:
        self._engine = engine
        self._cpu_threads = cpu_threads
        self._post = post
        self._watchers = watchers
        self._steps: queue.SimpleQueue[RunStep | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvrelay-device", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, step: RunStep) -> None:
        """The copies are made at once, in the caller's thread: the next event may free what they
        read."""
        for watcher in self._watchers:
            watcher.launched(step)
        for pairs in step.copies:
            self._engine.copy_blocks(pairs)
        self._steps.put(step)

    def close(self) -> None:
        """Returns when the running step has ended."""
        self._steps.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _ended(self) -> None:
        for watcher in self._watchers:
            watcher.ended()

    def _marks(self, step: RunStep) -> LayerMarks | None:
        if not step.layer_marks:
            return None
        number = step.number
        return LayerMarks(step.layer_marks, lambda layer: self._post(LayersWritten(layer, number)))

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
            self._ended()
            self._post(StepDone(outcome=outcome, seconds=seconds))


class AheadDevice(WorkerDevice):
    """Launches a step while the one before it runs; a second thread waits for the tokens. It may
    compute, too, and has as many of torch's threads as the first one."""

    def __init__(
        self,
        engine: AheadEngine,
        cpu_threads: int | None,
        post: Callable[[StepDone | LayersWritten | Crashed], None],
        *watchers: StepWatcher,
    ) -> None:
        super().__init__(engine, cpu_threads, post, *watchers)
        self._launching = engine
        self._flights: queue.SimpleQueue[tuple[Launched, float] | None] = queue.SimpleQueue()
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
        if self._cpu_threads is not None:
            use_threads(self._cpu_threads)
        ended_s = 0.0
        try:
            while (launched := self._flights.get()) is not None:
                flight, started_s = launched
                outcome = flight.collect()
                started_s, ended_s = max(started_s, ended_s), time.monotonic()
                seconds = ended_s - started_s
                self._ended()
                self._post(StepDone(outcome=outcome, seconds=seconds))
        except Exception as error:
            self._post(Crashed(error))


class TracedEngine:
    """A step is a "prefill chunk" as soon as it computes any prompt, else a "decode step". Within a
    chunk each layer group is a range that ends when its KV is written. On a CUDA device a step is
    a range of its `stream` too, which begins when the device has done the one before."""

    def __init__(self, engine: AheadEngine, trace: Trace, stream: CudaStream | None = None) -> None:
        self._engine = engine
        self._trace = trace
        self._stream = stream

    def run(self, batch: StepBatch, marks: LayerMarks | None = None) -> StepOutcome:
        name, facts = _facts(batch)
        with self._trace.span(name, **facts):
            groups = None if marks is None else _Groups(self._trace, marks)
            told = None if groups is None else groups.marks
            with self._trace.on_device(name, self._stream, **facts):
                flight = self._engine.launch(batch, told)
            outcome = flight.collect()
            if groups is not None:
                groups.end("the last layer")
            return outcome

    def launch(
        self, batch: StepBatch, marks: LayerMarks | None = None, before: Launched | None = None
    ) -> Launched:
        """Its range of the host ends when it is collected; layers are told as they come."""
        name, facts = _facts(batch)
        started_s = time.monotonic()
        with self._trace.on_device(name, self._stream, **facts):
            flight = self._engine.launch(batch, marks, before)

        def finish(ended: Any) -> StepOutcome:
            outcome = flight.finish(ended)
            self._trace.took(name, started_s, **facts)
            return outcome

        return replace(flight, finish=finish)

    def copy_blocks(self, pairs: CopyPairs) -> None:
        self._engine.copy_blocks(pairs)


class _Groups:
    """Of one step; each begins where the one before it ended."""

    def __init__(self, trace: Trace, marks: LayerMarks) -> None:
        self._trace = trace
        self._tell = marks.tell
        self._started_s = time.monotonic()
        self.marks = LayerMarks(marks.layers, self._told)

    def _told(self, layer: int) -> None:
        self.end(f"layer {layer}")
        self._tell(layer)

    def end(self, where: str) -> None:
        self._trace.took(f"layer group up to {where}", self._started_s)
        self._started_s = time.monotonic()


def _facts(batch: StepBatch) -> tuple[str, dict[str, Value]]:
    """The range's name, and what it says. `requests` are those whose prompt is computed, or in a
    decode step all."""
    prompts = [s for s in batch.slices if s.start < s.prompt_tokens]
    shown = prompts or batch.slices
    return "prefill chunk" if prompts else "decode step", {
        "requests": [s.key.request_id for s in shown],
        "tokens": batch.tokens,
        "from": min(s.start for s in shown),
        "sequences": len(batch.slices),
    }
