"""A worker's activities as named ranges, in a Chrome trace file for Perfetto or chrome://tracing.
On a CUDA device NVIDIA's profilers get the ranges too.

Times are of CLOCK_MONOTONIC, which all processes of a host share. So the traces of one host's
workers fit together as they are; those of several hosts don't.
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
from kvrelay.private_files import create_private

if TYPE_CHECKING:
    from engine.device.threads import Nvtx


Value = str | int | list[str]
_NOTHING = nullcontext()


class Trace(Protocol):
    """Thread safe; a range belongs to the thread that reported it."""

    def span(self, name: str, **args: Value) -> AbstractContextManager[None]:
        """A range around the code within."""

    def took(self, name: str, started_s: float, **args: Value) -> None:
        """A range from `started_s` of time.monotonic() until now."""

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
    """`process` is the worker's name; with its pid it names the file. Raises ConfigError."""
    if folder is None:
        return NO_TRACE
    path = Path(folder) / f"{process}-{os.getpid()}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return TraceFile(path, process, nvtx)
    except OSError as error:
        raise ConfigError(f"observability.trace_dir: {error}") from error


class TraceFile:
    """Written as events happen. When a process dies, its last ranges are missing, and so is the
    closing bracket, which viewers don't need."""

    def __init__(self, path: Path, process: str, nvtx: Nvtx | None = None) -> None:
        self._lock = threading.Lock()
        self._nvtx = nvtx
        self._threads: set[int] = set()
        self._file = create_private(path)
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
        """Idempotent; later ranges are dropped."""
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
