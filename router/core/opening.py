"""Opens what a cluster file chooses for a router: placement, admission, dispatch, moves. Pure."""

from __future__ import annotations

from router.core.dispatch import OpenDispatch, open_direct
from router.core.migration import Moving, OpenMoves, no_moves
from router.core.policy.admission import AdmissionPolicy
from router.core.policy.admission_baselines import EarlyRejection, QueueLimit, Unlimited
from router.core.policy.choice import Policies
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
from router.core.shared_queue import open_shared_queue


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


def dispatch_of(policies: Policies) -> OpenDispatch:
    return open_shared_queue if policies.shared_queue else open_direct


def moves_of(policies: Policies) -> OpenMoves:
    return Moving if policies.move_hot_spots else no_moves
