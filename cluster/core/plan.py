"""The plan of a cluster: each process, its settings and its placement, from a resolved file. Pure.

Also the names by which a pool node and the workers of its host find each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import PurePath
from typing import get_args

from cluster.config.router import RouterSection
from cluster.config.schema import Config, PreloadSection, Ucx
from cluster.config.types import FarTransport
from cluster.config.workers import WorkerPool, role_at
from cluster.core.desired import Desired, pool_of, process_name
from cluster.core.elastic.of_file import elastic_rules
from cluster.core.elastic.rules import ElasticRules
from cluster.core.qos import qos_tiers, router_tiers, tier_match
from cluster.core.resolve import ROUTERS, device_share, router_names
from cluster.core.revision import pool_node_revision, router_revision, worker_revision
from cluster.core.settings import (
    NODE_HOST,
    PoolNodeSettings,
    RouterSettings,
    WorkerSettings,
    host_pool_address,
)
from cluster.core.supervision import DesiredPool, ProcessKind
from engine.core.options import CudaOptions
from kvrelay.access.values import NO_ACCESS, NO_SECRETS, Access, Secrets, Tls, TlsFiles
from kvrelay.errors import ConfigError
from kvrelay.types import Role
from router.access.caller import KeySources
from router.chat.conversations import KeptBounds
from router.core.policy.choice import Policies
from router.text.preload import PreloadText

ROUNDING = 1e-6
ACCELERATOR_MARK = 0.001
"""The amount that Ray reserves of a node's accelerator type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayResources:
    """Resources that Ray reserves. `machine_devices`: device numbers are the machine's, not
    Ray's."""

    cpus: float = 0.0
    gpus: float = 0.0
    memory_bytes: float = 0.0
    accelerator_type: str | None = None
    custom: tuple[tuple[str, float], ...] = ()
    machine_devices: bool = False

    def amounts(self) -> dict[str, float]:
        """# Ray's name of a resource |-> amount, without zeros"""
        asked = {"CPU": self.cpus, "GPU": self.gpus, "memory": self.memory_bytes}
        asked |= dict(self.custom)
        if self.accelerator_type:
            asked[f"accelerator_type:{self.accelerator_type}"] = ACCELERATOR_MARK
        return {name: amount for name, amount in asked.items() if amount}

    def __str__(self) -> str:
        return f"{{{', '.join(f'{name}: {amount:g}' for name, amount in self.amounts().items())}}}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterPlan:
    settings: RouterSettings
    placement: RayResources
    revision: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    settings: WorkerSettings
    placement: RayResources


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPoolPlan:
    """`settings`: those of each of its workers, but for their names and roles. `role`: that with
    which all of them begin; None: half of them with each."""

    name: str
    count: int
    role: Role | None
    settings: WorkerSettings
    placement: RayResources
    revision: str
    on_gpu: bool

    def worker(self, name: str, role: Role) -> WorkerPlan:
        settings = replace(self.settings.with_role(role), name=name)
        return WorkerPlan(settings=settings, placement=self.placement)

    def workers(self) -> tuple[WorkerPlan, ...]:
        """As they begin."""
        numbered = enumerate(self.names())
        return tuple(self.worker(name, role_at(self.role, number)) for number, name in numbered)

    def names(self) -> tuple[str, ...]:
        return tuple(process_name(self.name, number) for number in range(self.count))


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolNodePlan:
    """`required`: the cluster is ready only with its pool nodes; else it goes on without those that
    can't start."""

    settings: PoolNodeSettings
    placement: RayResources
    revision: str
    required: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """`pool`: the settings of every pool node, one on each node that has workers; None: no pool."""

    name: str
    routers: tuple[RouterPlan, ...]
    worker_pools: tuple[WorkerPoolPlan, ...]
    pool: PoolNodePlan | None
    startup_timeout_s: float
    hang_timeout_s: float
    drain_s: float
    elastic: ElasticRules | None = None  # by which pools follow the offered work

    @property
    def workers(self) -> tuple[WorkerPlan, ...]:
        return tuple(worker for pool in self.worker_pools for worker in pool.workers())

    def worker_pool(self, name: str) -> WorkerPoolPlan | None:
        return next((pool for pool in self.worker_pools if pool.name == name), None)

    def stop_times_s(self, *, lame_duck: bool) -> tuple[float, ...]:
        """For the requests of one that stops; before, for a router's clients to find another."""
        led_s = self.routers[0].settings.lame_duck_s
        return (self.drain_s, led_s) if lame_duck else (self.drain_s,)

    def desired(self) -> Desired:
        first = self.routers[0]
        routers = DesiredPool(
            kind=ProcessKind.ROUTER,
            count=len(self.routers),
            revision=first.revision,
            needs=str(first.placement),
            lame_duck_s=first.settings.lame_duck_s,
        )
        return {ROUTERS: routers, **{pool.name: _desired(pool) for pool in self.worker_pools}}


