"""How a router's core begins, so that another one can begin the same."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from random import Random

from kvrelay.qos import ONE_TIER, QosTiers
from kvrelay.types import RequestSpec
from router.core.core import RouterCore
from router.core.opening import dispatch_of, moves_of, open_admission, open_placement
from router.core.policy.choice import DEFAULT_POLICIES, Policies
from router.core.workers import Workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """`seed` is that of placement's randomness."""

    first_attempt: int = 0
    seed: int = 0
    policies: Policies = DEFAULT_POLICIES
    tiers: QosTiers = ONE_TIER
    preloads: tuple[RequestSpec, ...] = ()


def begin(beginning: Beginning) -> RouterCore:
    return RouterCore(
        attempts=count(beginning.first_attempt),
        preloads=beginning.preloads,
        placing=open_placement(beginning.policies, Random(beginning.seed)),
        admitting=open_admission(beginning.policies),
        tiers=beginning.tiers,
        open_dispatch=dispatch_of(beginning.policies),
        open_moves=moves_of(beginning.policies),
        workers=Workers(decode_alone=beginning.policies.decode_alone),
    )
