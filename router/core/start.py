"""How a router's core begins, so that another one can begin the same: what a cluster file chooses.
Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from random import Random

from kvrelay.qos import ONE_TIER, QosTiers
from kvrelay.types import RequestSpec
from router.core.core import RouterCore
from router.core.migration import Moving
from router.core.policy.admission import AdmissionPolicy
from router.core.policy.admission_baselines import EarlyRejection, QueueLimit, Unlimited
from router.core.policy.choice import DEFAULT_POLICIES, Policies
from router.core.policy.kv_aware import KvAware, LocalPrefill
from router.core.policy.placement import PlacementPolicy
from router.core.policy.placement_baselines import (
    LeastLoaded,
    LocalCache,
    Randomness,
    RandomPair,
    RoundRobin,
)
from router.core.policy.predictive import Predictive
from router.core.promises.promises import Promises
from router.core.router_state import Direct, RouterState
from router.core.shared_queue import open_shared_queue
from router.core.state.directory import DIRECTORY_BYTES, Directory
from router.core.state.waiting import FAILOVER_PATIENCE_S
from router.core.workers import Workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """`seed` is that of placement's randomness, and of the ids of promises: another one for each
    router. The directory takes up to `directory_bytes`. A
    request that lost its worker waits up to `failover_patience_s` for another one."""

    first_attempt: int = 0
    seed: int = 0
    policies: Policies = DEFAULT_POLICIES
    tiers: QosTiers = ONE_TIER
    preloads: tuple[RequestSpec, ...] = ()
    directory_bytes: int = DIRECTORY_BYTES
    failover_patience_s: float = FAILOVER_PATIENCE_S


def begin(beginning: Beginning) -> RouterCore:
    policies, tiers = beginning.policies, beginning.tiers
    workers = Workers(decode_alone=policies.decode_alone)
    state = RouterState(
        attempts=count(beginning.first_attempt),
        tiers=tiers,
        placing=open_placement(policies, Random(beginning.seed)),
        admitting=open_admission(policies),
        dispatch=open_shared_queue(workers, tiers) if policies.shared_queue else Direct(),
        moves=Moving(hot_spots=policies.move_hot_spots),
        workers=workers,
        directory=Directory(most_bytes=beginning.directory_bytes),
        failover_patience_s=beginning.failover_patience_s,
        promises=Promises(ids=_random_ids(Random(beginning.seed))),
    )
    return RouterCore(state, preloads=beginning.preloads)


def _random_ids(random: Random) -> Iterator[int]:
    while True:
        yield random.getrandbits(63)


def open_placement(policies: Policies, randomness: Randomness) -> PlacementPolicy:
    match policies.placement:
        case "random":
            return RandomPair(randomness)
        case "round_robin":
            return RoundRobin()
        case "least_loaded":
            return LeastLoaded()
        case "local_cache":
            return LocalCache()
        case "kv_aware":
            return LocalPrefill() if policies.local_prefill else KvAware()
        case other:
            raise AssertionError(f"no placement policy {other}")


def open_admission(policies: Policies) -> AdmissionPolicy:
    match policies.admission:
        case "none":
            return Unlimited()
        case "queue_limit":
            return QueueLimit(policies.queue_limit)
        case "early_rejection":
            return EarlyRejection()
        case "predictive":
            return Predictive()
        case other:
            raise AssertionError(f"no admission policy {other}")
