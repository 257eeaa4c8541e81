"""When the kernels of several CUDA streams ran, from a trace of torch.profiler's."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

Span = tuple[float, float]
_US = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTimes:
    """Shares of the time from the first kernel's start to the last one's end."""

    busy: Mapping[int, float]  # stream |-> while any of its kernels ran
    at_once: float  # while kernels of at least two streams ran
    idle_s: float  # no share: while no kernel ran

    def __str__(self) -> str:
        each = ", ".join(f"stream {s} {100 * share:.0f} %" for s, share in self.busy.items())
        return f"kernels ran: {each}, of two streams at once {100 * self.at_once:.0f} %"


@contextmanager
def kernel_times(found: list[StreamTimes]) -> Iterator[None]:
    """Of what runs within; appended at the end. Without a device no kernels are seen."""
    on_cuda = torch.cuda.is_available()
    kind = ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU
    with profile(activities=[kind]) as profiled:
        yield
        if on_cuda:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        found.append(stream_times(json.loads(path.read_text())["traceEvents"]))


def stream_times(events: Iterable[Mapping[str, Any]]) -> StreamTimes:
    """`events` are a Chrome trace's."""
    spans: dict[int, list[Span]] = {}
    for event in events:
        if event.get("cat") == "kernel":
            begin = float(event["ts"])
            span = (begin, begin + float(event["dur"]))
            spans.setdefault(int(event["args"]["stream"]), []).append(span)
    if not spans:
        return StreamTimes(busy={}, at_once=0.0, idle_s=0.0)
    whole = [span for each in spans.values() for span in each]
    total = max(end for _, end in whole) - min(begin for begin, _ in whole)
    busy = {stream: _covered(each, 1) / total for stream, each in sorted(spans.items())}
    merged = [span for each in spans.values() for span in _union(each)]
    idle_s = (total - _covered(whole, 1)) / _US
    return StreamTimes(busy=busy, at_once=_covered(merged, 2) / total, idle_s=idle_s)


def _union(spans: Iterable[Span]) -> list[Span]:
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def _covered(spans: Iterable[Span], least: int) -> float:
    """How long at least so many of the spans lasted at once."""
    changes = sorted(change for begin, end in spans for change in ((begin, 1), (end, -1)))
    depth, total, before = 0, 0.0, 0.0
    for at, change in changes:
        if depth >= least:
            total += at - before
        depth, before = depth + change, at
    return total
