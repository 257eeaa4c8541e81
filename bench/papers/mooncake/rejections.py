"""Mooncake's early rejection: how much of a trace is rejected that comes faster than it is served.

    python -m bench.papers.mooncake.rejections conversation_trace.jsonl [--decode 1 --tpot 0.06]

Paper: Mooncake (Qin et al., arXiv 2407.00079), table 3: of 23,000 requests at twice their rate, on
8 prefill and 8 decode instances of eight A800 with a model of LLaMA2-70B's shape. Its three ways
are in `mooncake_admission`; beside them our `predictive`, which rejects nobody later. The text at
hand says neither the objectives nor the trace: 30 s and 100 ms here, on the conversation trace,
with the machines of `mooncake_policies`. Places and memory for decoding are plenty, so that only
objectives reject.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.papers.mooncake.admission import AFTER_PREFILL, BASELINE, EARLY, PREDICTION, SIMULATIONS
from bench.papers.mooncake.policies import cluster_of
from bench.papers.side_by_side import Claim, print_claims, write_claims
from cluster.config.schema import Config
from cluster.sim.readers import read_trace
from cluster.sim.results.report import Report, is_good, report
from cluster.sim.simulation import Scale
from cluster.sim.trace import Outcome, TraceRequest

PAPER = {BASELINE: 4183, EARLY: 3771, PREDICTION: 3589}
OFFERED = 23_000
SOURCE = "arXiv 2407.00079, table 3"
PLACES, DECODE_BLOCKS = 1024, 12_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    prefill: int = 8
    decode: int = 8
    ttft_s: float = 30.0
    tpot_s: float = 0.1
    rate: float = 2.0

    def __str__(self) -> str:
        workers = f"{self.prefill} + {self.decode} workers, {self.rate:g}x"
        return f"{workers}, TTFT {self.ttft_s:g} s, TPOT {self.tpot_s * 1e3:g} ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejections:
    """`served_tokens`: input and output of the requests that kept their objectives, by that of all
    that were offered."""

    report: Report
    served_tokens: float

    @property
    def share(self) -> float:
        return sum(self.report.refused.values()) / self.report.offered


def simulated(policy: str, requests: Sequence[TraceRequest], setting: Setting) -> Rejections:
    cluster = _cluster(setting)
    run = SIMULATIONS[policy](cluster, requests, Scale(rate=setting.rate)).run()
    slo = cluster.simulation.slo
    well = sum(_tokens(one) for one in run.outcomes if is_good(one, slo))
    return Rejections(report=report(run), served_tokens=well / sum(map(_tokens, run.outcomes)))


def _tokens(outcome: Outcome) -> int:
    return outcome.request.input_tokens + outcome.request.output_tokens


def from_(requests: Sequence[TraceRequest], skip: int) -> list[TraceRequest]:
    """Without the first ones; time begins with the first of the others."""
    left = requests[skip:]
    return [replace(one, arrival_s=one.arrival_s - left[0].arrival_s) for one in left]


def _cluster(setting: Setting) -> Config:
    cluster = cluster_of("kv_aware")
    simulation = cluster["simulation"]
    assert isinstance(simulation, dict)
    cluster["workers"] = [
        {"role": "prefill", "replicas": setting.prefill},
        {"role": "decode", "replicas": setting.decode},
    ]
    cluster["scheduler"] = {"prefill_chunk_tokens": 8192, "max_running_requests": PLACES}
    cluster["router"] = {
        "placement": {"policy": "kv_aware", "local_prefill": "off"},
        "admission": {"policy": "predictive"},
    }
    simulation["pools"] = [{}, {"blocks": DECODE_BLOCKS}]
    simulation["slo"] = {"ttft": f"{setting.ttft_s}s", "tpot": f"{setting.tpot_s}s"}
    return Config.model_validate(cluster, strict=False)


def claims(found: Mapping[str, Rejections]) -> Iterator[Claim]:
    """How many are rejected, and against the baseline; how many of all are served well."""
    first = found[BASELINE].share
    for policy, one in found.items():
        paper = PAPER.get(policy)
        share = None if paper is None else 100 * paper / OFFERED
        yield _claim(f"{policy}: rejected", share, 100 * one.share)
        if policy != BASELINE and first:
            less = None if paper is None else 100 * (paper / PAPER[BASELINE] - 1)
            yield _claim(f"{policy}: against baseline", less, 100 * (one.share / first - 1))
        late = one.report.refused.get(AFTER_PREFILL, 0) / one.report.offered
        yield _claim(f"{policy}: rejected when computed", None, 100 * late)
        yield _claim(f"{policy}: kept their objectives", None, 100 * one.report.attainment)
        yield _claim(f"{policy}: tokens of these", None, 100 * one.served_tokens)


def _claim(what: str, paper: float | None, ours: float) -> Claim:
    return Claim(what=what, unit="%", paper=paper, ours=ours, source=SOURCE, digits=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path, help="conversation_trace.jsonl of kvcache-ai/Mooncake")
    parser.add_argument("--prefill", type=int, default=8, help="prefill workers")
    parser.add_argument("--decode", type=int, default=8, help="decode workers")
    parser.add_argument("--ttft", type=float, default=30.0, help="seconds")
    parser.add_argument("--tpot", type=float, default=0.1, help="seconds")
    parser.add_argument("--rate", type=float, default=2.0, help="multiple of the trace's")
    parser.add_argument("--skip", type=int, default=0, help="so many of the trace at first")
    parser.add_argument("--requests", type=int, help="only so many of the trace, for a quick look")
    parser.add_argument("--json", type=Path, help="also write the claims to this file")
    args = parser.parse_args()
    setting = Setting(
        prefill=args.prefill,
        decode=args.decode,
        ttft_s=args.ttft,
        tpot_s=args.tpot,
        rate=args.rate,
    )
    requests = from_(read_trace(args.trace, args.requests and args.skip + args.requests), args.skip)
    found = list(claims({policy: simulated(policy, requests, setting) for policy in SIMULATIONS}))
    print_claims(f"Mooncake: rejections, {setting}", found)
    if args.json:
        write_claims(args.json, found)


if __name__ == "__main__":
    main()
