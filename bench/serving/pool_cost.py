"""What a pool node costs when nothing is found in it, and what it brings when a worker dies.

A random Llama of SmolLM-135M's shape in bf16 behind one prefill and one decode worker, a core each.
One cluster has a pool node and the next one has none, in turn. Every prompt is new. Then a decode
worker dies under streams, and another one goes on with them.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from bench.models import SMOLLM_135M, write_random_llama
from bench.report import Reading, Row, print_table, write_json
from bench.serving.http_load import Sent, closed_loop, open_loop
from bench.serving.plain_cluster import (
    HANDED_OVER,
    PlainCluster,
    WorkerPlan,
    plain_cluster,
    pool_node,
)

REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 12, 512, 64
RATE_PER_S = 0.8
"""About 0.6 of what two cores can do."""
STREAMS, STREAM_TOKENS, TOKENS_BEFORE_DEATH = 4, 640, 400
GOAL = 1.01
PAIR = [WorkerPlan(role="prefill", cores=(0,)), WorkerPlan(role="decode", cores=(1,))]
SETTINGS = ("model.max_model_len=2304", "scheduler.prefill_chunk_tokens=512")


@dataclass(slots=True, kw_only=True)
class Arm:
    """One cluster and what was measured of it."""

    cluster: PlainCluster
    draw: random.Random
    ttft_ms: float = 0.0
    gap_ms: float = 0.0
    cpu_s: float = 0.0
    resident_mib: float = 0.0

    def prompts(self, count: int) -> list[list[int]]:
        return [
            [self.draw.randrange(2, 30_000) for _ in range(PROMPT_TOKENS)] for _ in range(count)
        ]

    def measure(self) -> None:
        before_s = self.cluster.cpu_s()
        sent = open_loop(
            self.cluster.http_port, self.prompts(REQUESTS), OUTPUT_TOKENS, rate_per_s=RATE_PER_S
        )
        self.cpu_s = (self.cluster.cpu_s() - before_s) / REQUESTS
        self.ttft_ms = 1000 * statistics.median(one.ttft_s for one in sent)
        self.gap_ms = 1000 * statistics.median(gap for one in sent for gap in one.gaps_s)
        self.resident_mib = sum(self.cluster.resident_mib().values())


@contextmanager
def _arm(folder: Path, plans: Sequence[WorkerPlan], seed: int, pool: str | None) -> Iterator[Arm]:
    with ExitStack() as stack:
        node = stack.enter_context(pool_node(pool)) if pool is not None else None
        cluster = stack.enter_context(
            plain_cluster(folder, plans, SETTINGS, pool=pool, router_settings=HANDED_OVER)
        )
        if node is not None:
            cluster.processes["pool-node"] = node
        yield Arm(cluster=cluster, draw=random.Random(seed))


def without_hits(folder: Path, repeats: int) -> list[Row]:
    """One cluster at a time: two would share the cores, and only one would be pinned to them."""
    pooled: list[Arm] = []
    plain: list[Arm] = []
    for number in range(repeats):
        turns = [("bench-pool-cost", pooled), (None, plain)]
        for pool, found in turns if number % 2 else reversed(turns):
            with _arm(folder, PAIR, number, pool) as arm:
                closed_loop(arm.cluster.http_port, arm.prompts(2), 4)
                arm.measure()
                found.append(arm)
    rows = [
        ("CPU of a request, all processes", "s", attrgetter("cpu_s"), GOAL),
        ("TTFT, median", "ms", attrgetter("ttft_ms"), GOAL),
        ("gap between tokens, median", "ms", attrgetter("gap_ms"), GOAL),
        ("resident memory, all processes", "MiB", attrgetter("resident_mib"), None),
    ]
    return [
        _row(name, unit, [pick(arm) for arm in pooled], [pick(arm) for arm in plain], goal)
        for name, unit, pick, goal in rows
    ]


def _row(
    name: str,
    unit: str,
    pooled: Sequence[float],
    plain: Sequence[float],
    goal: float | None = GOAL,
) -> Row:
    ours, theirs = Reading(values=tuple(pooled)), Reading(values=tuple(plain))
    return Row(
        name=f"{name}, with a pool node, nothing found",
        value=ours.median,
        unit=unit,
        against="without a pool node",
        against_value=theirs.median,
        lower_is_better=True,
        goal=goal,
        method=f"{len(pooled)} x {REQUESTS} new prompts of {PROMPT_TOKENS} tokens, "
        f"{OUTPUT_TOKENS} out, Poisson arrivals at {RATE_PER_S:g}/s, in turn",
        spread=f"{ours.spread()}; without {theirs.spread()}",
    )


# --- a death ------------------------------------------------------------------------------------

PAIR_AND_SPARE = [*PAIR, WorkerPlan(role="decode", cores=(1,))]


def after_a_death(folder: Path, repeats: int) -> list[Row]:
    found: dict[str, list[tuple[float, float]]] = {"pool": [], "none": []}
    for number in range(repeats):
        for name, pool in (("pool", "bench-pool-death"), ("none", None)):
            with _arm(folder, PAIR_AND_SPARE, number, pool) as arm:
                found[name].append(_kill_under_streams(arm))
    rows: list[tuple[str, str, Callable[[tuple[float, float]], float]]] = [
        ("longest pause of a stream when its decode worker dies", "ms", lambda one: one[0]),
        ("prompt tokens computed again", "tokens", lambda one: one[1]),
    ]
    return [
        _death_row(name, unit, *([pick(o) for o in v] for v in found.values()))
        for name, unit, pick in rows
    ]


def _kill_under_streams(arm: Arm) -> tuple[float, float]:
    """(longest pause of a stream in ms, prompt tokens computed after the death)"""
    cluster, prompts = arm.cluster, arm.prompts(STREAMS)
    closed_loop(cluster.http_port, arm.prompts(2), 4)
    computed: list[float] = []
    killer = threading.Thread(target=_kill_one, args=(cluster, computed))
    killer.start()
    sent: list[Sent] = open_loop(cluster.http_port, prompts, STREAM_TOKENS, rate_per_s=8.0)
    killer.join()
    pause_ms = 1000 * max(gap for one in sent for gap in one.gaps_s)
    return pause_ms, cluster.metric("kvrelay:worker_prompt_tokens_total") - computed[0]


def _kill_one(cluster: PlainCluster, computed: list[float]) -> None:
    """When all prompts are computed, and enough tokens generated."""
    prompts, generated = (f"kvrelay:worker_{kind}_tokens_total" for kind in ("prompt", "generated"))
    begun = {name: cluster.metric(name) for name in (prompts, generated)}
    wanted = {prompts: STREAMS * PROMPT_TOKENS, generated: TOKENS_BEFORE_DEATH}
    while any(cluster.metric(name) - begun[name] < most for name, most in wanted.items()):
        time.sleep(0.05)
    computed.append(cluster.metric(prompts))
    cluster.processes.pop("decode-1").kill()


def _death_row(name: str, unit: str, pooled: Sequence[float], plain: Sequence[float]) -> Row:
    ours, theirs = Reading(values=tuple(pooled)), Reading(values=tuple(plain))
    return Row(
        name=f"{name}, with a pool node",
        value=ours.median,
        unit=unit,
        against="without a pool node",
        against_value=theirs.median,
        lower_is_better=True,
        method=f"{STREAMS} streams of {PROMPT_TOKENS} in, {STREAM_TOKENS} out; 1 prefill, 2 decode "
        f"workers, {len(pooled)} deaths each",
        spread=f"{ours.spread()}; without {theirs.spread()}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--deaths", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_random_llama(Path(scratch), SMOLLM_135M)
        rows = without_hits(folder, arguments.repeats)
        print_table("A pool node that finds nothing", rows)
        if arguments.deaths:
            rows += (deaths := after_a_death(folder, arguments.deaths))
            print_table("A pool node after a death", deaths)
    if arguments.json is not None:
        write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
