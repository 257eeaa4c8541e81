"""Time to first token with a shared system prompt: computed, found on the worker or in the pool.

A random Llama of SmolLM-135M's shape in bf16 behind one prefill and one decode worker, a core each,
and a pool node. Every request has the same 1,000 first tokens and 24 of its own. "pool" is asked of
workers that were started after those which computed it had gone.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

from bench.models import SMOLLM_135M, write_random_llama
from bench.report import Row, print_table, write_json
from bench.serving.http_load import closed_loop
from bench.serving.plain_cluster import (
    HANDED_OVER,
    PlainCluster,
    WorkerPlan,
    plain_cluster,
    pool_node,
)

SHARED_TOKENS, OWN_TOKENS, OUTPUT_TOKENS = 1000, 24, 4
PLANS = [WorkerPlan(role="prefill", cores=(0,)), WorkerPlan(role="decode", cores=(1,))]
SETTINGS = ("model.max_model_len=2304", "scheduler.prefill_chunk_tokens=512")
POOL = "bench-prefix-live"
METHOD = (
    f"{SHARED_TOKENS} shared tokens and {OWN_TOKENS} of its own, one request at a time, "
    "over HTTP, medians"
)


def _prompt(seed: int, *, shared_seed: int) -> list[int]:
    shared, own = random.Random(shared_seed), random.Random(10_000 + seed)
    return [
        *(shared.randrange(2, 30_000) for _ in range(SHARED_TOKENS)),
        *(own.randrange(2, 30_000) for _ in range(OWN_TOKENS)),
    ]


def _ttft_ms(cluster: PlainCluster, prompt: list[int]) -> float:
    (sent,) = closed_loop(cluster.http_port, [prompt], OUTPUT_TOKENS)
    return 1000 * sent.ttft_s


def _cluster(folder: Path) -> AbstractContextManager[PlainCluster]:
    return plain_cluster(folder, PLANS, SETTINGS, pool=POOL, router_settings=HANDED_OVER)


def measure(folder: Path, repeats: int) -> list[Row]:
    """Fresh prefixes against the one that is there by now, in turn."""
    cold, warm, pooled = [], [], []
    with pool_node(POOL):
        with _cluster(folder) as cluster:
            _ttft_ms(cluster, _prompt(0, shared_seed=0))
            for i in range(1, repeats + 1):
                cold.append(_ttft_ms(cluster, _prompt(i, shared_seed=i)))
                warm.append(_ttft_ms(cluster, _prompt(i, shared_seed=0)))
        with _cluster(folder) as cluster:
            _ttft_ms(cluster, _prompt(0, shared_seed=999))
            for i in range(1, repeats + 1):
                pooled.append(_ttft_ms(cluster, _prompt(100 + i, shared_seed=i)))
    computed = statistics.median(cold)
    return [
        _row("TTFT, prefix on the worker", warm, computed),
        _row("TTFT, prefix in the pool", pooled, computed),
    ]


def _row(name: str, found: list[float], computed_ms: float) -> Row:
    return Row(
        name=name,
        value=statistics.median(found),
        unit="ms",
        against="computed",
        against_value=computed_ms,
        lower_is_better=True,
        method=METHOD,
        spread=f"{min(found):.1f} to {max(found):.1f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_random_llama(Path(scratch), SMOLLM_135M)
        rows = measure(folder, arguments.repeats)
    print_table("A shared system prompt", rows)
    if arguments.json is not None:
        write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
