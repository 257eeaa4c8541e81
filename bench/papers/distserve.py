"""DistServe's motivating figure: one GPU that does both, against two that prefill and one that
decodes.

    python -m bench.papers.distserve distserve-sim/

Paper: DistServe (Zhong et al., OSDI 2024), figure 1: a 13B model on A100-80G, 512 tokens in and 64
out, Poisson arrivals, 90 % attainment: 1.6 requests/s on one GPU, 5.6 where it only prefills, 10
where it only decodes, so 3.3 per GPU with two and one. Step times: the polynomials that its
simulator fitted for OPT-13B on its own engine and on vLLM. The text at hand does not say the
figure's objectives (time to first token, and per token after it): one pair is ours, the second
that of the simulator's README.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from bench.papers.goodput import Objectives, attainment, highest_rate, poisson, simulate
from bench.papers.side_by_side import Claim, print_claims, write_claims

INPUT_TOKENS, OUTPUT_TOKENS = 512, 64
OBJECTIVES = (Objectives(ttft_s=0.4, tpot_s=0.04), Objectives(ttft_s=0.2, tpot_s=0.1))
ENGINES = ("vllm", "distserve")
SOURCE = "OSDI'24 figure 1"
_KV_BLOCKS = 66144 // 16
"""max_num_tokens.csv: what vLLM keeps of OPT-13B on an A100-80G."""
_ANY_S = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """`gpus` are those that the rate is divided by: where one role is judged, the other's are many
    and free."""

    name: str
    pools: tuple[tuple[str, int], ...]  # role and workers
    gpus: int
    paper_per_gpu: float
    judged: Literal["both", "ttft", "tpot"] = "both"

    def objectives(self, both: Objectives) -> Objectives:
        match self.judged:
            case "both":
                return both
            case "ttft":
                return replace(both, tpot_s=_ANY_S)
            case "tpot":
                return replace(both, ttft_s=_ANY_S)


ONE = Fleet(name="one GPU does both", pools=(("both", 1),), gpus=1, paper_per_gpu=1.6)
SPLIT = Fleet(
    name="2 prefill, 1 decode", pools=(("prefill", 2), ("decode", 1)), gpus=3, paper_per_gpu=3.3
)
PREFILLS = Fleet(
    name="one GPU prefills",
    pools=(("prefill", 1), ("decode", 4)),
    gpus=1,
    paper_per_gpu=5.6,
    judged="ttft",
)
DECODES = Fleet(
    name="one GPU decodes",
    pools=(("prefill", 8), ("decode", 1)),
    gpus=1,
    paper_per_gpu=10.0,
    judged="tpot",
)


def cluster_of(fleet: Fleet, profile: dict[str, object]) -> dict[str, object]:
    """OPT-13B keeps 40 layers of 40 heads of 128; NVLink joins the GPUs."""
    return {
        "workers": [{"role": role, "replicas": count} for role, count in fleet.pools],
        "scheduler": {"prefill_chunk_tokens": INPUT_TOKENS, "max_running_requests": 256},
        "router": {"placement": {"local_prefill": "off"}},
        "simulation": {
            "profile": profile,
            "blocks": _KV_BLOCKS,
            "kv": {"layers": 40, "heads": 40, "head_dim": 128, "dtype": "float16"},
            "fabric": {"bandwidth": "300GB"},
        },
    }


def goodput(config: dict[str, object], objectives: Objectives, count: int, seed: int) -> float:
    """Requests a second that the whole fleet serves."""

    def holds(rate_per_s: float) -> bool:
        requests = poisson(count, rate_per_s, INPUT_TOKENS, OUTPUT_TOKENS, seed)
        return attainment(simulate(config, requests), objectives) >= objectives.attainment

    return highest_rate(holds, start=4.0)


def claims(data: Path, engine: str, count: int, seed: int) -> Iterator[Claim]:
    file = data / f"profiler-a100-80g.{engine}.json"
    profile: dict[str, object] = {
        "kind": "distserve",
        "file": str(file.absolute()),
        "model": "facebook/opt-13b",
    }
    for both in OBJECTIVES:
        title = f"{engine}, {both.ttft_s:g} s and {both.tpot_s * 1e3:g} ms"
        found = {}
        for fleet in (ONE, PREFILLS, DECODES, SPLIT):
            rate = goodput(cluster_of(fleet, profile), fleet.objectives(both), count, seed)
            found[fleet.name] = rate / fleet.gpus
            yield _claim(f"{title}: {fleet.name}", fleet.paper_per_gpu, found[fleet.name])
        if found[ONE.name]:
            yield _claim(f"{title}: ratio", 2.1, found[SPLIT.name] / found[ONE.name], unit="x")


def _claim(what: str, paper: float, ours: float, unit: str = "req/s per GPU") -> Claim:
    return Claim(what=what, unit=unit, paper=paper, ours=ours, source=SOURCE, digits=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="folder with profiler-a100-80g.*.json")
    parser.add_argument("--requests", type=int, default=500, help="at each rate tried")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the claims to this file")
    args = parser.parse_args()
    found = [c for engine in ENGINES for c in claims(args.data, engine, args.requests, args.seed)]
    print_claims("DistServe: colocated against disaggregated, OPT-13B, 512 in, 64 out", found)
    if args.json:
        write_claims(args.json, found)


if __name__ == "__main__":
    main()
