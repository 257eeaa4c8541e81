"""splitwise-sim's golden table: three requests alone on one machine, and across two.

    python -m bench.papers.splitwise perf_model.csv

Paper: Splitwise (Patel et al., ISCA 2024), notebooks/example.ipynb of Mutinifni/splitwise-sim:
BLOOM-176B in 16 bits, eight ways of tensor parallelism, its three-request test trace.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.papers.goodput import simulate
from bench.papers.side_by_side import Claim, print_claims, write_claims
from cluster.sim.profiles.load import known_shape, parse_profile
from cluster.sim.profiles.measured import table_times
from cluster.sim.profiles.schema import TableProfile
from cluster.sim.trace import TraceRequest
from engine.core.step_times import StepTimes, decode_work, prefill_work

LINK_BYTES_PER_S = 200 * 2**30
"""Between two machines, one transfer at a time (configs/orchestrator_repo/schedulers)."""
SOURCE = "notebooks/example.ipynb"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """As the notebook prints it: `tbt_s` is the time after the first token over all tokens."""

    response_s: float
    ttft_s: float
    tbt_s: float
    transfer_s: float = 0.0


REQUESTS = (
    Asked(prompt_tokens=4096, output_tokens=32),
    Asked(prompt_tokens=2048, output_tokens=8),
    Asked(prompt_tokens=2048, output_tokens=16),
)
ONE_H100 = (
    Served(response_s=1.744743, ttft_s=0.649598, tbt_s=0.034223),
    Served(response_s=0.499255, ttft_s=0.251964, tbt_s=0.030911),
    Served(response_s=0.781873, ttft_s=0.251964, tbt_s=0.033119),
)
SPLIT_HA = (
    Served(response_s=2.199226, ttft_s=0.649598, tbt_s=0.048426, transfer_s=0.076563),
    Served(response_s=0.622873, ttft_s=0.251964, tbt_s=0.046364, transfer_s=0.038281),
    Served(response_s=1.003019, ttft_s=0.251964, tbt_s=0.046941, transfer_s=0.038281),
)


def machine(table: Path, hardware: str) -> StepTimes:
    """A DGX of `hardware` that serves BLOOM-176B."""
    profile = parse_profile({"name": hardware} | _profile(table, hardware), hardware)
    assert isinstance(profile, TableProfile)
    return table_times(profile, table.parent)


def serve_alone(prefill: StepTimes, decode: StepTimes, asked: Asked, moved: bool) -> Served:
    """A request that meets no other: what each of its tokens waits for adds up."""
    ttft_s = prefill.step_s(prefill_work(asked.prompt_tokens))
    transfer_s = kv_bytes(asked.prompt_tokens) / LINK_BYTES_PER_S if moved else 0.0
    steps = asked.output_tokens - 1
    after_s = transfer_s + steps * decode.step_s(decode_work(1, asked.prompt_tokens))
    return Served(
        response_s=ttft_s + after_s,
        ttft_s=ttft_s,
        tbt_s=after_s / asked.output_tokens,
        transfer_s=transfer_s,
    )


def kv_bytes(tokens: int) -> float:
    shape = known_shape("bloom-176b")
    assert shape is not None
    return tokens * shape.kv_bytes_per_token()


def golden(table: Path) -> Iterator[Claim]:
    fast, slow = machine(table, "h100-80gb"), machine(table, "a100-80gb")
    yield from _claims("one DGX-H100", ONE_H100, (fast, fast), moved=False)
    yield from _claims("Splitwise-HA", SPLIT_HA, (fast, slow), moved=True)


def _claims(
    name: str, published: tuple[Served, ...], machines: tuple[StepTimes, StepTimes], *, moved: bool
) -> Iterator[Claim]:
    for number, (asked, paper) in enumerate(zip(REQUESTS, published, strict=True)):
        ours = serve_alone(*machines, asked, moved)
        for field in ("response_s", "ttft_s", "tbt_s", "transfer_s")[: 4 if moved else 3]:
            yield Claim(
                what=f"{name}, request {number}: {field.removesuffix('_s')}",
                unit="s",
                paper=getattr(paper, field),
                ours=getattr(ours, field),
                source=SOURCE,
                digits=6,
            )


# --- the same three requests through the simulator ----------------------------------------------


def simulated(table: Path) -> Iterator[Claim]:
    """By the router, schedulers and handoff that serve. Once a link's speed is known, slabs travel
    while later layers are computed; the paper's serial transfer begins when prefill has ended."""
    yield from _simulated("one DGX-H100", ONE_H100, table, [("both", "h100-80gb")])
    split = [("prefill", "h100-80gb"), ("decode", "a100-80gb")]
    yield from _simulated("Splitwise-HA", SPLIT_HA, table, split)


def _simulated(
    name: str, published: tuple[Served, ...], table: Path, machines: list[tuple[str, str]]
) -> Iterator[Claim]:
    outcomes = simulate(_cluster(table, machines), _trace())
    for number, (outcome, paper) in enumerate(zip(outcomes, published, strict=True)):
        for field, ours in (("response", outcome.e2e_s), ("ttft", outcome.ttft_s)):
            assert ours is not None, f"request {number} failed: {outcome.failed}"
            yield Claim(
                what=f"{name}, request {number}: {field}",
                unit="s",
                paper=getattr(paper, f"{field}_s"),
                ours=ours,
                source=SOURCE,
                digits=6,
            )


def _trace() -> list[TraceRequest]:
    return [
        TraceRequest(
            arrival_s=at_s, input_tokens=one.prompt_tokens, output_tokens=one.output_tokens
        )
        for at_s, one in zip((1.0, 3.0, 4.0), REQUESTS, strict=True)
    ]


def _cluster(table: Path, machines: list[tuple[str, str]]) -> dict[str, object]:
    """Whole prompts in one step and none refused, as splitwise-sim has them; messages take next to
    no time."""
    return {
        "workers": [{"role": role} for role, _ in machines],
        "scheduler": {"prefill_chunk_tokens": 4096},
        "router": {"placement": {"local_prefill": "off"}, "admission": {"policy": "none"}},
        "simulation": {
            "pools": [{"profile": _profile(table, hardware)} for _, hardware in machines],
            "kv": {"layers": 70, "heads": 112, "head_dim": 128, "dtype": "float16"},
            "fabric": {
                "bandwidth": f"{LINK_BYTES_PER_S}B",
                "copy_bandwidth": "1000TB",
                "latency": "0.000001ms",
                "router_latency": "0.000001ms",
            },
            "slo": {"told": False},
        },
    }


def _profile(table: Path, hardware: str) -> dict[str, object]:
    return {
        "kind": "table",
        "file": str(table.absolute()),
        "where": {"model": "bloom-176b", "hardware": hardware, "tensor_parallel": "8"},
        "extrapolate": True,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path, help="perf_model.csv of Mutinifni/splitwise-sim")
    parser.add_argument("--json", type=Path, help="also write the claims to this file")
    args = parser.parse_args()
    claims = list(golden(args.table))
    print_claims("Splitwise: its simulator's example, from the table of measured steps", claims)
    through = list(simulated(args.table))
    print_claims("The same through kvrelay's simulator", through)
    if args.json:
        write_claims(args.json, [*claims, *through])


if __name__ == "__main__":
    main()
