"""Mooncake's comparison of placement policies on its conversation trace.

    python -m bench.papers.mooncake.policies conversation_trace.jsonl

Paper: Mooncake (Qin et al., FAST 2025), figure 5: mean TTFT on 16 nodes of eight A800 serving a
model of LLaMA3-70B's shape. The text at hand says neither how many of the 16 prefill nor how fast
they are: 8 and 8 here, with a roofline of the data sheet (60 % of the FLOP/s, 80 % of the
bandwidth), a cache of 3 million tokens on each node (as in its figure 10) and 4 NICs of 200 Gb/s.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench.papers.side_by_side import Claim, print_claims, write_claims
from cluster.config.schema import Config
from cluster.sim.readers import read_trace
from cluster.sim.results import output
from cluster.sim.results.report import Report
from cluster.sim.simulation import Scale

PAPER_S = {"random": 19.65, "least_loaded": 5.27, "local_cache": 3.58, "kv_aware": 3.07}
NAMES = {
    "random": "random",
    "least_loaded": "load balance",
    "local_cache": "local cache",
    "kv_aware": "global cache",
}
SOURCE = "FAST'25 figure 5"
BLOCK_TOKENS = 512
CACHED_TOKENS = 3_000_000


def cluster_of(policy: str) -> dict[str, object]:
    return {
        "workers": [{"role": role, "replicas": 8} for role in ("prefill", "decode")],
        "scheduler": {
            "prefill_chunk_tokens": 8192,
            "mixed_chunk_tokens": 8192,
            "max_running_requests": 256,
        },
        "router": {
            "placement": {"policy": policy, "local_prefill": "off"},
            "admission": {"policy": "none"},
        },
        "simulation": {
            "profile": {
                "kind": "roofline",
                "model": "llama-3.1-70b",
                "device": "a800-80gb-sxm",
                "devices": 8,
                "tensor_parallel": 8,
            },
            "blocks": CACHED_TOKENS // BLOCK_TOKENS,
            "block_size": BLOCK_TOKENS,
            "max_tokens": 2000,
            "kv": {"layers": 80, "heads": 8, "head_dim": 128, "dtype": "float16"},
            "fabric": {"bandwidth": "100GB"},
            "slo": {"told": False},
        },
    }


def ttft_s(report: Report) -> float:
    assert report.completed == report.offered and report.ttft_s is not None
    return report.ttft_s.mean


def claims(reports: Mapping[str, Report]) -> Iterator[Claim]:
    """Each policy's mean TTFT, and against that of the global cache."""
    best = ttft_s(reports["kv_aware"])
    for policy, paper_s in PAPER_S.items():
        report, ratio = reports[policy], paper_s / PAPER_S["kv_aware"]
        name = NAMES[policy]
        yield _claim(f"{name}: mean TTFT", "s", paper_s, ttft_s(report))
        yield _claim(f"{name}: against global cache", "x", ratio, ttft_s(report) / best)
        yield _claim(f"{name}: prompt tokens found", "%", None, 100 * report.hit_rate)


def _claim(what: str, unit: str, paper: float | None, ours: float) -> Claim:
    return Claim(what=what, unit=unit, paper=paper, ours=ours, source=SOURCE, digits=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, help="conversation_trace.jsonl of kvcache-ai/Mooncake")
    parser.add_argument("--rate", type=float, default=1.0, help="multiple of the trace's")
    parser.add_argument("--requests", type=int, help="only so many of the trace, for a quick look")
    parser.add_argument("--json", type=Path, help="also write the claims to this file")
    args = parser.parse_args()
    requests = read_trace(args.trace, args.requests)
    reports = {}
    for policy in PAPER_S:
        config = Config.model_validate(cluster_of(policy), strict=False)
        reports[policy] = output.simulate(config, requests, Scale(rate=args.rate)).report
    found = list(claims(reports))
    print_claims(f"Mooncake: placement policies, {args.rate:g}x", found)
    if args.json:
        write_claims(args.json, found)


if __name__ == "__main__":
    main()
