"""KEDA says how many pods each pool has, the controller says their roles: the two don't fight.

What KEDA makes is an HPA: a pool gets what its query says over the threshold, rounded up; nothing
where that is within a tenth of what is there, and fewer only if no more were wanted for a while.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import ceil, inf
from random import Random
from typing import Any

import pytest
import yaml

from cluster.core.elastic.fleet import Fleet
from cluster.core.elastic.roles import RoleController
from kvrelay.types import Role
from router.core.load.needs import Needs
from router.live.status import _need
from tests.sim.seeds import seeds
from tests.unit.test_promql import KEDA

P, D = Role.PREFILL, Role.DECODE
TOLERANCE = 0.1
"""Of an HPA, unless its cluster says otherwise."""
HOUR_S, SETTLED_S = 3600, 1200


def scaled_objects() -> dict[Role, dict[str, Any]]:
    """# pool |-> what KEDA is told of it"""
    made = yaml.safe_load_all(KEDA.read_text())
    return {Role(one["metadata"]["name"].removeprefix("kvrelay-")): one["spec"] for one in made}


SCALED = scaled_objects()


def needs(prefill: float, decode: float) -> Needs:
    """So many workers would be busy all the time."""
    return Needs(prefill=prefill, decode=decode, prompt_s=0.2, variation=1.0, ttft_s=2.0, batch=64)


@dataclass(slots=True)
class Pods:
    """# pool |-> the roles that its workers have. Each begins with that of its pool."""

    random: Random
    pools: dict[Role, list[Role]] = field(default_factory=lambda: {P: [P, P], D: [D, D]})
    roles: RoleController = field(default_factory=RoleController)
    wanted: list[tuple[int, dict[Role, int]]] = field(default_factory=list)

    def count(self, role: Role) -> int:
        return sum(own.count(role) for own in self.pools.values())

    def desired(self, needs: Needs) -> dict[Role, float]:
        """# pool |-> what the query for it says"""
        total: Counter[str] = Counter()
        capacities = (
            (P, needs.prefill, needs.prefill_capacity),
            (D, needs.decode, needs.decode_capacity),
        )
        for role, busy, capacity in capacities:
            there = {str(pool): own.count(role) for pool, own in self.pools.items()}
            total.update(_need(busy, capacity, there).desired)
        return {pool: total[str(pool)] for pool in self.pools}

    def flip(self, needs: Needs, now_s: int) -> bool:
        fleet = Fleet(prefill=self.count(P), decode=self.count(D), running=0)
        prefill = self.roles.look(needs, fleet, now_s)
        if prefill is None:
            return False
        new, old = (P, D) if prefill > fleet.prefill else (D, P)
        for _ in range(abs(prefill - fleet.prefill)):
            pool = self.random.choice([own for own in self.pools.values() if old in own])
            pool[pool.index(old)] = new
        return True

    def scale(self, needs: Needs, now_s: int) -> bool:
        desired = self.desired(needs)
        self.wanted.append((now_s, {pool: self._asked(pool, desired[pool]) for pool in desired}))
        before = {pool: len(own) for pool, own in self.pools.items()}
        for pool in self.pools:
            self._resize(pool, now_s)
        return before != {pool: len(own) for pool, own in self.pools.items()}

    def _asked(self, pool: Role, desired: float) -> int:
        there = len(self.pools[pool])
        (trigger,) = SCALED[pool]["triggers"]
        pods = desired / float(trigger["metadata"]["threshold"])
        return there if abs(pods / there - 1) <= TOLERANCE else ceil(pods)

    def _resize(self, pool: Role, now_s: int) -> None:
        """Any may leave, whatever its role is."""
        spec, own = SCALED[pool], self.pools[pool]
        behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        since_s = now_s - behavior["scaleDown"]["stabilizationWindowSeconds"]
        lately = [found[pool] for at_s, found in self.wanted if at_s > since_s]
        count = lately[-1] if lately[-1] > len(own) else min(len(own), max(lately))
        count = max(spec["minReplicaCount"], min(spec["maxReplicaCount"], count))
        while len(own) > count:
            own.pop(self.random.randrange(len(own)))
        own.extend([pool] * (count - len(own)))


@pytest.mark.parametrize("seed", seeds(8, long=22))
def test_they_come_to_rest_and_serve_what_is_offered(seed: int) -> None:
    random = Random(seed)
    pods = Pods(random)
    for hour in range(3):
        work, changed_s = needs(random.uniform(0.1, 6), random.uniform(0.1, 6)), -inf
        for now_s in range(hour * HOUR_S, (hour + 1) * HOUR_S):
            changed = pods.flip(work, now_s)
            if now_s % SCALED[P]["pollingInterval"] == 0:
                changed |= pods.scale(work, now_s)
            changed_s = now_s if changed else changed_s
        prefill, decode = pods.count(P), pods.count(D)
        fewest = max(4, work.prefill_workers(16) + work.decode_workers(16))
        assert changed_s - hour * HOUR_S < SETTLED_S
        assert work.served(prefill, decode) >= 0.95
        assert prefill + decode <= fewest + 2, "each pool is rounded up"


def test_a_flip_leaves_the_sum_over_the_pools_alone() -> None:
    """But for rounding: more workers of a role are used a little better together."""
    random = Random(1)
    for _ in range(1000):
        p, d = random.randint(2, 8), random.randint(2, 8)
        work = needs(random.uniform(0.1, 0.8 * p), random.uniform(0.1, 0.8 * (d - 1)))
        pods = Pods(random, {P: [P] * p, D: [D] * d})
        before = pods.desired(work)
        pods.pools[D][0] = P
        after = pods.desired(work)
        assert abs(sum(after.values()) - sum(before.values())) < 1
        assert all(abs(after[pool] - before[pool]) < 1.2 for pool in after), "its own place"
