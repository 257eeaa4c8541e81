"""Reports, while a step runs, which layers have written their KV. Runs in the worker.

On a CPU the device thread reports it. A GPU runs behind that thread, so an event is recorded after
the writes, and a thread of ours waits for it.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LayerMarks:
    """`tell` is called with each of `layers` once its KV is written."""

    layers: frozenset[int]
    tell: Callable[[int], None]

    def wrote(self, layer: int) -> None:
        if layer in self.layers:
            self.tell(layer)


class LayerLag:
    """Reports a layer to `marks` when the next one is written, and the last one at the end."""

    def __init__(self, marks: LayerMarks) -> None:
        self._marks = marks
        self._written: int | None = None

    def before(self, layers: Iterable[int]) -> LayerMarks:
        """Marks to report at once, for all of the model's `layers`."""
        return LayerMarks(frozenset(layers), self._next)

    def end(self) -> None:
        if self._written is not None:
            self._marks.wrote(self._written)

    def _next(self, layer: int) -> None:
        self.end()
        self._written = layer


def after_stages(marks: LayerMarks, own: LayerMarks, first: int) -> LayerMarks:
    """Marks of a later stage, whose `first` layer reports to `own` as its others do. Once that one
    is written, earlier stages have written all of theirs: their hidden states have come."""
    earlier = max((layer for layer in marks.layers if layer < first), default=None)

    def wrote(layer: int) -> None:
        if layer == first and earlier is not None:
            marks.tell(earlier)
        own.wrote(layer)

    return LayerMarks(own.layers, wrote)


class LayerWatch:
    """Reports a GPU's layers, in order, from its own thread. The first marks start the thread and
    `close` ends it."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[tuple[torch.cuda.Event, Callable[[], None]] | None]
        self._events = queue.SimpleQueue()
        self._unreported: deque[torch.cuda.Event] = deque()
        self._reported = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def behind(self, marks: LayerMarks) -> LayerMarks:
        """Marks for the thread that launches kernels: reported once the GPU has reached them."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvrelay-layers", daemon=True)
            self._thread.start()
        return LayerMarks(marks.layers, lambda layer: self._record(marks, layer))

    def drain(self) -> None:
        """Returns when all marks that the GPU has reached are reported: those of a step that has
        ended, and not those of the step launched behind it. Raises an error that a `tell` has
        raised since."""
        with self._reported:
            self._reported.wait_for(self._is_up_to_date)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _is_up_to_date(self) -> bool:
        return not self._unreported or not self._unreported[0].query()

    def close(self) -> None:
        """Returns when the thread has ended."""
        if self._thread is not None:
            self._events.put(None)
            self._thread.join()
            self._thread = None

    def _record(self, marks: LayerMarks, layer: int) -> None:
        event = torch.cuda.Event(blocking=True)
        event.record()
        self._unreported.append(event)
        self._events.put((event, lambda: marks.tell(layer)))

    def _run(self) -> None:
        while (marked := self._events.get()) is not None:
            event, tell = marked
            try:
                event.synchronize()
                tell()
            except Exception as error:
                self._error = self._error or error
            finally:
                with self._reported:
                    self._unreported.popleft()
                    self._reported.notify_all()
