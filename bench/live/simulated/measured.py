"""What the simulator is calibrated with: how long everything took on live processes during one
stretch of load, from the workers' traces and the router's record and processor time."""

from __future__ import annotations

import json
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from bench.live.told import Told
from bench.serving.plain_cluster import PlainCluster
from cluster.process.trace import DEVICE
from cluster.sim.machines.recorded import trace_events

LOOKS_EVERY_S = 0.5
LEAST_S = 1e-5
"""Of a service time: less is as good as nothing, and no duration of a cluster file."""
COPIES = ("gather", "write", "scatter")


@dataclass(slots=True)
class RouterTime:
    """What the router has computed so far, now and then."""

    at_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def look(self, cluster: PlainCluster) -> None:
        times = cluster.processes["router"].cpu_times()
        self.at_s.append(time.monotonic())
        self.cpu_s.append(times.user + times.system)


@contextmanager
def watched(cluster: PlainCluster) -> Iterator[RouterTime]:
    found, over = RouterTime(), threading.Event()

    def watch() -> None:
        while not over.wait(LOOKS_EVERY_S):
            found.look(cluster)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Of load, on the clock of all processes."""

    first_s: float
    last_s: float

    def __contains__(self, at_s: float) -> bool:
        return self.first_s <= at_s < self.last_s

    def count(self, ascending: Sequence[float]) -> int:
        return bisect_left(ascending, self.last_s) - bisect_left(ascending, self.first_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """`traces`: a folder with what workers did in the stretch. `lengths`: tokens of the requests
    that were answered in it. Seconds of the router for a request and for a report, of a turn of a
    worker's loop, of a job of its transfer thread beside its bytes, of a message one way."""

    traces: Path
    lengths: tuple[int, ...]
    router_request_s: float
    router_message_s: float
    worker_turn_s: float
    mover_job_s: float
    copy_bytes_per_s: float
    latency_s: float

    def service(self) -> dict[str, str]:
        """As a cluster file's `simulation` has it."""
        return {
            "router_request": milliseconds(self.router_request_s),
            "router_message": milliseconds(self.router_message_s),
            "worker_turn": milliseconds(self.worker_turn_s),
            "mover_job": milliseconds(self.mover_job_s),
        }


def milliseconds(seconds: float) -> str:
    return f"{1000 * max(LEAST_S, seconds):.4f}ms"


def measure(told: Told, router: RouterTime, traces: Path, stretch: Stretch, to: Path) -> Measured:
    """Writes the stretch of `traces` to the folder `to`."""
    to.mkdir()
    turns: list[float] = []
    copies: list[tuple[int, float]] = []  # bytes, seconds
    for path in traces.glob("*.json"):
        kept = [one for one in _events(path) if one["ts"] / 1e6 in stretch]
        lines = ",\n".join(json.dumps(one) for one in kept if one["name"] == "stepped")
        (to / path.name).write_text(f"[{lines}]\n")
        turns += [one["dur"] / 1e6 for one in kept if one["name"] == "turn"]
        copies += [
            (int(one["args"]["bytes"]), one["dur"] / 1e6) for one in kept if one["name"] in COPIES
        ]
    request_s, message_s = _router_s(told, router, stretch)
    job_s, byte_s = least_squares(
        [(1.0, float(size)) for size, _ in copies], [s for _, s in copies]
    )
    turn_s = mean(turns)
    reserving = [
        one.phases_s["reserve"]
        for one in told.predictions()
        if one.at_s in stretch and "reserve" in one.phases_s
    ]
    pairs = zip(told.submitted_s, told.tokens, strict=True)
    return Measured(
        traces=to,
        lengths=tuple(tokens for at_s, tokens in pairs if at_s in stretch and tokens),
        router_request_s=request_s,
        router_message_s=message_s,
        worker_turn_s=turn_s,
        mover_job_s=job_s,
        copy_bytes_per_s=1 / max(byte_s, 1e-12),
        latency_s=(median(reserving) - turn_s - message_s) / 2,
    )


def _events(path: Path) -> list[dict[str, Any]]:
    """Those that took the host's time."""
    with path.open() as lines:
        return [one for one in trace_events(lines) if one["ph"] == "X" and one.get("cat") != DEVICE]


def _router_s(told: Told, router: RouterTime, stretch: Stretch) -> tuple[float, float]:
    """For a request, and for a report of a worker."""
    known, wanted = [], []
    looks = zip(router.at_s, router.at_s[1:], router.cpu_s, router.cpu_s[1:], strict=False)
    for begun_s, ended_s, before_s, after_s in looks:
        if begun_s in stretch and ended_s in stretch:
            part = Stretch(first_s=begun_s, last_s=ended_s)
            known.append((float(part.count(told.submitted_s)), float(part.count(told.reported_s))))
            wanted.append(after_s - before_s)
    return least_squares(known, wanted)


def least_squares(
    known: Sequence[tuple[float, float]], wanted: Sequence[float]
) -> tuple[float, float]:
    """The two factors, none below 0, that tell `wanted` best from `known`."""
    if not known:
        return 0.0, 0.0
    rows, target = np.array(known), np.array(wanted)
    found = np.linalg.lstsq(rows, target, rcond=None)[0]
    for lost, kept in ((0, 1), (1, 0)):
        if found[lost] < 0:
            one = rows[:, kept]
            found = np.zeros(2)
            found[kept] = max(0.0, float(one @ target) / max(1e-12, float(one @ one)))
    return float(found[0]), float(found[1])
