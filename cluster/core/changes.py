"""What another cluster file, or another number of workers, changes in a cluster that runs. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace

from cluster.core.elastic.rules import ElasticRules
from cluster.core.plan import ClusterPlan, RouterPlan, WorkerPoolPlan
from cluster.core.settings import PoolNodeSettings, RouterSettings, WorkerSettings
from kvrelay.errors import ConfigError
from kvrelay.types import Role

SECRET = ("access", "cluster_key", "public_tls", "keys")
BY_ITSELF = ("name", "device_share")
PORTS = ("http_port", "grpc_port", "internal_http_port", "internal_grpc_port")
SHOWN = 4
MOST_WORKERS = 100_000
"""Of a pool: what is more was not meant, and would occupy the controller."""


def with_count(plan: ClusterPlan, pool: str, count: int) -> ClusterPlan:
    """Raises ConfigError if there is no such pool, or if nobody would be left to do its work."""
    if plan.worker_pool(pool) is None:
        pools = ", ".join(one.name for one in plan.worker_pools)
        raise ConfigError(f"no pool of workers is named {pool}: there are {pools}")
    if not 0 <= count <= MOST_WORKERS:
        raise ConfigError(f"{pool}={count}: expected 0 to {MOST_WORKERS} workers")
    counted = (replace(p, count=count) if p.name == pool else p for p in plan.worker_pools)
    found = replace(plan, worker_pools=_sharing(tuple(counted)))
    if problem := cannot_serve(found):
        raise ConfigError(f"{pool}={count}: {problem}")
    return found


def cannot_serve(plan: ClusterPlan) -> str | None:
    """Why a cluster of this plan could serve nobody."""
    workers = Counter(worker.settings.role for worker in plan.workers)
    if workers[Role.BOTH] or (workers[Role.PREFILL] and workers[Role.DECODE]):
        return None
    missing = next(role for role in (Role.PREFILL, Role.DECODE) if not workers[role])
    return f"no {missing} worker would be left"


def _sharing(pools: tuple[WorkerPoolPlan, ...]) -> tuple[WorkerPoolPlan, ...]:
    """Workers on the CPU share its memory."""
    share = max(1, sum(pool.count for pool in pools if not pool.on_gpu))
    return tuple(
        pool if pool.on_gpu else replace(pool, settings=replace(pool.settings, device_share=share))
        for pool in pools
    )


def successor(running: ClusterPlan, wanted: ClusterPlan) -> ClusterPlan:
    """`wanted`, with the ports that the routers have, and as many workers as by now where their
    number follows the offered work. Raises ConfigError for what needs another
    cluster: a client's answers would not be the same model's, or processes would not hear each
    other."""
    ours, theirs = running.routers[0].settings, wanted.routers[0].settings
    for key, of in (("model.path", "model"), ("model.revision", "revision")):
        if getattr(ours, of) != getattr(theirs, of):
            raise ConfigError(
                f"{key}: the cluster {running.name} serves {getattr(ours, of)}: serve another "
                "model as another cluster, with another --name"
            )
    if (ours.access, ours.cluster_key) != (theirs.access, theirs.cluster_key):
        raise ConfigError(
            f"network.token_file: another token, key or certificate than the cluster {running.name}"
            " has: its processes would not hear each other"
        )
    if (running.pool is None) != (wanted.pool is None):
        raise ConfigError(
            f"pool.enabled: whether there are pool nodes is decided when a cluster starts: stop "
            f"{running.name} and start it anew"
        )
    for pool in wanted.worker_pools:
        _check_kv(running, pool)
    known = {router.settings.process: router for router in running.routers}
    routers = (_on_same_ports(one, known.get(one.settings.process)) for one in wanted.routers)
    pools = tuple(_as_many(pool, running, wanted.elastic) for pool in wanted.worker_pools)
    return replace(wanted, routers=tuple(routers), worker_pools=_sharing(pools))


def _check_kv(running: ClusterPlan, pool: WorkerPoolPlan) -> None:
    """Those of other settings serve beside those that run, until they have replaced them. Raises
    ConfigError where routers would refuse that: see `check_joins`."""
    before, kv = running.worker_pool(pool.name), _kv_dtype(pool)
    if before is not None and _kv_dtype(before) == kv:
        return
    for one in running.worker_pools:
        converts = one.settings.allow_mixed_precision and pool.settings.allow_mixed_precision
        if _kv_dtype(one) != kv and _hand_over(one.role, pool.role) and not converts:
            raise ConfigError(
                f"model.dtype: {pool.name} workers would have KV in {kv}, and {one.name} workers "
                f"that run have it in {_kv_dtype(one)}: serve it as another cluster, with another "
                "--name, or first apply transfer.allow_mixed_precision: true"
            )


def _kv_dtype(pool: WorkerPoolPlan) -> str:
    return "fp8" if pool.settings.cuda.fp8_kv else pool.settings.dtype


def _hand_over(*of_pools: Role | None) -> bool:
    """A pool of any role has both."""
    return not {Role.BOTH} & {*of_pools} and (None in of_pools or len({*of_pools}) == 2)


def _as_many(
    pool: WorkerPoolPlan, running: ClusterPlan, elastic: ElasticRules | None
) -> WorkerPoolPlan:
    """As there are by now, where the number follows the offered work."""
    before, sized = running.worker_pool(pool.name), elastic.sized.values() if elastic else ()
    bounds = next((one.bounds for one in sized if one.name == pool.name), None)
    if before is None or bounds is None:
        return pool
    return replace(pool, count=bounds.clamp(before.count))


def _on_same_ports(router: RouterPlan, before: RouterPlan | None) -> RouterPlan:
    if before is None:
        return router
    ports = {
        port: getattr(router.settings, port) or getattr(before.settings, port) for port in PORTS
    }
    return replace(router, settings=replace(router.settings, **ports))


# --- in words -------------------------------------------------------------------------------------


def changes(running: ClusterPlan, wanted: ClusterPlan) -> list[str]:
    """A line for each pool that changes."""
    workers = _worker_changes(running, wanted)
    return [*_router_changes(running, wanted), *workers, *_pool_node_changes(running, wanted)]


def _router_changes(running: ClusterPlan, wanted: ClusterPlan) -> Iterator[str]:
    before, after = len(running.routers), len(wanted.routers)
    if before != after:
        yield f"router: {before} -> {after} routers"
    ours, theirs = running.routers[0], wanted.routers[0]
    if ours.revision != theirs.revision:
        yield f"router: replaced one by one: {_differing(ours.settings, theirs.settings)}"


def _worker_changes(running: ClusterPlan, wanted: ClusterPlan) -> Iterator[str]:
    for pool in wanted.worker_pools:
        yield from _pool_changes(running.worker_pool(pool.name), pool)
    for pool in running.worker_pools:
        if wanted.worker_pool(pool.name) is None:
            yield f"{pool.name}: {pool.count} -> 0 workers, no pool any more"


def _pool_node_changes(running: ClusterPlan, wanted: ClusterPlan) -> Iterator[str]:
    ours, theirs = running.pool, wanted.pool
    if ours is not None and theirs is not None and ours.revision != theirs.revision:
        yield f"pool nodes: replaced one by one: {_differing(ours.settings, theirs.settings)}"


def _pool_changes(before: WorkerPoolPlan | None, pool: WorkerPoolPlan) -> Iterator[str]:
    if before is None:
        yield f"{pool.name}: a new pool of {pool.count} {_role(pool)} workers"
        return
    if before.count != pool.count:
        yield f"{pool.name}: {before.count} -> {pool.count} workers"
    if before.role != pool.role:
        yield f"{pool.name}: role {_role(before)} -> {_role(pool)}"
    if before.revision != pool.revision:
        what = _differing(before.settings.with_role(pool.settings.role), pool.settings)
        yield f"{pool.name}: replaced one by one: {what}"


def _role(pool: WorkerPoolPlan) -> str:
    return pool.role or "auto"


def _differing(
    ours: WorkerSettings | RouterSettings | PoolNodeSettings,
    theirs: WorkerSettings | RouterSettings | PoolNodeSettings,
) -> str:
    """The settings that differ, without what nobody shall see."""
    names = [field.name for field in fields(ours) if field.name not in (*BY_ITSELF, *PORTS)]
    differ = [name for name in names if getattr(ours, name) != getattr(theirs, name)]
    told = [_change(name, getattr(ours, name), getattr(theirs, name)) for name in differ[:SHOWN]]
    more = [f"{len(differ) - SHOWN} more"] if len(differ) > SHOWN else []
    return ", ".join([*told, *more]) or "resources or version"


def _change(name: str, ours: object, theirs: object) -> str:
    plain = isinstance(ours, str | int | float | None) and name not in SECRET
    return f"{name} {ours} -> {theirs}" if plain else name
