"""The settings of one process at its start, with everything resolved.

They come from the cluster file by `resolve`, or from the options of `kvrelay router`, `kvrelay
worker` and `kvrelay pool-node`. Plain values, so that they can be sent to another machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from engine.core.options import DEFAULT_OPTIONS, CudaOptions
from kvrelay.access.values import NO_ACCESS, Access, TlsFiles
from kvrelay.qos import ONE_TIER, QosTiers
from kvrelay.types import TAKES_ALL, PromptRule, Role
from router.access.caller import NO_KEYS, KeySources
from router.chat.conversations import DEFAULT_KEPT, KeptBounds
from router.core.faults.silence import DETECT_S
from router.core.policy.choice import DEFAULT_POLICIES, Policies
from router.core.state.directory import DIRECTORY_BYTES
from router.core.state.waiting import FAILOVER_PATIENCE_S
from router.text.preload import PreloadText
from router.text.request_fields import NO_MATCH, TierMatch

NODE_HOST = "auto"
"""Stands for the address of the node where Ray places the process."""


def pool_name(cluster: str) -> str:
    """The shared memory address at which a host's pool node listens."""
    return f"pool-{cluster}"


def host_pool_address(cluster: str) -> str:
    """The address of this host's pool node for the cluster, if there is one."""
    return f"shm:{pool_name(cluster)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """`host` is the address to listen on and to publish; `dtype` "auto" is the checkpoint's own.

    Where `device` is "auto", the worker decides on its machine. It takes cuda if Ray reserved
    `gpus` for it, or, without Ray (None), if the machine has any. Without `transports`, in order of
    preference, it takes those it finds. `device_share` counts the workers on this device, this one
    included.

    `kv_memory_bytes` fixes the size of the KV pool, else `memory_fraction` of the device decides.
    `compile` is "auto" or "off", `profile` these or a file of step times, `handoff` a HandoffMode,
    `codec` a Codec or "auto". `ucx` are fields of UcxOptions. Routers and the peers on other hosts
    need the token of `access`.

    `pool_address` is that of the pool node, which need not run yet; None: no pool. Without
    `trace_dir` there is no trace. With `cpu_pinning` "auto" the worker gets its own CPUs if it can.
    `attention` is a backend or "auto". `tensor` x `pipeline` processes share the model and
    `cpu_threads`; one that keeps another waiting for longer than `rank_timeout_s` ends the worker.
    `takes`: the prompts that it computes where others could.
    """

    name: str
    pool: str
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
    access: Access = NO_ACCESS
    trace_dir: str | None = None
    cpu_pinning: str = "off"
    qos: QosTiers = ONE_TIER
    tenant_weights: tuple[tuple[str, float], ...] = ()
    mixed_chunk_tokens: int = 512
    attention: str = "auto"
    cuda: CudaOptions = DEFAULT_OPTIONS
    launch_ahead: str = "auto"
    tensor: int = 1
    pipeline: int = 1
    rank_timeout_s: float = 60.0
    gpus: float | None = None
    takes: PromptRule = TAKES_ALL

    def with_role(self, role: Role) -> WorkerSettings:
        goes_first = role is not Role.PREFILL
        return replace(self, role=role, cuda=replace(self.cuda, goes_first=goes_first))

    @property
    def threads_per_rank(self) -> int | None:
        ranks = self.tensor * self.pipeline
        return None if self.cpu_threads is None else max(1, self.cpu_threads // ranks)

    def chunk_tokens(self, role: Role) -> int:
        """Prompt tokens of a step; on a decode worker the running requests wait for them."""
        if role is not Role.DECODE:
            return self.prefill_chunk_tokens
        return min(self.prefill_chunk_tokens, self.mixed_chunk_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """`name` is the cluster's, `process` the router's own. Port 0: the system chooses. Clients use
    `host`; workers, operators and Prometheus use `internal_host`. `record`: the file in which the
    core's events and decisions are recorded, up to `record_bytes`; None: no record. The core's
    directory takes up to `directory_bytes`. A request that lost its worker waits up to
    `failover_patience_s` for another one. A worker that is silent for `detect_s` is lost. Internal
    calls need the token of `access`, but for `open_metrics`; clients see `public_tls`. Routers with
    the same `cluster_key` go on with each other's requests. `keys`: which clients may call.
    `tool_format` and `reasoning_format` name how the model writes tool calls and reasoning; "auto":
    as its chat template shows."""

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
    open_metrics: bool = False
    record: str | None = None
    record_bytes: int = 0
    directory_bytes: int = DIRECTORY_BYTES
    failover_patience_s: float = FAILOVER_PATIENCE_S
    lame_duck_s: float = 0.0  # that it still takes requests once it is to stop
    detect_s: float = DETECT_S
    policies: Policies = DEFAULT_POLICIES
    qos: QosTiers = ONE_TIER
    tier_match: TierMatch = NO_MATCH
    conversations: KeptBounds = DEFAULT_KEPT
    keys: KeySources = NO_KEYS
    access: Access = NO_ACCESS
    public_tls: TlsFiles | None = None
    cluster_key: bytes = field(default=b"", repr=False)
    tool_format: str = "auto"
    reasoning_format: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolNodeSettings:
    """`name` is the cluster's. Without `host_bytes` the node takes a share of the memory that its
    host has available. `transports` serve workers of other hosts, on `host`, if these have
    the token of `access`; None: those that the machine has. `ucx` are fields of UcxOptions."""

    name: str
    host_bytes: int | None
    disk: str | None
    disk_bytes: int
    policy: str
    lease_ttl_s: float
    transports: tuple[str, ...] | None
    host: str
    port_range: tuple[int, int] | None
    ucx: tuple[tuple[str, str | int], ...] = ()
    access: Access = NO_ACCESS
