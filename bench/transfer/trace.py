"""The spans of one transfer at both ends, as a Chrome trace."""

from __future__ import annotations

import json
from pathlib import Path

from bench.transfer.link import link
from bench.transfer.shape import Shape


def write_trace(path: Path, names: list[str], shape: Shape) -> None:
    """Chrome's format: chrome://tracing and Perfetto show it. Prints what the spans overlap."""
    events: list[dict[str, object]] = []
    for number, scheme in enumerate(names):
        with link(scheme, shape) as sender:
            sender.collated()
            spans = sender.traced(sender.collated)
        for side, end in enumerate(spans):
            pid = 2 * number + side
            args = {"name": f"{end} over {scheme}"}
            events.append({"name": "process_name", "ph": "M", "pid": pid, "args": args})
            events += [_event(pid, *span) for span in spans[end]]
        hidden = _hidden(spans["decode"], spans["prefill"])
        print(f"{scheme}: {hidden:.0%} of scatter is hidden behind gather and write")
    path.write_text(json.dumps({"traceEvents": events}))


def _event(pid: int, name: str, started_s: float, ended_s: float) -> dict[str, object]:
    times = {"ts": started_s * 1e6, "dur": (ended_s - started_s) * 1e6}
    return {"name": name, "ph": "X", "pid": pid, "tid": 0, **times}


def _hidden(inner: list[tuple[str, float, float]], outer: list[tuple[str, float, float]]) -> float:
    """The share of `inner` spans' time that lies within `outer` ones, which don't overlap."""
    total = sum(end - start for _, start, end in inner)
    both = (min(a[2], b[2]) - max(a[1], b[1]) for a in inner for b in outer)
    return sum(max(0.0, overlap) for overlap in both) / total if total else 0.0