def _desired(pool: WorkerPoolPlan) -> DesiredPool:
    return DesiredPool(
        kind=ProcessKind.WORKER,
        count=pool.count,
        revision=pool.revision,
        needs=str(pool.placement),
        role=pool.role,
    )


def plan_cluster(
    config: Config, secrets: Secrets = NO_SECRETS, given: Config | None = None
) -> ClusterPlan:
    """`config` must be resolved; `given` is what it was before that. Raises ConfigError for TLS
    without a certificate of its own."""
    access, before = access_of(config, secrets.token), given or config
    pools = zip(config.workers, before.workers, strict=True)
    revision = router_revision(before)
    return ClusterPlan(
        name=config.name,
        routers=tuple(
            _router_plan(config, secrets, number, revision)
            for number in range(config.router.replicas)
        ),
        worker_pools=tuple(
            _pool_plan(config, pool, worker_revision(before, asked), access)
            for pool, asked in pools
        ),
        pool=_pool_node_plan(config, before, access) if config.pool.enabled != "off" else None,
        startup_timeout_s=config.ray.startup_timeout,
        hang_timeout_s=config.ray.hang_timeout,
        drain_s=config.drain_timeout,
        elastic=elastic_rules(config.workers, config.elastic),
    )


def _pool_plan(config: Config, pool: WorkerPool, revision: str, access: Access) -> WorkerPoolPlan:
    return WorkerPoolPlan(
        name=pool.label,
        count=pool.replicas.min,
        role=pool.role,
        settings=worker_settings(config, pool, pool.label, access),
        placement=_placement(pool),
        revision=revision,
        on_gpu=pool.on_gpu,
    )


def placements(plan: ClusterPlan) -> dict[str, RayResources]:
    """# process |-> its placement; without pool nodes, whose number is known once workers run"""
    routers = {router.settings.process: router.placement for router in plan.routers}
    return routers | {worker.settings.name: worker.placement for worker in plan.workers}


def shortage(
    plan: ClusterPlan, offered: Mapping[str, float], only: Collection[str] | None = None
) -> str | None:
    """Why the cluster doesn't fit on a machine that offers these amounts, or None. With `only`,
    just these resources are compared."""
    asked: defaultdict[str, float] = defaultdict(float)
    places = [*placements(plan).values()]
    places += [] if plan.pool is None else [plan.pool.placement]
    for place in places:
        for name, amount in place.amounts().items():
            asked[name] += amount
    for name, amount in asked.items():
        has = offered.get(name, 0.0)
        if only is not None and name not in only:
            continue
        if amount > has + ROUNDING:
            return f"the cluster asks for {name}: {amount:g} and this machine has {has:g}"
    return None


