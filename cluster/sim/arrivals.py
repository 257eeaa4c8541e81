"""A trace at another rate, or several times at once. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cluster.sim.trace import TracePrompt, TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    request: TraceRequest
    prompt: TracePrompt


def arrivals(
    requests: Sequence[TraceRequest], *, rate_scale: float, replicas: int, draw: Callable[[], float]
) -> list[Arrival]:
    """At `rate_scale` times the rate: times are divided by it. Each request comes `replicas` times,
    the copies with prompts of their own, put off by a share (from `draw`) of the mean gap."""
    gap_s = requests[-1].arrival_s / len(requests) / rate_scale
    timed = [
        (_later(one, min(copy, 1) * draw() * gap_s, rate_scale), copy)
        for one in requests
        for copy in range(replicas)
    ]
    timed.sort(key=lambda pair: pair[0].arrival_s)
    return [
        Arrival(request=request, prompt=TracePrompt(request, number, copy))
        for number, (request, copy) in enumerate(timed)
    ]


def _later(request: TraceRequest, put_off_s: float, rate_scale: float) -> TraceRequest:
    return replace(request, arrival_s=request.arrival_s / rate_scale + put_off_s)
