"""What serving costs and what splitting brings, over HTTP, on one machine's two cores.

A random Llama of SmolLM-135M's shape in bf16. Router and workers are ordinary processes; the client
is this one.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench.engine.speed import EngineRun, Load, load_bench_engine
from bench.models import SMOLLM_135M, write_random_llama
from bench.report import Reading, Row, print_table, write_json
from bench.serving.http_load import Sent, closed_loop, open_loop
from bench.serving.plain_cluster import (
    HANDED_OVER,
    PlainCluster,
    WorkerPlan,
    plain_cluster,
)
from bench.serving.start_up import start_up

LOAD = Load(requests=16, prompt_tokens=512, output_tokens=64, chunk_tokens=512)
MODEL = "random Llama of SmolLM-135M's shape, untied, bf16"
SETTINGS = (
    "engine.block_size=32",
    "model.max_model_len=2304",
    "scheduler.max_running_requests=32",
    "scheduler.prefill_chunk_tokens=512",
    "engine.prefix_caching=false",  # prompts are repeated: each is to be computed
)


def _quantile(values: Iterable[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


# --- the path -----------------------------------------------------------------------------------


def path_cost(folder: Path, repeats: int) -> list[Row]:
    """The same 16 requests through the bare engine here, and through router and HTTP."""
    torch.set_num_threads(2)
    bare = EngineRun(load_bench_engine(folder, LOAD, "cpu"), LOAD)
    prompts = LOAD.prompts().tolist()
    readings: dict[str, list[float]] = {"bare": [], "served": []}
    with plain_cluster(folder, [WorkerPlan(role="both", cores=(0, 1))], SETTINGS) as cluster:
        bare.generate()
        closed_loop(cluster.http_port, prompts, LOAD.output_tokens)
        for _ in range(repeats):
            started_s = time.perf_counter()
            bare.generate()
            middle_s = time.perf_counter()
            closed_loop(cluster.http_port, prompts, LOAD.output_tokens)
            readings["bare"].append(LOAD.total_output_tokens / (middle_s - started_s))
            elapsed_s = time.perf_counter() - middle_s
            readings["served"].append(LOAD.total_output_tokens / elapsed_s)
    served, alone = (Reading(values=tuple(readings[name])) for name in ("served", "bare"))
    return [
        Row(
            name="output tokens/s through router and HTTP, 16 x (512 in, 64 out)",
            value=served.median,
            unit="tokens/s",
            against="the bare engine",
            against_value=alone.median,
            goal=0.9,
            method=f"{MODEL}, 2 threads, interleaved",
            spread=f"{served.spread()}; peer {alone.spread()}",
        )
    ]


# --- splitting ----------------------------------------------------------------------------------

SPLIT = (WorkerPlan(role="prefill", cores=(0,)), WorkerPlan(role="decode", cores=(1,)))
BOTH = (WorkerPlan(role="both", cores=(0,)), WorkerPlan(role="both", cores=(1,)))


@dataclass(slots=True, kw_only=True)
class Arm:
    """All measurements of one arrangement of workers."""

    cluster: PlainCluster
    loops: list[list[Sent]] = field(default_factory=list)
    long_sent: list[Sent] = field(default_factory=list)
    transfer_s: float = 0.0

    def measure(self, prompts: list[list[int]], long: list[int], rate_per_s: float) -> None:
        """One open loop of all prompts, then the long prompt alone."""
        port = self.cluster.http_port
        self.loops.append(open_loop(port, prompts, LOAD.output_tokens, rate_per_s=rate_per_s))
        before_s = self.cluster.metric("kvrelay:kv_transfer_seconds_total")
        self.long_sent += closed_loop(port, [long], 16)
        self.transfer_s += self.cluster.metric("kvrelay:kv_transfer_seconds_total") - before_s

    def quantile_ms(self, pick: Callable[[Sent], list[float]], q: float) -> Reading:
        """Of each loop's values, in milliseconds."""
        values = [[value for one in loop for value in pick(one)] for loop in self.loops]
        return Reading(values=tuple(1000 * _quantile(loop, q) for loop in values))

    @property
    def first_gaps_ms(self) -> Reading:
        """Of the long prompt: token 1 to 2, less the median of the later gaps."""
        gaps = [one.gaps_s[0] - statistics.median(one.gaps_s[1:]) for one in self.long_sent]
        return Reading(values=tuple(1000 * gap for gap in gaps))


