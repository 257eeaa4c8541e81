"""Opens placement and admission policies by the names that a cluster file gives them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from router.admitting.early_rejection import EarlyRejection
from router.admitting.policy import AdmissionPolicy
from router.admitting.predictive import Predictive
from router.admitting.queue_limit import QueueLimit
from router.admitting.unlimited import Unlimited
from router.placing.kv_aware import KvAware
from router.placing.least_loaded import LeastLoaded
from router.placing.local_cache import LocalCache
from router.placing.policy import PlacementPolicy
from router.placing.random_pair import Randomness, RandomPair
from router.placing.round_robin import RoundRobin


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """As in the cluster file's `router.placement` and `router.admission`."""

    placement: str = "kv_aware"
    admission: str = "predictive"
    queue_limit: int = 64
    move_hot_spots: bool = False
    local_prefill: bool = False
    shared_queue: bool = False

    @property
    def decode_alone(self) -> bool:
        """Decode workers can do without prefill workers."""
        return self.local_prefill and self.placement == "kv_aware"


DEFAULT_POLICIES = Policies()


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
            return KvAware(local_prefill=policies.local_prefill)
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
