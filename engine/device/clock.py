"""When a CUDA device has reached points of its streams, in seconds of CLOCK_MONOTONIC
(time.monotonic), for traces.

A device says only how much time lies between two of its events. So there is an anchor: an event on
a stream of its own, on which nothing else waits, whose time of the host is known because the host
looked at its clock before and after. It lies between the two, and half of what is between them is
how exact it is: some 10 us are expected on an idle device, and more where another process has the
device in turn. Of several tries the shortest counts.

Two things make later times less exact, so an anchor serves for a quarter of a second. The two
clocks drift apart: 100 ppm are assumed, which is 25 us by then. And CUDA says what lies between two
events as a float32 of milliseconds, whose steps are 0.02 us in that time, but 0.25 ms after an
hour. Events themselves are exact to about 0.5 us. An event that is reached later, because its
stream is busy, is that much less exact; `within_s` says how much.

Not run on a device.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

CudaStream = torch.cuda.Stream
ANCHOR_LASTS_S = 0.25
_TRIES = 5
_DRIFT = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """`event` was reached at `at_s` of the host's clock, give or take `within_s`."""

    event: torch.cuda.Event
    at_s: float
    within_s: float

    def s_until(self, event: torch.cuda.Event) -> float:
        """Both have been reached."""
        return self.event.elapsed_time(event) / 1e3


class DeviceWork:
    """What is queued on a stream from here until `end`."""

    def __init__(self, anchor: Anchor, stream: CudaStream) -> None:
        self._anchor = anchor
        self._stream = stream
        self._began = _recorded(stream)
        self._ended: torch.cuda.Event | None = None

    def end(self) -> None:
        self._ended = _recorded(self._stream)

    @property
    def is_done(self) -> bool:
        """The device has reached its end. Never waits."""
        return self._ended is not None and self._ended.query()

    @property
    def times_s(self) -> tuple[float, float]:
        """Of time.monotonic(), once it is done: when the device had done all that was queued
        before it, and all of it."""
        assert self._ended is not None
        at_s, until = self._anchor.at_s, self._anchor.s_until
        return at_s + until(self._began), at_s + until(self._ended)

    @property
    def within_s(self) -> float:
        """How far both times may be off, once it is done."""
        assert self._ended is not None
        return self._anchor.within_s + _DRIFT * self._anchor.s_until(self._ended)


class DeviceClock:
    """Of a CUDA device. Thread safe. Who begins work renews the anchor where it is old, and waits
    for that, some 0.1 ms."""

    def __init__(self, device: torch.device, *, now: Callable[[], float] = time.monotonic) -> None:
        self._device = device
        self._now = now
        self._lock = threading.Lock()
        self._stream: CudaStream | None = None
        self._anchor: Anchor | None = None

    def begin(self, stream: CudaStream | None) -> DeviceWork:
        """On this stream of the device; None: the calling thread's current one."""
        if stream is None:
            stream = torch.cuda.current_stream(self._device)
        return DeviceWork(self._fresh(), stream)

    def _fresh(self) -> Anchor:
        with self._lock:
            if self._anchor is None or self._now() - self._anchor.at_s > ANCHOR_LASTS_S:
                tries = [self._try() for _ in range(_TRIES)]
                self._anchor = min(tries, key=lambda anchor: anchor.within_s)
            return self._anchor

    def _try(self) -> Anchor:
        self._stream = self._stream or torch.cuda.Stream(self._device)
        before_s = self._now()
        event = _recorded(self._stream)
        event.synchronize()
        after_s = self._now()
        return Anchor(event=event, at_s=(before_s + after_s) / 2, within_s=(after_s - before_s) / 2)


def clock(device: str) -> DeviceClock | None:
    """None: not a CUDA device."""
    found = torch.device(device)
    return DeviceClock(found) if found.type == "cuda" else None


def _recorded(stream: CudaStream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event
