"""Opens what a cluster file chooses for a router: placement, admission, dispatch, moves. Pure."""

from __future__ import annotations

from router.admitting.early_rejection import EarlyRejection
from router.admitting.policy import AdmissionPolicy
from router.admitting.predictive import Predictive
from router.admitting.queue_limit import QueueLimit
from router.admitting.unlimited import Unlimited
from router.dispatching import OpenDispatch, open_direct
from router.moving import Moving, OpenMoves, no_moves
from router.placing.kv_aware import KvAware
from router.placing.least_loaded import LeastLoaded
from router.placing.local_cache import LocalCache
from router.placing.local_prefill import LocalPrefill
from router.placing.policy import PlacementPolicy
from router.placing.random_pair import Randomness, RandomPair
from router.placing.round_robin import RoundRobin
from router.policies import Policies
from router.shared_queue import open_shared_queue


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
