"""Premium keeps its objectives, and gets its places, while free offers four times what the workers
can do. Tiers of `deploy/configs/qos.yaml`, real processes, clients in processes of their own.

Premium sends one after another, so it stays within its share; free sends whatever happens. Free's
bottleneck is prefill, or the places to decode in.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from random import Random
from statistics import median

import pytest

from bench.live.offered import Mix, Offered, one, poisson
from bench.live.outcome import Outcome
from bench.live.sending import send
from cluster.config_load import load_config
from cluster.qos import qos_tiers, router_tiers, tier_match
from engine.bundled import checkpoint_path
from kvrelay.qos import QosTiers
from kvrelay.types import Role
from tests.integration.split_kit import (
    REPOSITORY,
    Cluster,
    WorkerHost,
    running_cluster,
    wait_until,
    worker_settings,
)

BUNDLED = checkpoint_path()
QOS = load_config(REPOSITORY / "deploy" / "configs" / "qos.yaml").qos
PLACES = 10
"""Premium's share of them is one."""
SECONDS, PATIENCE_S = 7.0, 30.0
SHORT = Mix(prompt_tokens=(128, 256), output_tokens=(8, 24))
REQUESTS = 20
FREE_TTFT_S = 3.0
"""Sooner than in the file, so that the test is over sooner."""
REASONS = {
    *("ttft_unreachable", "tpot_unreachable", "kv_exhausted"),
    *("slots_exhausted", "tier_share_exhausted"),
}


@dataclass(frozen=True, slots=True)
class Flood:
    """`alone_s` of a request of `mix` on what it fills, at most; `wide` of which fit at once."""

    mix: Mix
    wide: int

    def capacity_per_s(self, ttft_s: float, tpot_s: float) -> float:
        return self.wide / (ttft_s if self.wide == 1 else tpot_s * self.mix.output_tokens[0])


FLOODS = {
    "prompts": Flood(Mix(prompt_tokens=(900, 1100), output_tokens=(4, 8)), 1),
    "outputs": Flood(Mix(prompt_tokens=(32, 64), output_tokens=(110, 120)), PLACES),
}


def tiers(all_of_them: QosTiers) -> QosTiers:
    free = all_of_them["free"]
    sooner = replace(free, objectives=replace(free.objectives, ttft_s=FREE_TTFT_S))
    others = (tier for tier in all_of_them.tiers if tier is not free)
    return replace(all_of_them, tiers=(*others, sooner))


@pytest.fixture
def cluster(hosts: tuple[WorkerHost, WorkerHost]) -> Iterator[Cluster]:
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
        BUNDLED, workers, qos=tiers(router_tiers(QOS)), tier_match=match
    ) as running:
        yield running


def of(tier: str, offered: list[Offered]) -> list[Offered]:
    return [replace(each, tier=tier) for each in offered]


def one_by_one(cluster: Cluster, tier: str, mix: Mix, count: int, seed: int) -> list[Outcome]:
    rng, corpus = Random(seed), range(300, 6000)
    offered = of(tier, [one(mix, corpus, rng) for _ in range(count)])
    port = cluster.router.address.http_port
    return send([port], offered, patience_s=PATIENCE_S, at_once=1)


def flood(cluster: Cluster, of_what: Flood) -> list[Offered]:
    """At four times the capacity, by what one takes alone."""
    alone = one_by_one(cluster, "free", of_what.mix, 4, seed=1)
    capacity_per_s = of_what.capacity_per_s(
        median(each.first_s or 0.0 for each in alone), median(each.tpot_s or 0.0 for each in alone)
    )
    rate = 4 * capacity_per_s
    found = poisson(of_what.mix, range(300, 6000), rate_per_s=rate, seconds=SECONDS, seed=2)
    return of("free", found)


def overloaded(cluster: Cluster) -> bool:
    return (
        'request_rejections_total{model_name="test-model",reason='
        in cluster.http.get("/metrics").text
    )


@pytest.mark.parametrize("name", FLOODS)
def test_premium_keeps_its_objectives_while_free_offers_four_times_capacity(
    cluster: Cluster, name: str
) -> None:
    offered = flood(cluster, FLOODS[name])
    port = cluster.router.address.http_port
    with ThreadPoolExecutor() as threads:
        free = threads.submit(send, [port], offered, patience_s=PATIENCE_S)
        wait_until(lambda: overloaded(cluster), "free is refused")
        premium = one_by_one(cluster, "premium", SHORT, REQUESTS, seed=3)
        others = free.result()

    assert {each.ended for each in premium} == {"done"}, [each.reason for each in premium]
    objectives = QOS.tiers["premium"]
    assert objectives.ttft is not None and objectives.tpot is not None
    assert max(each.first_s or 0.0 for each in premium) <= objectives.ttft
    assert max(each.tpot_s or 0.0 for each in premium) <= objectives.tpot

    assert {each.ended for each in others} == {"done", "refused"}
    refused = [each for each in others if each.ended == "refused"]
    assert {each.reason for each in refused} <= REASONS
    assert len(refused) >= len(others) // 4
    done = [(each, what) for each, what in zip(others, offered, strict=True) if not each.reason]
    assert all(each.tokens == what.max_tokens for each, what in done)
    if name == "outputs":
        preempted = [view.counters.preemptions for view in views(cluster)]
        assert sum(preempted) >= 1


def views(cluster: Cluster):
    return cluster.router.process.dispatcher.core.workers.values()
