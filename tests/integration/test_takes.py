"""Two unlike pools of real workers: each computes the prompts that it takes, until one is gone."""

from __future__ import annotations

import random
import re
from pathlib import Path

import yaml

from kvrelay.qos import QosTier, QosTiers
from kvrelay.types import PromptRule, Role
from router.text.request_fields import TierMatch
from tests.integration.split_kit import (
    Cluster,
    WorkerHost,
    running_cluster,
    wait_until,
    worker_settings,
)
from tests.integration.test_cluster_life import TOKENS, ask_all
from tests.integration.test_roles import SLOW
from tests.models import VOCAB_SIZE

TIERS = QosTiers(
    tiers=(QosTier(name="gold"), QosTier(name="batch", priority=20)), default="gold", ladder=None
)
MATCH = TierMatch(values={"gold": "gold", "batch": "batch"})
SHORT = PromptRule(max_prompt_tokens=99)
LONG_BATCH = PromptRule(min_prompt_tokens=100, tiers=("batch",))


def drawn(lengths: range, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def shares(cluster: Cluster, what: str) -> dict[str, float]:
    """# pool |-> its prompts, or its tokens"""
    line = rf'^kvrelay:pool_prefilled_{what}_total{{.*pool="(\w+)".*}} (\S+)$'
    return {pool: float(value) for pool, value in re.findall(line, cluster.metrics(), re.M)}


def prompt_s(cluster: Cluster, name: str, chunks: int) -> float:
    """Of 384 tokens, by the worker's own step times."""
    (times,) = [one.step_times for one in cluster.router.workers() if one.name == name]
    return chunks * times.prefill_overhead_s + 384 * times.prefill_token_s


def test_each_pool_computes_what_it_takes_until_one_is_killed(
    llama: Path, hosts: tuple[WorkerHost, WorkerHost], tmp_path: Path
) -> None:
    """By its own step times the pool with long prompts is so slow that it would get none."""
    times = tmp_path / "times.yaml"
    times.write_text(yaml.safe_dump(SLOW))
    long, short = drawn(range(100, 400, 60), seed=1), drawn(range(20, 100, 20), seed=2)
    alone = worker_settings("both-0", Role.BOTH, llama)
    with running_cluster(llama, [(hosts[0], alone)]) as cluster:
        expected = {kind: ask_all(cluster, asked) for kind, asked in (("l", long), ("s", short))}
    with WorkerHost() as doomed:
        slow = {"takes": LONG_BATCH, "profile": str(times), "qos": TIERS}
        workers = [
            (doomed, worker_settings("cpu-0", Role.PREFILL, llama, **slow)),
            (hosts[0], worker_settings("gpu-0", Role.PREFILL, llama, takes=SHORT, qos=TIERS)),
            (hosts[1], worker_settings("decode-0", Role.DECODE, llama, qos=TIERS)),
        ]
        with running_cluster(llama, workers, qos=TIERS, tier_match=MATCH) as cluster:
            assert shares(cluster, "prompts") == {"cpu": 0, "gpu": 0}
            assert ask_all(cluster, long, tier="batch") == expected["l"]
            assert ask_all(cluster, short, tier="batch") == expected["s"]
            assert shares(cluster, "prompts") == {"cpu": len(long), "gpu": len(short)}
            tokens = {"cpu": sum(map(len, long)), "gpu": sum(map(len, short))}
            assert shares(cluster, "tokens") == tokens

            # nobody takes these, so anybody gets them
            others = drawn(range(100, 400, 60), seed=3)
            assert len(ask_all(cluster, others, tier="gold")) == len(others)
            before = shares(cluster, "prompts")
            assert sum(before.values()) == len(long) + len(short) + len(others)

            doomed.kill()
            wait_until(lambda: len(cluster.router.workers()) == 2, "the router has missed cpu-0")
            assert ask_all(cluster, long, tier="batch") == expected["l"]
            assert shares(cluster, "prompts") == {**before, "gpu": before["gpu"] + len(long)}


def test_a_slower_pool_gets_what_the_faster_one_would_be_done_with_later(
    llama: Path, hosts: tuple[WorkerHost, WorkerHost]
) -> None:
    """No rule and no weight: each has timed its own steps. One has not compiled the model, and
    takes twice as many steps."""
    asked = drawn(range(300, 396, 6), seed=4)
    alone = worker_settings("both-0", Role.BOTH, llama)
    with running_cluster(llama, [(hosts[0], alone)]) as cluster:
        expected = ask_all(cluster, asked)
    timed = {"profile": "auto", "prefix_caching": False}
    slow = {"compile": "off", "prefill_chunk_tokens": 32}
    with WorkerHost() as another:
        workers = [
            (another, worker_settings("slow-0", Role.PREFILL, llama, **slow, **timed)),
            (hosts[0], worker_settings("fast-0", Role.PREFILL, llama, **timed)),
            (hosts[1], worker_settings("decode-0", Role.DECODE, llama)),
        ]
        with running_cluster(llama, workers) as cluster:
            slow_s, fast_s = prompt_s(cluster, "slow-0", 12), prompt_s(cluster, "fast-0", 6)
            assert slow_s > 1.2 * fast_s, "they are unlike"
            plain = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
            at_once = cluster.completion(asked, **plain)
            assert [one["token_ids"] for one in at_once["choices"]] == expected
            told = shares(cluster, "prompts")
            assert 0 < told["slow"] < told["fast"], (slow_s, fast_s)
            assert sum(told.values()) == len(asked)
