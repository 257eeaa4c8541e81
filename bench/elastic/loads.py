"""The traces, fleets and objectives of the study. They were written before the policy.

The swing: prompts of 4,096 tokens with 512 of output, and 512 with 4,096, ten minutes each, at one
rate of Poisson arrivals; lengths are log-normal around these. The steady trace is Mooncake's
conversation trace (https://github.com/kvcache-ai/Mooncake, FAST25-release), cut to its first part.

Step, day and steady load: both kinds of requests, half of each, at a rate that jumps to three times
as much, that goes up and down like that of a day (an hour here), and that stays.

Hopeless (written after the policy): short prompts with long answers, and for three of ten requests
prompts that no worker computes in time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from math import cos, exp, pi
from pathlib import Path
from random import Random

from cluster.sim.readers import read_trace
from cluster.sim.trace import TraceRequest

SEEDS = (1, 2, 3)
PHASE_S = 600.0
LONG, SHORT = 4096, 512
SIGMA = 0.3
"""Of the logarithm of lengths."""
MOST_REQUESTS = 25_000
HOPELESS, HOPELESS_SHARE = 24_000, 0.3
TTFT, TPOT = "2s", "50ms"
STEP_S, STEP_FROM, STEP_TO = 300.0, 4.0, 12.0
DAY_S, NIGHT, NOON = 3600.0, 2.0, 11.5
"""Requests/s."""
START_UP = "100s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """`pools` workers of a kind; `profile` is theirs in the simulator."""

    workers: int
    blocks: int
    kv_layers: int
    profile: dict[str, object]


H200_70B = Fleet(
    workers=16,
    blocks=690,  # of 512 tokens: what two H200 have left beside the weights
    kv_layers=80,
    profile={
        "kind": "roofline",
        "device": "h200-sxm",
        "model": "llama-3.1-70b",
        "tensor_parallel": 2,
    },
)


def swing(rate_per_s: float, minutes: float, seed: int) -> list[TraceRequest]:
    """Begins with long prompts."""
    rng = Random(seed)
    return [
        TraceRequest(
            arrival_s=at_s,
            input_tokens=_length(rng, SHORT if at_s // PHASE_S % 2 else LONG),
            output_tokens=_length(rng, LONG if at_s // PHASE_S % 2 else SHORT),
        )
        for at_s in takewhile(lambda at: at < 60 * minutes, _poisson(rng, rate_per_s))
    ]


def step(minutes: float, seed: int) -> list[TraceRequest]:
    return _mixed(lambda at_s: STEP_TO if at_s >= STEP_S else STEP_FROM, STEP_TO, minutes, seed)


def day(minutes: float, seed: int) -> list[TraceRequest]:
    """Begins at night."""

    def rate(at_s: float) -> float:
        return NIGHT + (NOON - NIGHT) * (1 - cos(2 * pi * at_s / DAY_S)) / 2

    return _mixed(rate, NOON, minutes, seed)


def steady(rate_per_s: float, minutes: float, seed: int) -> list[TraceRequest]:
    return _mixed(lambda _: rate_per_s, rate_per_s, minutes, seed)


def hopeless(rate_per_s: float, minutes: float, seed: int) -> list[TraceRequest]:
    rng = Random(seed)
    return [
        TraceRequest(arrival_s=at_s, input_tokens=HOPELESS, output_tokens=100)
        if rng.random() < HOPELESS_SHARE
        else _request(rng, at_s, SHORT, LONG)
        for at_s in takewhile(lambda at: at <= 60 * minutes, _poisson(rng, rate_per_s))
    ]


def _mixed(
    rate: Callable[[float], float], most: float, minutes: float, seed: int
) -> list[TraceRequest]:
    """Thinned from Poisson arrivals at the highest rate (Lewis and Shedler 1979)."""
    rng, found = Random(seed), []
    for at_s in takewhile(lambda at: at < 60 * minutes, _poisson(rng, most)):
        if rng.random() * most < rate(at_s):
            lengths = (LONG, SHORT) if rng.random() < 0.5 else (SHORT, LONG)
            found.append(_request(rng, at_s, *lengths))
    return found


def _request(rng: Random, at_s: float, prompt: int, output: int) -> TraceRequest:
    return TraceRequest(
        arrival_s=at_s, input_tokens=_length(rng, prompt), output_tokens=_length(rng, output)
    )


def _poisson(rng: Random, rate_per_s: float) -> Iterator[float]:
    now_s = 0.0
    while True:
        yield now_s
        now_s += rng.expovariate(rate_per_s)


def _length(rng: Random, usual: int) -> int:
    return max(1, round(usual * exp(rng.gauss(0.0, SIGMA))))


def conversation(path: Path) -> list[TraceRequest]:
    return [*read_trace(path, None)]
