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
from tests.integration.test_cluster_life import ask_all
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
