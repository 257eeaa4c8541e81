"""Prompts sent to a prefill worker at once, or kept in one queue at the router, in the simulator:
over prompt lengths and loads, with a worker that dies and with workers of two speeds.

    python -m bench.router.dispatch [--requests 600]
    python -m bench.router.dispatch --trace conversation_trace.jsonl [--rates 1 8] [--limit 3000]

Four prefill workers; the load is the share of their time that the prompts take when none dies.
Arrivals are Poisson's, lengths log-normal. With a trace there are eight, and prefixes in common.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import yaml

from cluster.config.load import load_config
from cluster.config.overrides import Override
from cluster.sim.profiles.load import BUILT_IN, read_profile
from cluster.sim.readers import read_trace
from cluster.sim.results.output import simulate
from cluster.sim.results.report import Report, Spread
from cluster.sim.simulation import Scale
from cluster.sim.trace import TraceRequest
from engine.core.step_times import prefill_work

DISPATCHES = ("direct", "shared_queue")
PLACEMENTS = ("kv_aware", "round_robin")
LENGTHS = (500, 2000, 8000)
LOADS = (0.5, 0.8, 0.95)
PREFILLS = 4
OUTPUT_TOKENS = 32
CHUNK_TOKENS = 8192
BACK_AFTER_S = 10.0
SIGMA = 0.8
FLEET = (
    f"scheduler.prefill_chunk_tokens={CHUNK_TOKENS}",
    "scheduler.max_running_requests=256",
    "router.admission.policy=none",
    "router.placement.local_prefill=off",
    "simulation.block_size=512",
    "simulation.slo.told=false",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """So many (`slow`) of the prefill workers take twice as long; one may die."""

    name: str
    slow: int = 0
    dies: bool = False

    @property
    def speed(self) -> float:
        """In fast workers."""
        return PREFILLS - self.slow / 2

    def settings(self, lasts_s: float) -> list[str]:
        fast = PREFILLS - self.slow
        pools: list[dict[str, object]] = [{"role": "prefill", "replicas": fast}]
        hardware: list[dict[str, object]] = [{}]
        if self.slow:
            pools.append({"role": "prefill", "replicas": self.slow})
            hardware.append({"profile": slowed(2.0)})
        pools.append({"role": "decode", "replicas": PREFILLS})
        failure = {"worker": "prefill-0", "at": f"{lasts_s / 3:.3f}s"}
        failure |= {"back_after": f"{BACK_AFTER_S:g}s"}
        return [
            f"workers={json.dumps(pools)}",
            f"simulation.pools={_yaml(hardware)}",
            f"simulation.failures={json.dumps([failure] if self.dies else [])}",
        ]


FLEETS = (
    Fleet(name="four alike"),
    Fleet(name="one dies for 10 s", dies=True),
    Fleet(name="two half as fast", slow=2),
)


def slowed(factor: float) -> dict[str, object]:
    """The built-in profile, whose prompts take so much longer."""
    return {key: _slowed(key, value, factor) for key, value in BUILT_IN.items()}


def _yaml(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10_000)


def _slowed(key: str, value: object, factor: float) -> object:
    is_prefill = key.startswith("prefill_") and isinstance(value, float)
    return value * factor if is_prefill else value  # type: ignore[operator]


def poisson(count: int, length: int, busy: float, seed: int = 0) -> list[TraceRequest]:
    """Prompts of that `length` on average keep so many fast workers `busy`."""
    rng, at_s, made = Random(seed), 0.0, []
    drawn = [length * rng.lognormvariate(-(SIGMA**2) / 2, SIGMA) for _ in range(count)]
    tokens = [min(131_072, max(1, round(one))) for one in drawn]
    per_s = busy / (sum(map(_seconds, tokens)) / count)
    for one in tokens:
        made.append(TraceRequest(arrival_s=at_s, input_tokens=one, output_tokens=OUTPUT_TOKENS))
        at_s += rng.expovariate(per_s)
    return made


def _seconds(tokens: int) -> float:
    times, done, seconds = read_profile(None, "built-in").times, 0, 0.0
    while done < tokens:
        take = min(CHUNK_TOKENS, tokens - done)
        seconds += times.step_s(prefill_work(take, done))
        done += take
    return seconds


def run(requests: Sequence[TraceRequest], settings: Sequence[str], rate: float = 1.0) -> Report:
    config = load_config(None, map(Override.parse, [*FLEET, *settings]))
    return simulate(config, requests, Scale(rate=rate)).report


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 8.0])
    parser.add_argument("--limit", type=int, help="only so many of the trace's requests")
    options = parser.parse_args()
    logging.getLogger("cluster").setLevel(logging.ERROR)  # that workers die is meant
    traced(options) if options.trace else synthetic(options.requests)


def synthetic(count: int) -> None:
    kinds = [(placement, dispatch) for placement in PLACEMENTS for dispatch in DISPATCHES]
    head = [f"{placement}, {dispatch}" for placement, dispatch in kinds]
    print("TTFT in ms, mean / p99\n")
    _row("fleet", "prompt", "load", *head)
    _row(*["---"] * (3 + len(head)))
    for fleet in FLEETS:
        for length in LENGTHS:
            for load in LOADS:
                requests = poisson(count, length, load * fleet.speed)
                settings = fleet.settings(requests[-1].arrival_s)
                cells = [
                    _ttft(run(requests, [*settings, *_policies(placement, dispatch)]).ttft_s)
                    for placement, dispatch in kinds
                ]
                _row(fleet.name, length, load, *cells)


def traced(options: argparse.Namespace) -> None:
    requests = read_trace(options.trace, options.limit)
    fleet = ["workers.0.replicas=8", "workers.1.replicas=8"]
    _row("rate", "dispatch", "TTFT ms, mean / p99", "TPOT ms, mean / p99", "prefix hits")
    _row(*["---"] * 5)
    for rate in options.rates:
        for dispatch in DISPATCHES:
            one = run(requests, [*fleet, *_policies("kv_aware", dispatch)], rate)
            hits = f"{one.hit_rate:.1%}"
            _row(f"{rate:g} x", dispatch, _ttft(one.ttft_s), _ttft(one.tpot_s), hits)


def _policies(placement: str, dispatch: str) -> list[str]:
    return [f"router.placement.policy={placement}", f"router.dispatch={dispatch}"]


def _ttft(spread: Spread | None) -> str:
    return "" if spread is None else f"{spread.mean * 1e3:.1f} / {spread.p99 * 1e3:.1f}"


def _row(*cells: object) -> None:
    print("|", " | ".join(map(str, cells)), "|", flush=True)


if __name__ == "__main__":
    main()
