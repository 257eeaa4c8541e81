"""Premium keeps its objectives, and gets its places, while free offers four times what the workers
can do. Tiers of `deploy/configs/qos.yaml`, real processes, clients in processes of their own.

Premium sends one after another, so it stays within its share; free sends whatever happens. Free's
bottleneck is prefill, or the places to decode in.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random
from statistics import median

import pytest

from bench.live.offered import Mix, Offered, one, poisson
from bench.live.outcome import Objectives, Outcome
from bench.live.sending import send
from bench.live.tiers.run import TierFile
from cluster.core.qos import qos_tiers, router_tiers, tier_match
from engine.bundled import checkpoint_path
from kvrelay.qos import QosTiers
from kvrelay.types import NO_OBJECTIVES, Role
from tests.integration.split_kit import (
    Cluster,
    WorkerHost,
    running_cluster,
    wait_until,
    worker_settings,
)

BUNDLED = checkpoint_path()
SHIPPED = TierFile.read()
QOS = SHIPPED.config.qos
PREMIUM = SHIPPED.objectives("premium")
FREE = replace(SHIPPED.objectives("free"), ttft_s=3.0)
"""Sooner than in the file, so that the test is over sooner."""
PLACES = 10
"""Premium's share of them is one."""
SECONDS, PATIENCE_S = 7.0, 30.0
SHORT = Mix(prompt_tokens=(128, 256), output_tokens=(8, 24))
REQUESTS = 20
HELD_UP = 2
"""By the machine, which may have other work: in one tier with free, two of three are late."""
IN_TIME = 8.0
"""Objectives are those of the file, or so many times what a request takes alone."""
CORPUS = [4 + i % 900 for i in range(6000)]
REASONS = {
    *("ttft_unreachable", "tpot_unreachable", "kv_exhausted"),
    *("slots_exhausted", "tier_share_exhausted"),
}


@dataclass(frozen=True, slots=True)
class Flood:
    """`wide` of its requests fit at once on what it fills."""

    mix: Mix
    wide: int

    def capacity_per_s(self, alone: Objectives) -> float:
        decode_s = alone.tpot_s * self.mix.output_tokens[0]
        return self.wide / (alone.ttft_s if self.wide == 1 else decode_s)


FLOODS = {
    "prompts": Flood(Mix(prompt_tokens=(900, 1100), output_tokens=(4, 8)), 1),
    "outputs": Flood(Mix(prompt_tokens=(32, 64), output_tokens=(110, 120)), PLACES),
}


def tiers(as_shipped: QosTiers) -> QosTiers:
    """Requests bring the objectives."""
    bare = (replace(tier, objectives=NO_OBJECTIVES) for tier in as_shipped.tiers)
    return replace(as_shipped, tiers=tuple(bare))


@contextmanager
def fresh_cluster(hosts: tuple[WorkerHost, WorkerHost]) -> Iterator[Cluster]:
    changes = {"profile": "auto", "dtype": "bfloat16", "prefill_chunk_tokens": 256}
    workers = [
        (
            host,
            worker_settings(
                f"{role}-0",
                role,
                BUNDLED,
                max_running_requests=PLACES,
                qos=tiers(qos_tiers(QOS)),
                **changes,
            ),
        )
        for host, role in zip(hosts, (Role.PREFILL, Role.DECODE), strict=True)
    ]
    match = tier_match(QOS)
    with running_cluster(
        BUNDLED, workers, qos=tiers(router_tiers(QOS, "predictive")), tier_match=match
    ) as running:
        yield running


def of(tier: str, asked: Objectives | None, offered: list[Offered]) -> list[Offered]:
    ttft_s, tpot_s = (None, None) if asked is None else (asked.ttft_s, asked.tpot_s)
    return [replace(one, tier=tier, ttft_s=ttft_s, tpot_s=tpot_s) for one in offered]


def one_by_one(
    cluster: Cluster, tier: str, mix: Mix, count: int, asked: Objectives | None = None
) -> list[Outcome]:
    rng = Random(count)
    offered = of(tier, asked, [one(mix, CORPUS, rng) for _ in range(count)])
    port = cluster.router.address.public.http
    return send([port], offered, patience_s=PATIENCE_S, at_once=1)


def alone(cluster: Cluster, tier: str, mix: Mix) -> Objectives:
    """What it takes without load."""
    found = one_by_one(cluster, tier, mix, 6)
    assert {one.ended for one in found} == {"done"}, found
    return Objectives(
        ttft_s=median(one.first_s or 0.0 for one in found),
        tpot_s=median(one.tpot_s or 0.0 for one in found),
    )


def slower_by(measured: Objectives, asked: Objectives) -> float:
    """For a machine that has much else to do."""
    ttft, tpot = measured.ttft_s / asked.ttft_s, measured.tpot_s / asked.tpot_s
    return max(1.0, IN_TIME * ttft, IN_TIME * tpot)


def times(objectives: Objectives, factor: float) -> Objectives:
    return Objectives(ttft_s=factor * objectives.ttft_s, tpot_s=factor * objectives.tpot_s)


def overloaded(cluster: Cluster) -> bool:
    return "kvrelay:request_rejections_total{" in cluster.metrics()


@pytest.mark.parametrize("name", FLOODS)
def test_premium_keeps_its_objectives_while_free_offers_four_times_capacity(
    hosts: tuple[WorkerHost, WorkerHost], name: str
) -> None:
    """None is refused, and nine of ten are in time."""
    with fresh_cluster(hosts) as cluster:
        late, refused = flooded(cluster, FLOODS[name])
    assert refused == 0
    assert late <= HELD_UP, f"of {REQUESTS}"


def flooded(cluster: Cluster, flood: Flood) -> tuple[int, int]:
    """How many of premium's requests missed their objectives, and how many were refused."""
    port = cluster.router.address.public.http
    free_alone = alone(cluster, "free", flood.mix)
    factor = slower_by(alone(cluster, "premium", SHORT), PREMIUM)
    rate_per_s = 4 * flood.capacity_per_s(free_alone)
    arrivals = poisson(flood.mix, CORPUS, rate_per_s=rate_per_s, seconds=SECONDS, seed=2)
    offered = of("free", times(FREE, factor), arrivals)
    asked = times(PREMIUM, factor)
    with ThreadPoolExecutor() as threads:
        sending = threads.submit(send, [port], offered, patience_s=PATIENCE_S)
        wait_until(lambda: overloaded(cluster), "free is refused")
        premium = one_by_one(cluster, "premium", SHORT, REQUESTS, asked)
        free = sending.result()
    nothing_is_lost(free, offered)
    done = [one for one in premium if one.ended == "done"]
    refused = sum(one.ended == "refused" for one in premium)
    assert len(done) + refused == REQUESTS, premium
    return sum(not one.is_good(asked) for one in done), refused


def nothing_is_lost(free: list[Outcome], offered: list[Offered]) -> None:
    """Each is refused with a reason, or has all its tokens, though it lost its place."""
    assert {one.ended for one in free} == {"done", "refused"}
    refused = [one.reason for one in free if one.ended == "refused"]
    assert {*refused} <= REASONS
    assert len(refused) >= len(free) // 10
    done = [(one, asked) for one, asked in zip(free, offered, strict=True) if not one.reason]
    assert all(one.tokens == asked.max_tokens for one, asked in done)
