"""Dynamo's replay and our simulator side by side, in one run, on Mooncake's conversation trace.

    make bench-peers
    python -m bench.papers.dynamo conversation_trace.jsonl

Peer: ai-dynamo 1.6.1, `dynamo.replay`, offline. Both have 8 prefill and 8 decode workers, blocks of
512 tokens, its mocker's polynomial step times, chunks of 8,192 tokens, at most 256 sequences, and a
handoff that takes no time. Clients ask for up to 2,000 tokens, so our router doesn't know how many
a request will yield.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.papers.side_by_side import Claim, print_claims, write_claims
from cluster.config.schema import Config
from cluster.sim.readers import read_trace
from cluster.sim.results import output
from cluster.sim.results.report import Report, spread
from cluster.sim.simulation import Scale
from cluster.sim.trace import TraceRequest
from kvrelay.errors import KvrelayError

PEER = Path(".venv-peers/dynamo/bin/python")
PEER_PROGRAM = Path(__file__).with_name("dynamo_peer.py")
BLOCK_TOKENS = 512
WORKERS = 8
MOST_TOKENS = 2000
"""The longest output of the trace."""
AT_ONCE = {"latency": "0.001ms", "bandwidth": "1000TB", "copy_bandwidth": "1000TB"}
MATCHED = {"round_robin": "round_robin", "kv_aware": "kv_router"}  # our policy |-> its router
SOURCE = "ai-dynamo 1.6.1, this run"


class PeerMissed(KvrelayError):
    """The peer isn't there, or didn't say what it should."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    rate: float
    blocks: int

    def __str__(self) -> str:
        return f"{self.rate:g}x, {self.blocks:,} blocks"


SETTINGS = tuple(Setting(rate=rate, blocks=6000) for rate in (1.0, 4.0, 8.0)) + tuple(
    Setting(rate=rate, blocks=1500) for rate in (1.0, 4.0, 8.0)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Times in ms. The TTFTs end when the prompt is computed; `told_ttft` as its program has it,
    None of ours. `reuse` is the share of prompt tokens found in caches."""

    ttft: float
    p99_ttft: float
    tpot: float
    e2e: float
    reuse: float
    told_ttft: float | None = None
    told_p99_ttft: float | None = None


# --- the peer -----------------------------------------------------------------------------------


def parse_peer(printed: str) -> Measured:
    """Raises PeerMissed."""
    try:
        said: dict[str, Any] = json.loads(printed)
        summary = said["summary"]
        done, asked = summary["completed_requests"], summary["num_requests"]
        if done != asked:
            raise PeerMissed(f"Dynamo completed {done} of {asked} requests")
        computed = spread(said["prompt_computed_ms"])
        assert computed is not None
        return Measured(
            ttft=computed.mean,
            p99_ttft=computed.p99,
            tpot=summary["mean_tpot_ms"],
            e2e=summary["mean_e2e_latency_ms"],
            reuse=summary["prefix_cache_reused_ratio"],
            told_ttft=summary["mean_ttft_ms"],
            told_p99_ttft=summary["p99_ttft_ms"],
        )
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise PeerMissed(f"Dynamo's answer isn't its report: {error!r}") from None


def replay(trace: Path, router: str, setting: Setting) -> Measured:
    if not PEER.exists():
        raise PeerMissed(f"{PEER} isn't there: make bench-peers installs it")
    arguments = [trace, router, setting.rate, setting.blocks, WORKERS]
    done = subprocess.run(
        [str(PEER), "-P", str(PEER_PROGRAM), *map(str, arguments)],
        env=os.environ | {"DYN_LOG": "error", "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise PeerMissed(f"Dynamo's replay failed: {done.stderr[-500:]}")
    return parse_peer(done.stdout.strip().splitlines()[-1])


# --- ours ---------------------------------------------------------------------------------------


def cluster_of(policy: str, blocks: int, workers: int = WORKERS) -> dict[str, object]:
    profile = {
        "kind": "dynamo",
        "kv_capacity_tokens": blocks * BLOCK_TOKENS,
        "saturates": True,
    }
    return {
        "workers": [{"role": role, "replicas": workers} for role in ("prefill", "decode")],
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
            "profile": profile,
            "blocks": blocks,
            "block_size": BLOCK_TOKENS,
            "max_tokens": MOST_TOKENS,
            "fabric": {**AT_ONCE, "router_latency": "0.001ms"},
            "slo": {"told": False},
        },
    }


def measured(report: Report) -> Measured:
    assert report.ttft_s is not None and report.tpot_s is not None and report.e2e_s is not None
    assert report.completed == report.offered, f"{report.completed} of {report.offered}"
    return Measured(
        ttft=report.ttft_s.mean * 1e3,
        p99_ttft=report.ttft_s.p99 * 1e3,
        tpot=report.tpot_s.mean * 1e3,
        e2e=report.e2e_s.mean * 1e3,
        reuse=report.hit_rate,
    )


def simulated(requests: Sequence[TraceRequest], policy: str, setting: Setting) -> Measured:
    config = Config.model_validate(cluster_of(policy, setting.blocks), strict=False)
    return measured(output.simulate(config, requests, Scale(rate=setting.rate)).report)


# --- side by side -------------------------------------------------------------------------------


def claims(policy: str, setting: Setting, peer: Measured, ours: Measured) -> Iterator[Claim]:
    def claim(what: str, unit: str, theirs: float | None, value: float, digits: int = 1) -> Claim:
        name = f"{setting}, {policy}: {what}"
        return Claim(what=name, unit=unit, paper=theirs, ours=value, source=SOURCE, digits=digits)

    yield claim("mean TTFT", "ms", peer.ttft, ours.ttft)
    yield claim("p99 TTFT", "ms", peer.p99_ttft, ours.p99_ttft)
    yield claim("mean TPOT", "ms", peer.tpot, ours.tpot, 2)
    yield claim("mean end to end", "ms", peer.e2e, ours.e2e, 0)
    yield claim("prefix reuse", "%", 100 * peer.reuse, 100 * ours.reuse)
    yield claim("mean TTFT, as it counts", "ms", peer.told_ttft, ours.ttft)
    yield claim("p99 TTFT, as it counts", "ms", peer.told_p99_ttft, ours.p99_ttft)


def side_by_side(
    trace: Path, requests: Sequence[TraceRequest], setting: Setting
) -> Iterator[Claim]:
    for policy, router in MATCHED.items():
        peer = replay(trace, router, setting)
        yield from claims(policy, setting, peer, simulated(requests, policy, setting))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, help="conversation_trace.jsonl of kvcache-ai/Mooncake")
    parser.add_argument("--rate", type=float, action="append", help="only at these multiples")
    parser.add_argument("--json", type=Path, help="also write the claims to this file")
    args = parser.parse_args()
    found: list[Claim] = []
    try:
        requests = read_trace(args.trace)
        for setting in (one for one in SETTINGS if one.rate in (args.rate or [one.rate])):
            both = [*side_by_side(args.trace, requests, setting)]
            print_claims(f"Dynamo's replay (paper) and ours: {setting}", both)
            sys.stdout.flush()
            found += both
    except KvrelayError as error:
        sys.exit(f"dynamo: {error}")
    if args.json:
        write_claims(args.json, found)


if __name__ == "__main__":
    main()
