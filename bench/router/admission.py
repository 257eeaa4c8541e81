"""Admission policies beside one another, in the simulator: what becomes of the requests offered,
and whether a client that comes back when it was told to is admitted.

    python -m bench.router.admission policies --trace conversation_trace.jsonl [--rates 1 2 4 8]
    python -m bench.router.admission retries [--routers 3 --workers 8 --requests 4000]
    python -m bench.router.admission routers --routers 3

Capacity is the goodput of `predictive` at far more than any rate that can be served. Arrivals of
`retries` and `routers` are Poisson's; prompts and outputs are log-normal.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from cluster.config.load import load_config
from cluster.config.overrides import Override
from cluster.sim.readers import read_trace
from cluster.sim.results.output import simulate
from cluster.sim.results.report import Report
from cluster.sim.simulation import Scale
from cluster.sim.trace import TraceRequest

POLICIES = ("none", "queue_limit", "early_rejection", "predictive")
FLEET = (
    "workers.0.replicas={prefill}",
    "workers.1.replicas={decode}",
    "scheduler.prefill_chunk_tokens=8192",
    "scheduler.max_running_requests=256",
    "simulation.block_size=512",
)
LARGE = {"prefill": 8, "decode": 8}
FAR_TOO_MANY_PER_S = 35.0
"""Of Poisson arrivals, for each pair of workers."""
WAYS_BACK = ((0.0, "null"), (0.5, "null"), (0.5, "1s"), (1.0, "null"), (1.0, "1s"))
"""Share of the clients, and what they round up to."""
OVERLOADS = (1.5, 2.0, 4.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    ttft: str
    tpot: str


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("policies", "retries", "routers"))
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 2.0, 4.0, 8.0])
    parser.add_argument("--limit", type=int, help="only so many of the trace's requests")
    parser.add_argument("--requests", type=int, default=4000, help="of Poisson arrivals")
    parser.add_argument("--retries", type=int, default=1, help="how often a client comes back")
    parser.add_argument("--routers", type=int, help="1 for `retries`, for `routers` 3, beside one")
    parser.add_argument("--workers", type=int, default=2, help="of each role, for Poisson arrivals")
    parser.add_argument("--ttft", default="2s")
    parser.add_argument("--tpot", default="25ms")
    parser.add_argument("--set", action="append", default=[], help="key=value of the cluster file")
    options = parser.parse_args()
    {"policies": policies, "retries": retries, "routers": routers}[options.what](options)


# --- policies ---------------------------------------------------------------------------------


def policies(options: argparse.Namespace) -> None:
    requests = read_trace(options.trace, options.limit)
    head = ("rate", "policy", "goodput/s", "of offered", "of admitted", "ttft p99", "refused")
    _print_head(head)
    for rate in options.rates:
        for policy in POLICIES:
            chosen = [f"router.admission.policy={policy}"]
            one = _simulate(options, LARGE, requests, chosen, rate)
            p99_s = one.ttft_s.p99 if one.ttft_s else 0.0
            _print_row(
                f"{rate:g} x",
                policy,
                f"{one.goodput_per_s:.2f}",
                f"{one.attainment:.1%}",
                f"{one.admitted_attainment:.1%}",
                f"{p99_s:.2f} s",
                ", ".join(f"{count} {reason}" for reason, count in one.refused.items()) or "none",
            )


# --- retries ----------------------------------------------------------------------------------


def retries(options: argparse.Namespace) -> None:
    capacity_per_s = _capacity(options)
    print(f"capacity: {capacity_per_s:.2f} requests/s\n")
    _print_head(
        ("offered", "come back", "rounded to", "retries", "admitted", "good", "goodput/capacity")
    )
    for overload in OVERLOADS:
        requests = poisson(options.requests, overload * capacity_per_s)
        for share, rounding in WAYS_BACK:
            clients = [
                f"router.replicas={options.routers or 1}",
                f"simulation.retries={options.retries}",
                f"simulation.retrying_share={share}",
                f"simulation.retry_rounding={rounding}",
            ]
            one = _simulate(options, _small(options), requests, clients)
            _print_row(
                f"{overload:g} x",
                f"{share:.0%}",
                rounding,
                f"{one.retries}",
                f"{one.retried_admitted / one.retries:.1%}" if one.retries else "",
                f"{one.attainment:.1%}",
                f"{one.goodput_per_s / capacity_per_s:.3f}",
            )


def _capacity(options: argparse.Namespace) -> float:
    offered = poisson(options.requests, FAR_TOO_MANY_PER_S * options.workers)
    return _simulate(options, _small(options), offered, []).goodput_per_s


def _small(options: argparse.Namespace) -> dict[str, int]:
    return {"prefill": options.workers, "decode": options.workers}


def poisson(count: int, per_s: float, *, seed: int = 0) -> list[TraceRequest]:
    """Lengths like those of a conversation: half of the prompts have more than 1,000 tokens."""
    rng, at_s, made = Random(seed), 0.0, []
    for _ in range(count):
        prompt = min(32_000, max(1, round(rng.lognormvariate(6.9, 1.0))))
        output = min(2_000, max(1, round(rng.lognormvariate(5.0, 0.8))))
        made.append(TraceRequest(arrival_s=at_s, input_tokens=prompt, output_tokens=output))
        at_s += rng.expovariate(per_s)
    return made


# --- routers ----------------------------------------------------------------------------------


def routers(options: argparse.Namespace) -> None:
    """Over-admission: of the requests offered, those admitted that broke an objective."""
    capacity_per_s = _capacity(options)
    _print_head(("offered", "routers", "admitted", "broken", "of offered", "goodput/capacity"))
    for overload in (1.0, *OVERLOADS):
        requests = poisson(options.requests, overload * capacity_per_s)
        for count in (1, options.routers or 3):
            one = _simulate(options, _small(options), requests, [f"router.replicas={count}"])
            admitted = one.offered - sum(one.refused.values())
            broken = admitted - one.good
            _print_row(
                f"{overload:g} x",
                f"{count}",
                f"{admitted}",
                f"{broken}",
                f"{broken / one.offered:.2%}",
                f"{one.goodput_per_s / capacity_per_s:.3f}",
            )


# --- all --------------------------------------------------------------------------------------


def _simulate(
    options: argparse.Namespace,
    fleet: dict[str, int],
    requests: Sequence[TraceRequest],
    settings: Iterable[str],
    rate: float = 1.0,
) -> Report:
    objectives = (f"simulation.slo.ttft={options.ttft}", f"simulation.slo.tpot={options.tpot}")
    of_fleet = [one.format(**fleet) for one in FLEET]
    chosen = map(Override.parse, (*of_fleet, *objectives, *settings, *options.set))
    return simulate(load_config(None, chosen), requests, Scale(rate=rate)).report


def _print_head(cells: Sequence[str]) -> None:
    _print_row(*cells)
    _print_row(*("---" for _ in cells))


def _print_row(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