def worker_settings(
    config: Config, pool: WorkerPool, name: str, access: Access = NO_ACCESS
) -> WorkerSettings:
    """As the first worker of the pool begins."""
    assert config.model.path is not None, "resolved"
    return WorkerSettings(
        name=name,
        pool=pool_of(name),
        role=role_at(pool.role, 0),
        model=config.model.path,
        revision=config.model.revision,
        device=pool.device,
        gpus=pool.resources.get("GPU", 0.0),
        dtype=pool.dtype or config.model.dtype,
        block_size=config.engine.block_size,
        prefill_chunk_tokens=config.scheduler.chunk_tokens(on_gpu=pool.on_gpu),
        max_running_requests=config.scheduler.max_running_requests,
        max_model_len=config.model.max_model_len,
        memory_fraction=config.engine.memory_fraction,
        kv_memory_bytes=config.engine.kv_memory,
        prefix_caching=config.engine.prefix_caching,
        eviction=config.engine.eviction,
        compile=config.engine.compile,
        profile=config.engine.profile,
        device_share=device_share(pool, config.workers),
        cpu_threads=pool.cpu_threads,
        transports=config.transfer.transports or (),
        handoff=config.transfer.handoff,
        codec=config.transfer.codec,
        allow_mixed_precision=config.transfer.allow_mixed_precision,
        require=config.transfer.require,
        ucx=ucx_options(config.transfer.ucx),
        staging_slabs=config.transfer.staging_slabs,
        staging_bytes=config.transfer.staging_bytes,
        canary_every=config.transfer.canary_every,
        lease_ttl_s=config.transfer.lease_ttl,
        host=config.network.host or NODE_HOST,
        port_range=config.network.port_range,
        pool_address=host_pool_address(config.name) if config.pool.enabled != "off" else None,
        access=access,
        trace_dir=config.observability.trace_dir,
        cpu_pinning=pool.cpu_pinning,
        qos=qos_tiers(config.qos),
        tenant_weights=tuple(config.qos.tenant_weights.items()),
        mixed_chunk_tokens=config.scheduler.mixed_chunk_tokens,
        tensor=pool.parallel.tensor,
        pipeline=pool.parallel.pipeline,
        takes=pool.takes.rule,
        rank_timeout_s=config.engine.rank_timeout,
        attention=config.attention.backend,
        launch_ahead=config.engine.launch_ahead,
        cuda=CudaOptions(
            graphs=config.engine.cuda_graphs == "auto",
            fp8_kv=config.engine.kv_dtype == "fp8",
            fp8_products=(pool.quantization or config.model.quantization) == "fp8",
            goes_first=role_at(pool.role, 0) is not Role.PREFILL,
            tf32=config.engine.matmul_precision == "high",
        ),
    )


def access_of(config: Config, token: bytes) -> Access:
    """Of a process that serves others and calls them. Raises ConfigError."""
    internal = config.network.tls.internal
    if internal is None:
        return Access(token=token)
    if internal.certificate is None or internal.key is None:
        raise ConfigError("network.tls.internal: expected certificate and key beside ca")
    serves = TlsFiles(
        certificate=internal.certificate, key=internal.key, client_ca=internal.client_ca
    )
    return Access(token=token, serves=serves, dials=dialled_tls(config))


def dialled_tls(config: Config) -> Tls | None:
    """How internal ports are called."""
    internal = config.network.tls.internal
    if internal is None:
        return None
    return Tls(
        ca=internal.ca,
        certificate=internal.certificate,
        key=internal.key,
        server_name=internal.server_name,
    )


def _public_tls(config: Config) -> TlsFiles | None:
    tls = config.network.tls.public
    if tls is None:
        return None
    return TlsFiles(certificate=tls.certificate, key=tls.key, client_ca=tls.client_ca)


def _router_plan(config: Config, secrets: Secrets, number: int, revision: str) -> RouterPlan:
    settings = router_settings(config, secrets, number)
    place = _place(config.router.resources)
    return RouterPlan(settings=settings, placement=place, revision=revision)