def split_rows(folder: Path, repeats: int, rate_per_s: float) -> list[Row]:
    """Both arrangements stand all the time, on the same cores, and are asked in turn."""
    generator = torch.Generator().manual_seed(1)
    long = torch.randint(2, SMOLLM_135M.vocab_size, (2048,), generator=generator).tolist()
    prompts = LOAD.prompts().tolist()
    with (
        plain_cluster(folder, SPLIT, SETTINGS, router_settings=HANDED_OVER) as one,
        plain_cluster(folder, BOTH, SETTINGS) as two,
    ):
        split, both = Arm(cluster=one), Arm(cluster=two)
        for arm in (split, both):
            closed_loop(arm.cluster.http_port, prompts[:2], 4)
        for _ in range(repeats):
            for arm in (split, both):
                arm.measure(prompts, long, rate_per_s)
        memory = _memory_rows(split)
    method = (
        f"{MODEL}, one core each; {repeats} x 16 requests of 512 in, 64 out, Poisson arrivals at "
        f"{rate_per_s:g}/s, same seed, interleaved; quantiles of each loop"
    )
    return [*_latency_rows(split, both, method), *_handoff_rows(split, both), *memory]


FIGURES: dict[str, Callable[[Sent], list[float]]] = {
    "TTFT": lambda one: [one.ttft_s],
    "TPOT": lambda one: [one.tpot_s],
    "gap between tokens": lambda one: one.gaps_s,
}


def _latency_rows(split: Arm, both: Arm, method: str) -> list[Row]:
    """No output tokens/s: they are what arrives, whatever serves it."""
    rows: list[Row] = []
    for name, pick in FIGURES.items():
        for q in (0.5, 0.9, 0.99):
            found = [arm.quantile_ms(pick, q) for arm in (split, both)]
            rows.append(_split_row(f"{name} p{round(100 * q)}", found, method))
    return rows


def _split_row(name: str, found: list[Reading], method: str) -> Row:
    split, both = found
    return Row(
        name=f"{name}, 1 prefill + 1 decode worker",
        value=split.median,
        unit="ms",
        against="two workers of role both",
        against_value=both.median,
        lower_is_better=True,
        method=method,
        spread=f"{split.spread()}; peer {both.spread()}",
    )


def _handoff_rows(split: Arm, both: Arm) -> list[Row]:
    exposed_ms = [
        one.ledger_ms.get("handoff", 0.0) + one.ledger_ms.get("decode_queue", 0.0)
        for one in split.long_sent
    ]
    moved_ms = 1000 * split.transfer_s / len(split.long_sent)
    after_ms = [one.ledger_ms.get("handoff", 0.0) for one in split.long_sent]
    hidden = 1 - min(1.0, statistics.median(after_ms) / moved_ms) if moved_ms else 0.0
    gap, other = split.first_gaps_ms, both.first_gaps_ms
    method = f"{MODEL}, one core each, one request of 2,048 in, 16 out at a time"
    return [
        Row(
            name="gap between token 1 and 2 less the median later gap, 2,048-token prompt",
            value=gap.median,
            unit="ms",
            against="the same on a worker of role both",
            against_value=other.median,
            lower_is_better=True,
            method=f"{method}; handoff and decode queue in the ledger "
            f"{statistics.median(exposed_ms):.1f} ms",
            spread=f"{gap.spread()}; peer {other.spread()}",
        ),
        Row(
            name="share of the transfer hidden behind compute, 2,048-token prompt",
            value=100 * hidden,
            unit="%",
            method=f"{method}; {moved_ms:.1f} ms of gather and scatter per request, "
            f"{statistics.median(after_ms):.1f} ms of handoff after the first token",
        ),
    ]


def _memory_rows(split: Arm) -> list[Row]:
    return [
        Row(
            name=f"resident memory of {name}",
            value=mib,
            unit="MiB",
            method=f"{MODEL}, after the requests above",
        )
        for name, mib in split.cluster.resident_mib().items()
    ]


def measure(only: str | None, repeats: int, rate_per_s: float) -> list[Row]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = write_random_llama(Path(name), SMOLLM_135M)
        if only in (None, "path"):
            rows += path_cost(folder, repeats)
        if only in (None, "split"):
            rows += split_rows(folder, repeats, rate_per_s)
    if only in (None, "start"):
        rows += start_up(repeats)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rate", type=float, default=1.0, help="arrivals per second")
    parser.add_argument(
        "--only", choices=["path", "split", "start"], help="measure this part alone"
    )
    parser.add_argument("--peer", choices=["vllm"], help="its split beside ours, nothing else")
    args = parser.parse_args()
    if args.peer == "vllm":
        from bench.peer_vllm.serving import versus_vllm

        rows = versus_vllm(args.repeats, args.rate)
    else:
        rows = measure(args.only, args.repeats, args.rate)
    print_table("Serving", rows)
    if args.json:
        write_json(args.json, rows)


if __name__ == "__main__":
    main()
