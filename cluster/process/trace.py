"""What a worker does when, as named ranges: a Chrome trace file for each worker, which Perfetto and
chrome://tracing show. On a CUDA device NVIDIA's profilers are told of the ranges too.

Times are of CLOCK_MONOTONIC, which the processes of one host share: traces of its workers fit
together as they are, those of several hosts don't.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kvrelay.errors import ConfigError

if TYPE_CHECKING:
    from engine.device.threads import Nvtx


Value = str | int | list[str]
_NOTHING = nullcontext()


class Trace(Protocol):
    """Thread safe; a range belongs to the thread that it was told by."""

    def span(self, name: str, **args: Value) -> AbstractContextManager[None]:
        """What is done within."""

    def took(self, name: str, started_s: float, **args: Value) -> None:
        """From `started_s` of time.monotonic() until now."""

    def close(self) -> None: ...


class NoTrace:
    def span(self, name: str, **args: Value) -> AbstractContextManager[None]:
        return _NOTHING

    def took(self, name: str, started_s: float, **args: Value) -> None:
        pass

    def close(self) -> None:
        pass


NO_TRACE = NoTrace()


def open_trace(folder: str | None, process: str, nvtx: Nvtx | None) -> Trace:
    """`process` is the worker's name, and that of its file with its pid. Raises ConfigError."""
    if folder is None:
        return NO_TRACE
    path = Path(folder) / f"{process}-{os.getpid()}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return TraceFile(path, process, nvtx)
    except OSError as error:
        raise ConfigError(f"observability.trace_dir: {error}") from error


class TraceFile:
    """Written as it happens: of a process that died its last ranges are missing, and the closing
    bracket, which viewers do without."""

    def __init__(self, path: Path, process: str, nvtx: Nvtx | None = None) -> None:
        self._lock = threading.Lock()
        self._nvtx = nvtx
        self._threads: set[int] = set()
        self._file = path.open("w")
        self._file.write("[")
        self._write(_metadata("process_name", process, 0))

    @contextmanager
    def span(self, name: str, **args: Value) -> Iterator[None]:
        started_s = time.monotonic()
        if self._nvtx is not None:
            self._nvtx.range_push(name)
        try:
            yield
        finally:
            if self._nvtx is not None:
                self._nvtx.range_pop()
            self._record(name, started_s, args)

    def took(self, name: str, started_s: float, **args: Value) -> None:
        if self._nvtx is not None:
            self._nvtx.mark(name)
        self._record(name, started_s, args)

    def close(self) -> None:
        """Idempotent; what is told later goes nowhere."""
        with self._lock:
            if not self._file.closed:
                self._file.write("]\n")
                self._file.close()

    def _record(self, name: str, started_s: float, args: dict[str, Value]) -> None:
        ended_s, thread = time.monotonic(), threading.get_native_id()
        times = {"ts": 1e6 * started_s, "dur": 1e6 * (ended_s - started_s)}
        event = {"name": name, "ph": "X", "pid": os.getpid(), "tid": thread, **times, "args": args}
        with self._lock:
            if self._file.closed:
                return
            if thread not in self._threads:
                self._threads.add(thread)
                name = threading.current_thread().name
                self._write(_metadata("thread_name", name, thread))
            self._write(event)

    def _write(self, event: dict[str, object]) -> None:
        separator = "\n" if event["name"] == "process_name" else ",\n"
        self._file.write(separator + json.dumps(event))


def _metadata(what: str, name: str, thread: int) -> dict[str, object]:
    return {"name": what, "ph": "M", "pid": os.getpid(), "tid": thread, "args": {"name": name}}