def router_settings(
    config: Config, secrets: Secrets = NO_SECRETS, number: int = 0
) -> RouterSettings:
    """The settings of one router."""
    ports = config.router.ports(number)
    assert config.model.path is not None, "resolved"
    assert config.model.served_name is not None, "resolved"
    return RouterSettings(
        name=config.name,
        process=router_names(config.router.replicas)[number],
        model=config.model.path,
        revision=config.model.revision,
        served_model_name=config.model.served_name,
        host=config.router.host,
        internal_host=internal_host(config.router),
        public_metrics=config.router.public_metrics,
        open_metrics=config.router.open_metrics,
        **asdict(ports),
        max_body_bytes=config.router.max_body,
        preload=tuple(_preload(one) for one in config.preload),
        record=_record(config.router, number),
        record_bytes=config.router.record_size,
        directory_bytes=config.router.directory_memory,
        failover_patience_s=config.router.failover_patience,
        lame_duck_s=config.router.lame_duck or 0.0,
        detect_s=config.failure.detect,
        policies=Policies(
            placement=config.router.placement.policy,
            admission=config.router.admission.policy,
            queue_limit=config.router.admission.queue_limit,
            move_hot_spots=config.router.placement.move_hot_spots,
            local_prefill=config.router.placement.local_prefill == "auto",
            shared_queue=config.router.dispatch == "shared_queue",
        ),
        qos=router_tiers(config.qos, config.router.admission.policy),
        tier_match=tier_match(config.qos),
        conversations=KeptBounds(
            answers=config.router.conversations.answers,
            size_bytes=config.router.conversations.memory,
            age_s=config.router.conversations.age,
        ),
        keys=KeySources(file=config.router.api_keys, digests=config.router.api_key_hashes),
        access=access_of(config, secrets.token),
        public_tls=_public_tls(config),
        cluster_key=secrets.key,
        tool_format=config.model.tool_format,
        reasoning_format=config.model.reasoning_format,
    )


def internal_host(router: RouterSection) -> str:
    assert router.internal_host is not None, "resolved"
    return NODE_HOST if router.internal_host == "node" else router.internal_host


def _record(router: RouterSection, number: int) -> str | None:
    """Each router writes its own file."""
    if router.record is None or router.replicas == 1:
        return router.record
    path = PurePath(router.record)
    return str(path.with_name(f"{path.stem}-{number}{path.suffix}"))


def _preload(one: PreloadSection) -> PreloadText:
    text = one.text if one.system is None else one.system
    assert text is not None, "one of them is set"
    return PreloadText(text=text, is_system=one.system is not None, tenant=one.tenant)


def _pool_node_plan(config: Config, before: Config, access: Access) -> PoolNodePlan:
    return PoolNodePlan(
        settings=pool_node_settings(config, access),
        placement=_place(config.pool.resources),
        revision=pool_node_revision(before),
        required=config.pool.enabled == "on",
    )


def pool_node_settings(config: Config, access: Access = NO_ACCESS) -> PoolNodeSettings:
    """`config` must be resolved."""
    return PoolNodeSettings(
        name=config.name,
        host_bytes=config.pool.host_memory,
        disk=config.pool.disk,
        disk_bytes=config.pool.disk_size,
        policy=config.pool.policy,
        lease_ttl_s=config.transfer.lease_ttl,
        transports=_far_transports(config),
        host=config.network.host or NODE_HOST,
        port_range=config.network.port_range,
        ucx=ucx_options(config.transfer.ucx),
        access=access,
    )


def _far_transports(config: Config) -> tuple[str, ...] | None:
    if config.pool.transports is not None:
        return config.pool.transports
    if config.transfer.transports is None:
        return None
    return tuple(one for one in config.transfer.transports if one in get_args(FarTransport))


def ucx_options(ucx: Ucx) -> tuple[tuple[str, str | int], ...]:
    """The fields of UcxOptions that the cluster file sets."""
    return tuple((name, value) for name, value in ucx if value is not None)


def _placement(pool: WorkerPool) -> RayResources:
    return _place(pool.resources, pool.accelerator_type, ":" in pool.device)


def _place(
    resources: dict[str, float], accelerator: str | None = None, machine_devices: bool = False
) -> RayResources:
    known = ("CPU", "GPU", "memory")
    return RayResources(
        cpus=resources.get("CPU", 0.0),
        gpus=resources.get("GPU", 0.0),
        memory_bytes=resources.get("memory", 0.0),
        accelerator_type=accelerator,
        custom=tuple((name, value) for name, value in resources.items() if name not in known),
        machine_devices=machine_devices,
    )
