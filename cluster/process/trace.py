"""A worker's activities as named ranges, in a Chrome trace file for Perfetto or chrome://tracing.
On a CUDA device NVIDIA's profilers get the ranges too.

Times are of CLOCK_MONOTONIC, which all processes of a host share. So the traces of one host's
workers fit together as they are; those of several hosts don't.

What is queued on a CUDA device has ranges of the device's own, between two events on its stream,
beside the host's, which end where it is queued. They are of the category "device", and each thread
that queues has a track of its own for them. `within_us` says how far their times may be off.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kvrelay.errors import ConfigError
from kvrelay.private_files import create_private

if TYPE_CHECKING:
    from engine.device.clock import CudaStream, DeviceClock, DeviceWork
    from engine.device.threads import Nvtx


Value = str | int | list[str]
DEVICE = "device"
_NOTHING = nullcontext()
_DEVICE_TRACKS = 1 << 22
"""Linux gives threads smaller numbers."""


class Trace(Protocol):
    """Thread safe; a range belongs to the thread that reported it."""

    def span(self, name: str, **args: Value) -> AbstractContextManager[None]:
        """A range around the code within."""

    def took(self, name: str, started_s: float, **args: Value) -> None:
        """A range from `started_s` of time.monotonic() until now."""

    def on_device(
        self, name: str, stream: CudaStream | None = None, **args: Value
    ) -> AbstractContextManager[None]:
        """A range of the device: what the code within queues on `stream`; None: on the thread's
        current one. Nothing on a CPU."""

    def queued(self, name: str, **args: Value) -> AbstractContextManager[None]:
        """`span` and, on the thread's current stream, `on_device`."""

    def close(self) -> None: ...


class NoTrace:
    def span(self, name: str, **args: Value) -> AbstractContextManager[None]:
        return _NOTHING

    def took(self, name: str, started_s: float, **args: Value) -> None:
        pass

    def on_device(
        self, name: str, stream: CudaStream | None = None, **args: Value
    ) -> AbstractContextManager[None]:
        return _NOTHING

    def queued(self, name: str, **args: Value) -> AbstractContextManager[None]:
        return _NOTHING

    def close(self) -> None:
        pass


NO_TRACE = NoTrace()


def open_trace(
    folder: str | None, process: str, nvtx: Nvtx | None, clock: DeviceClock | None
) -> Trace:
    """`process` is the worker's name; with its pid it names the file. `nvtx` and `clock` None: no
    CUDA device. Raises ConfigError."""
    if folder is None:
        return NO_TRACE
    path = Path(folder) / f"{process}-{os.getpid()}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return TraceFile(path, process, nvtx, clock)
    except OSError as error:
        raise ConfigError(f"observability.trace_dir: {error}") from error


@dataclass(frozen=True, slots=True)
class _Track:
    number: int
    name: str

    @staticmethod
    def of_thread() -> _Track:
        return _Track(threading.get_native_id(), threading.current_thread().name)

    @staticmethod
    def of_its_device() -> _Track:
        thread = _Track.of_thread()
        return _Track(_DEVICE_TRACKS + thread.number, f"{DEVICE}: {thread.name}")


@dataclass(frozen=True, slots=True)
class _Queued:
    """A range of the device that is written once its work is done."""

    name: str
    args: dict[str, Value]
    track: _Track
    work: DeviceWork


class TraceFile:
    """Written as events happen; a device's ranges with the next one of them that begins or ends.
    When a process dies, its last ranges are missing, and so is the closing bracket, which viewers
    don't need."""

    def __init__(
        self,
        path: Path,
        process: str,
        nvtx: Nvtx | None = None,
        clock: DeviceClock | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self._nvtx = nvtx
        self._clock = clock
        self._tracks: set[_Track] = set()
        self._queued: list[_Queued] = []  # of each track in its order
        self._ended_s: dict[_Track, float] = {}  # a device's track |-> where its last range ends
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

    @contextmanager
    def on_device(
        self, name: str, stream: CudaStream | None = None, **args: Value
    ) -> Iterator[None]:
        if self._clock is None:
            yield
            return
        work = self._clock.begin(stream)
        try:
            yield
        finally:
            work.end()
            with self._lock:
                self._queued.append(_Queued(name, args, _Track.of_its_device(), work))
                self._write_done()

    @contextmanager
    def queued(self, name: str, **args: Value) -> Iterator[None]:
        with self.span(name, **args), self.on_device(name, None, **args):
            yield

    def close(self) -> None:
        """Idempotent; later ranges are dropped, and those that the device has not done by now."""
        with self._lock:
            if not self._file.closed:
                self._write_done()
                self._file.write("]\n")
                self._file.close()

    def _record(self, name: str, started_s: float, args: dict[str, Value]) -> None:
        ended_s = time.monotonic()
        with self._lock:
            self._write_range(name, (started_s, ended_s), _Track.of_thread(), args)

    def _write_done(self) -> None:
        """What the device has done by now."""
        left = []
        for one in self._queued:
            if one.work.is_done:
                args = {**one.args, "within_us": round(1e6 * one.work.within_s)}
                self._write_range(one.name, self._in_turn(one), one.track, args, cat=DEVICE)
            else:
                left.append(one)
        self._queued = left

    def _in_turn(self, done: _Queued) -> tuple[float, float]:
        """Two anchors of the device's clock differ a little. In a track no range may begin before
        the end of the last one: viewers drop it."""
        started_s, ended_s = done.work.times_s
        started_s = max(started_s, self._ended_s.get(done.track, started_s))
        self._ended_s[done.track] = ended_s = max(started_s, ended_s)
        return started_s, ended_s

    def _write_range(
        self,
        name: str,
        times_s: tuple[float, float],
        track: _Track,
        args: dict[str, Value],
        **more: str,
    ) -> None:
        if self._file.closed:
            return
        if track not in self._tracks:
            self._tracks.add(track)
            self._write(_metadata("thread_name", track.name, track.number))
        started_s, ended_s = times_s
        times = {"ts": 1e6 * started_s, "dur": 1e6 * (ended_s - started_s)}
        place = {"pid": os.getpid(), "tid": track.number}
        self._write({"name": name, "ph": "X", **more, **place, **times, "args": args})

    def _write(self, event: dict[str, object]) -> None:
        separator = "\n" if event["name"] == "process_name" else ",\n"
        self._file.write(separator + json.dumps(event))


def _metadata(what: str, name: str, thread: int) -> dict[str, object]:
    return {"name": what, "ph": "M", "pid": os.getpid(), "tid": thread, "args": {"name": name}}
