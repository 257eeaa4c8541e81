"""Splitwise's heterogeneous fleets on Azure's conversations, at equal power and at equal cost.

    python -m bench.papers.splitwise_fleets perf_model.csv AzureLLMInferenceTrace_conv.csv

Paper: Splitwise (ISCA 2024), §6: Llama2-70B, machines of eight GPUs, each fleet a fifth of the
paper's (its iso-power counts for conversations: 40 DGX-H100, 70 DGX-A100, AA 45 + 25, HH 25 + 15,
HA 25 + 26, HHcap 25 + 21). Throughput is the highest rate at which the paper's nine limits hold:
slowdown against a request alone on a DGX-A100 of TTFT (median 2, P90 3, P99 6), of TBT and of the
whole response (1.25, 1.5, 5). Power: a DGX-H100 is 10.2 kW (configs/hardware_repo/skus); the
paper's iso-power counts make a DGX-A100 40/70 and a capped DGX-H100 15/21 of it. Cost: the
repository's isocost fleets count 86 DGX-A100 as dear as 40 DGX-H100.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.papers.goodput import highest_rate
from bench.papers.side_by_side import Claim, print_claims, write_claims
from cluster.config.schema import Config
from cluster.sim.profiles.load import build_profile, parse_profile
from cluster.sim.readers import read_trace
from cluster.sim.results import output
from cluster.sim.simulation import Scale
from cluster.sim.trace import Outcome, TraceRequest
from engine.core.step_times import StepTimes, decode_work, prefill_work

HARDWARE = {"H": "h100-80gb", "A": "a100-80gb", "C": "h100-80gb-pcap"}
COST = {"H": 1.0, "A": 40 / 86, "C": 1.0}
POWER = {"H": 10.2, "A": 10.2 * 40 / 70, "C": 10.2 * 15 / 21}
TTFT_LIMITS = ((0.5, 2.0), (0.9, 3.0), (0.99, 6.0))
OTHER_LIMITS = ((0.5, 1.25), (0.9, 1.5), (0.99, 5.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    name: str
    pools: tuple[tuple[str, str, int], ...]  # role, kind of machine, machines

    def total(self, each: Mapping[str, float]) -> float:
        return sum(each[kind] * count for _, kind, count in self.pools)


def _split(name: str, prefill: tuple[str, int], decode: tuple[str, int]) -> Fleet:
    return Fleet(name=name, pools=(("prefill", *prefill), ("decode", *decode)))


FLEETS = (
    Fleet(name="Baseline-A100", pools=(("both", "A", 14),)),
    Fleet(name="Baseline-H100", pools=(("both", "H", 8),)),
    _split("Splitwise-AA", ("A", 9), ("A", 5)),
    _split("Splitwise-HH", ("H", 5), ("H", 3)),
    _split("Splitwise-HA", ("H", 5), ("A", 5)),
    _split("Splitwise-HHcap", ("H", 5), ("C", 4)),
)


def profile(table: Path, kind: str) -> dict[str, object]:
    return {
        "kind": "table",
        "name": HARDWARE[kind],
        "file": str(table.absolute()),
        "where": {"model": "llama2-70b", "hardware": HARDWARE[kind], "tensor_parallel": "8"},
        "extrapolate": True,
    }


def cluster_of(fleet: Fleet, table: Path) -> dict[str, object]:
    """Llama2-70B: 80 layers of 8 KV heads of 128. Prompts whole, as splitwise-sim has them."""
    return {
        "workers": [{"role": role, "replicas": count} for role, _, count in fleet.pools],
        "scheduler": {"prefill_chunk_tokens": 8192, "max_running_requests": 256},
        "router": {"placement": {"local_prefill": "off"}},
        "simulation": {
            "block_size": 128,
            "blocks": 10_000,
            "pools": [{"profile": profile(table, kind)} for _, kind, _ in fleet.pools],
            "kv": {"layers": 80, "heads": 8, "head_dim": 128, "dtype": "float16"},
            "fabric": {"bandwidth": "200GiB"},
        },
    }


# --- the nine limits ----------------------------------------------------------------------------


def slowdowns(outcome: Outcome, alone: StepTimes) -> tuple[float, float, float]:
    """Of TTFT, TBT and response, against the request alone; endless for one that is not done."""
    if outcome.ttft_s is None or outcome.e2e_s is None:
        return (float("inf"),) * 3
    first_s = alone.step_s(prefill_work(outcome.request.input_tokens))
    step_s = alone.step_s(decode_work(1, outcome.request.input_tokens))
    whole_s = first_s + (outcome.request.output_tokens - 1) * step_s
    between = 1.0 if outcome.tpot_s is None else outcome.tpot_s / step_s
    return outcome.ttft_s / first_s, between, outcome.e2e_s / whole_s


def within_limits(outcomes: Sequence[Outcome], alone: StepTimes) -> bool:
    measured = [
        sorted(column) for column in zip(*(slowdowns(o, alone) for o in outcomes), strict=True)
    ]
    limits = (TTFT_LIMITS, OTHER_LIMITS, OTHER_LIMITS)
    return all(
        column[int(quantile * (len(column) - 1))] <= most
        for column, pairs in zip(measured, limits, strict=True)
        for quantile, most in pairs
    )


def throughput(
    fleet: Fleet, table: Path, requests: Sequence[TraceRequest], alone: StepTimes
) -> float:
    """Requests a second."""
    config = Config.model_validate(cluster_of(fleet, table), strict=False)
    natural = len(requests) / requests[-1].arrival_s

    def holds(rate_per_s: float) -> bool:
        result = output.simulate(config, requests, Scale(rate=rate_per_s / natural))
        return within_limits(result.outcomes, alone)

    return highest_rate(holds, start=16.0, within=0.04)


def claims(measure: Callable[[Fleet], float]) -> Iterator[Claim]:
    rates = {fleet.name: measure(fleet) for fleet in FLEETS}
    slow, fast = rates["Baseline-A100"], rates["Baseline-H100"]
    published = {"Splitwise-AA": 2.15}
    for fleet in FLEETS:
        rate, cost, power = rates[fleet.name], fleet.total(COST), fleet.total(POWER)
        name = f"{fleet.name} (cost {cost:.1f}, {power:.0f} kW)"
        yield _claim(f"{name}: rate", "req/s", None, rate)
        yield _claim(f"{name}: rate / Baseline-A100", "x", published.get(fleet.name), rate / slow)
        per_cost = (rate / cost) / (fast / FLEETS[1].total(COST))
        yield _claim(f"{name}: per cost / Baseline-H100", "x", None, per_cost)
        per_power = (rate / power) / (fast / FLEETS[1].total(POWER))
        yield _claim(f"{name}: per power / Baseline-H100", "x", None, per_power)


def _claim(what: str, unit: str, paper: float | None, ours: float) -> Claim:
    return Claim(what=what, unit=unit, paper=paper, ours=ours, source="ISCA'24 §6", digits=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path, help="perf_model.csv of Mutinifni/splitwise-sim")
    parser.add_argument("trace", type=Path, help="AzureLLMInferenceTrace_conv.csv")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--json", type=Path, help="also write the claims to this file")
    args = parser.parse_args()
    alone = build_profile(parse_profile(profile(args.table, "A"), "DGX-A100"), Path()).times
    requests = read_trace(args.trace, args.requests)
    measure = partial(throughput, table=args.table, requests=requests, alone=alone)
    found = list(claims(measure))
    print_claims("Splitwise: heterogeneous fleets, a fifth of the paper's size", found)
    if args.json:
        write_claims(args.json, found)


if __name__ == "__main__":
    main()
