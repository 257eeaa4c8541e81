"""Which pools of a cluster follow the offered work, and how, as its file says. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.config.elastic import ElasticSection
from cluster.config.workers import WorkerPool
from cluster.core.elastic.rules import Bounds, ElasticRules, RoleRules, SizedPool
from kvrelay.errors import ConfigError
from kvrelay.types import Role


def elastic_rules(pools: Sequence[WorkerPool], section: ElasticSection) -> ElasticRules | None:
    """None: nothing follows it. Raises ConfigError where two pools would follow the same work."""
    following = [pool for pool in pools if pool.role is None or not pool.replicas.is_fixed]
    if not following:
        return None
    sized = [pool for pool in following if not pool.replicas.is_fixed]
    if sized:
        _check_one_owner(following)
    return ElasticRules(
        roles=role_rules(section),
        flexible=frozenset(pool.label for pool in following if pool.role is None),
        sized={pool.role: SizedPool(pool.label, _bounds(pool)) for pool in sized},
        cooldown_s=section.cooldown,
        start_s=section.start_up,
    )


def role_rules(section: ElasticSection) -> RoleRules:
    return RoleRules(
        least_prefill=section.least_prefill,
        least_decode=section.least_decode,
        gain=section.gain,
        dwell_s=section.dwell,
        window_s=section.window,
    )


def _bounds(pool: WorkerPool) -> Bounds:
    return Bounds(least=pool.replicas.min, most=pool.replicas.max)


def _check_one_owner(following: Sequence[WorkerPool]) -> None:
    """Each number follows work that no other one follows. Raises ConfigError."""
    roles = [pool.role for pool in following]
    if Role.BOTH in roles:
        raise ConfigError(
            "workers: a pool of role both has a range of replicas: give it role auto, so that it "
            "is known what its workers shall do"
        )
    if len(roles) > (1 if None in roles else len(set(roles))):
        names = " and ".join(pool.label for pool in following)
        raise ConfigError(
            f"workers: the pools {names} would follow the same work: let one of role auto do so, "
            "or one of role prefill and one of role decode, and give others a number of replicas"
        )
