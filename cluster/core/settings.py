"""What one process is told when it starts: everything resolved, nothing left to guess.

Made from the cluster file by `resolve`, or from the options of `kvrelay router`,
`kvrelay worker` and `kvrelay pool-node`. Plain values, so that they travel to another machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.core.options import DEFAULT_OPTIONS, CudaOptions
from kvrelay.qos import ONE_TIER, QosTiers
from kvrelay.types import Role
from router.core.policy.choice import DEFAULT_POLICIES, Policies
from router.text.preload import PreloadText
from router.text.request_fields import NO_MATCH, TierMatch


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """`host` is the address to listen on and to publish; `dtype` "auto" is the checkpoint's own.

    `device` "auto" is settled on the worker's machine: cuda where `gpus` of Ray's are set aside for
    it, or, without Ray (None), where there are any; so are `transports`, by preference, if there
    are none. `device_share` counts the workers that use this device, this one included.
    `kv_memory_bytes` fixes the size of the pool, else `memory_fraction` of the device decides.
    `compile` is
    "auto" or "off", `profile` too or a file of step times, `handoff` a HandoffMode, `codec` a Codec
    or "auto", `ucx` are fields of UcxOptions. Links between hosts take only peers that know the
    same `secret`.
    `pool_address` is the pool node's to use, where there need be none yet; None: no pool.
    `trace_dir` None: nothing is traced. `cpu_pinning` auto: it gets CPUs of its own if it can.
    `attention` is a backend or "auto". `tensor` processes share the model, and `cpu_threads`;
    one that another waits for longer than `rank_timeout_s` ends the worker.
    """

    name: str
    role: Role
    model: str
    revision: str | None
    device: str
    dtype: str
    block_size: int
    prefill_chunk_tokens: int
    max_running_requests: int
    max_model_len: int | None
    memory_fraction: float
    kv_memory_bytes: int | None
    prefix_caching: bool
    eviction: str
    compile: str
    profile: str
    device_share: int
    cpu_threads: int | None
    transports: tuple[str, ...]
    handoff: str
    codec: str
    allow_mixed_precision: bool
    require: tuple[str, ...]
    ucx: tuple[tuple[str, str | int], ...]
    staging_slabs: int
    staging_bytes: int | None
    canary_every: int
    lease_ttl_s: float
    host: str
    port_range: tuple[int, int] | None
    pool_address: str | None
    secret: str = field(default="", repr=False)
    trace_dir: str | None = None
    cpu_pinning: str = "off"
    qos: QosTiers = ONE_TIER
    tenant_weights: tuple[tuple[str, float], ...] = ()
    mixed_chunk_tokens: int = 512
    attention: str = "auto"
    cuda: CudaOptions = DEFAULT_OPTIONS
    launch_ahead: str = "auto"
    tensor: int = 1
    rank_timeout_s: float = 60.0
    gpus: float | None = None

    @property
    def threads_per_rank(self) -> int | None:
        return None if self.cpu_threads is None else max(1, self.cpu_threads // self.tensor)

    @property
    def own_chunk_tokens(self) -> int:
        """Prompt tokens of a step: on a decode worker others wait for theirs."""
        if self.role is not Role.DECODE:
            return self.prefill_chunk_tokens
        return min(self.prefill_chunk_tokens, self.mixed_chunk_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """`name` is the cluster's, `process` its own. Port 0 lets the system choose. Clients reach
    `host`; workers, operators and Prometheus reach `internal_host`. `record`: the file
    for what the core hears and decides, at most `record_bytes` of it; None: none."""

    name: str
    process: str
    model: str
    revision: str | None
    served_model_name: str
    host: str
    http_port: int
    grpc_port: int
    internal_host: str
    internal_http_port: int
    internal_grpc_port: int
    max_body_bytes: int
    preload: tuple[PreloadText, ...]
    public_metrics: bool = False
    record: str | None = None
    record_bytes: int = 0
    policies: Policies = DEFAULT_POLICIES
    qos: QosTiers = ONE_TIER
    tier_match: TierMatch = NO_MATCH


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolNodeSettings:
    """`name` is the cluster's; `transports` are links for workers of other hosts, on `host`, which
    take only those that know the same `secret`; None: what its machine has. `ucx` are fields of
    UcxOptions."""

    name: str
    host_bytes: int
    disk: str | None
    disk_bytes: int
    policy: str
    lease_ttl_s: float
    transports: tuple[str, ...] | None
    host: str
    port_range: tuple[int, int] | None
    ucx: tuple[tuple[str, str | int], ...] = ()
    secret: str = field(default="", repr=False)
