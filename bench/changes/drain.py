"""How long a decode worker takes to be empty once it is told to stop: what it decodes moves.

The bundled model with room for longer contexts, one prefill and two decode workers as plain
processes. 64 streams of at least 2,000 tokens run, about half of them at the worker that gets
SIGTERM. Beside it: how long it would wait for its answers, and the longest gap that a moved stream
had.

    python -m bench.changes.drain
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import psutil

from bench.report import Row, print_table, write_json
from bench.serving.http_load import send
from bench.serving.plain_cluster import HANDED_OVER, PlainCluster, WorkerPlan, plain_cluster
from engine.bundled import checkpoint_path

STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS, CONTEXT_TOKENS = 64, 2000, 1000, 4096
GOAL_S = 5.0
POLL_S, LOOK_S = 0.005, 0.1
PLANS = (
    WorkerPlan(role="prefill", cores=(0,)),
    WorkerPlan(role="decode", cores=(0,)),
    WorkerPlan(role="decode", cores=(1,)),
)
METHOD = (
    f"{STREAMS} streams over two workers, prompts of {PROMPT_TOKENS}, answers of {OUTPUT_TOKENS} "
    "tokens; SIGTERM once all decode, to the end of its process"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """`held`: the sequences at the worker when it was told; `whole_s`: from then until the last
    answer ended; `gap_s`: the longest gap between two tokens in that time."""

    held: int
    empty_s: float
    whole_s: float
    gap_s: float


@contextmanager
def longer_model() -> Iterator[Path]:
    """The bundled checkpoint, for contexts of CONTEXT_TOKENS."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in checkpoint_path().iterdir():
            (folder / file.name).symlink_to(file)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").unlink()
        config["max_position_embeddings"] = CONTEXT_TOKENS
        (folder / "config.json").write_text(json.dumps(config))
        yield folder


def prompts() -> list[list[int]]:
    random = Random(7)
    return [[random.randrange(3, 3000) for _ in range(PROMPT_TOKENS)] for _ in range(STREAMS)]


async def drain_one(cluster: PlainCluster) -> Drained:
    """Raises AssertionError for a stream that lost or repeated a token, or ended too soon."""
    streams = [
        asyncio.create_task(send(cluster.http_port, prompt, OUTPUT_TOKENS)) for prompt in prompts()
    ]
    while await asyncio.to_thread(_decoding, cluster) < STREAMS:
        assert not any(one.done() for one in streams), "one ended before all decoded"
        await asyncio.sleep(LOOK_S)
    held = await asyncio.to_thread(_held, cluster)
    leaves, told_s = cluster.processes["decode-2"], time.perf_counter()
    leaves.terminate()
    while leaves.is_running() and leaves.status() != psutil.STATUS_ZOMBIE:
        await asyncio.sleep(POLL_S)
    empty_s = time.perf_counter() - told_s
    sent = await asyncio.gather(*streams)
    whole_s = time.perf_counter() - told_s
    assert all(len(one.token_s) == OUTPUT_TOKENS for one in sent)
    gap_s = max(gap for one in sent for gap in one.gaps_s)
    return Drained(held=held, empty_s=empty_s, whole_s=whole_s, gap_s=gap_s)


def _decoding(cluster: PlainCluster) -> float:
    return cluster.metric("kvrelay:worker_requests_running")


def _held(cluster: PlainCluster) -> int:
    return int(cluster.metric("kvrelay:worker_requests_running", 'worker="decode-2"'))


def measure(repeats: int) -> list[Row]:
    found = []
    for _ in range(repeats):
        with (
            longer_model() as model,
            plain_cluster(model, PLANS, _SETTINGS, router_settings=_ROUTER) as cluster,
        ):
            found.append(asyncio.run(drain_one(cluster)))
    return [
        Row(
            name=f"{statistics.median(one.held for one in found):.0f} streams have left a worker",
            value=statistics.median(one.empty_s for one in found),
            unit="s",
            against="goal",
            against_value=GOAL_S,
            goal=1.0,
            lower_is_better=True,
            method=METHOD,
            spread=", ".join(f"{one.empty_s:.2f} ({one.held})" for one in found),
        ),
        Row(
            name="until its answers would have ended",
            value=statistics.median(one.whole_s for one in found),
            unit="s",
            method="until the last answer ended, at the other worker",
        ),
        Row(
            name="longest gap between two tokens of a stream",
            value=1e3 * statistics.median(one.gap_s for one in found),
            unit="ms",
            method="of all streams, over their whole time",
        ),
    ]


_SETTINGS = ("drain_timeout=120s",)
_ROUTER = (*HANDED_OVER, "router.admission.policy=none")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = measure(options.repeats)
    print_table("drain", rows)
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
