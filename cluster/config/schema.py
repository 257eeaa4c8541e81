"""The cluster file as strict, frozen models: what may be written, and what it means. Pure.

An unknown key, a wrong type or unit, or an impossible value is an error. "auto" is None here and
is replaced by `resolve`; reading files and wording errors is `config_load`'s work.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from cluster.config.qos import Qos
from cluster.config.router import RouterSection
from cluster.config.simulation import Simulation
from cluster.config.types import (
    AttentionBackend,
    AutoBytes,
    AutoCount,
    AutoFarTransports,
    AutoOnOff,
    AutoOrOff,
    AutoText,
    AutoTransports,
    Bytes,
    Count,
    Dtype,
    Name,
    Port,
    Profile,
    Quantity,
    Seconds,
    Section,
)
from cluster.config.workers import WorkerPool
from kvrelay.types import Role


class ModelSection(Section):
    """Which checkpoint is served, and how."""

    path: str | None = None
    """A folder or a hub id; null: the bundled model."""
    revision: str | None = None
    """The hub revision: a branch, a tag or a commit."""
    served_name: AutoText = None
    """What clients call it; auto: the hub id, or the folder's name."""
    dtype: Dtype = "auto"
    """auto: the checkpoint's own. A pool's dtype overrides it."""
    max_model_len: AutoCount = None
    """Prompt plus output, in tokens; auto: what the model was made for."""


class EngineSection(Section):
    """The paged KV pool of each worker."""

    block_size: Annotated[int, Field(ge=8, le=128)] = 16
    """Tokens in a KV block."""
    kv_dtype: Literal["auto", "fp8"] = "auto"
    """auto: KV is kept in the model's dtype; fp8: as e4m3, half of what bfloat16 takes, at a loss
    (CUDA, attention.backend triton)."""
    matmul_precision: Literal["highest", "high"] = "highest"
    """How fp32 is multiplied on CUDA. highest: as fp32; high: as TF32, faster, with ten bits of
    fraction instead of 23."""
    memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of the device's memory for weights, staging and KV together."""
    kv_memory: AutoBytes = None
    """Size of the KV pool of one worker; auto: what memory_fraction leaves."""
    prefix_caching: bool = True
    """Keep the KV of finished requests while there is room, for those with the same prefix."""
    eviction: Literal["lru", "reuse"] = "lru"
    """Which cached block goes first: the longest unused, or the one least likely to be used again
    as learnt from the pool's history. Never one that others continue."""
    compile: AutoOrOff = "auto"
    """auto: on a CPU a worker takes seconds when it starts to make its steps faster, less the next
    time; on CUDA it multiplies at once what has one input; off: the model runs as transformers has
    it."""
    launch_ahead: AutoOnOff = "auto"
    """Launch a decode step before the tokens of the one before are known: on; auto: on CUDA. With
    several ranks it isn't done."""
    cuda_graphs: AutoOrOff = "auto"
    """auto: on CUDA decode steps are recorded when a worker starts, for each of some batch sizes;
    off: they are launched kernel by kernel."""
    profile: Profile = "auto"
    """How long steps take. auto: a worker times some when it starts; off: a guess, until it has run
    some; else a YAML file of step times, on the worker's machine."""
    rank_timeout: Seconds = 60.0
    """With parallel.tensor above 1: a process of a worker that another one waits for so long, in a
    step, hangs, and the worker ends."""


class AttentionSection(Section):
    """How attention over the paged KV is computed."""

    backend: AttentionBackend = "auto"
    """auto: on CUDA the fastest of what is installed and fits, measured when a worker starts; on a
    CPU native, else sdpa. native and triton: our own kernels for CPUs and CUDA; flashinfer and
    flash (FlashAttention-3): where installed; flex: PyTorch's FlexAttention; sdpa: plain torch
    operations."""


class SchedulerSection(Section):
    prefill_chunk_tokens: Annotated[int, Field(ge=16)] = 512
    """The most prompt tokens that one step computes."""
    mixed_chunk_tokens: Annotated[int, Field(ge=16)] = 512
    """The most prompt tokens that a decode worker computes beside the next token of its batch,
    which waits for them; at most prefill_chunk_tokens."""
    max_running_requests: Count = 64
    """The most sequences that one step advances."""


class Ucx(Section):
    """What nixl and ucx tell UCX; null: UCX's own choice, or the UCX_ variables of the worker."""

    tls: str | None = None
    """Transports that UCX may use, as in UCX_TLS, such as rc,cuda."""
    net_devices: str | None = None
    """As in UCX_NET_DEVICES, such as mlx5_0:1."""
    rndv_threshold_bytes: Bytes | None = None
    """Larger messages go by rendezvous (UCX_RNDV_THRESH)."""
    max_eager_rails: Count | None = None
    """Devices that share an eager message (UCX_MAX_EAGER_RAILS)."""


class Transfer(Section):
    """How KV travels from prefill to decode workers."""

    transports: AutoTransports = None
    """By preference: each pair of workers uses the first that both have and that connects them.
    auto: what each worker finds on its machine: cuda_ipc, shm, and nixl (else ucx) where workers of
    other hosts can reach it. shm: memory of one host; cuda_ipc: GPU to GPU of one host; nixl and
    ucx: RDMA or TCP between hosts (need kvrelay[nixl], kvrelay[ucx])."""
    require: tuple[Literal["shm", "cuda_ipc", "rdma"], ...] = ()
    """Only links of these kinds may be used, else the worker doesn't start. rdma: nixl or ucx with
    an RDMA device."""
    ucx: Ucx = Ucx()
    handoff: Literal["push", "pull", "pool"] = "push"
    """push: KV leaves while the prompt is computed, into blocks that wait for it; pull: so,
    once the decode worker has room, which it need not have when it accepts the request; pool: it
    goes to the host's pool node, and the decode worker fetches it there (needs pool.enabled)."""
    codec: Literal["none", "fp8", "int8", "auto"] = "none"
    """What KV is encoded with on its way, at a loss: a byte for each value. auto: fp8 or int8, on
    links where that is faster. Both workers must allow it, else none."""
    allow_mixed_precision: bool = False
    """true: workers of different dtypes hand KV over, converted."""
    staging_slabs: Annotated[int, Field(ge=2)] = 4
    """Buffers that a worker lends to its peers: how many transfers may be in flight."""
    staging_bytes: AutoBytes = None
    """All these buffers together; auto: the KV of a prefill chunk for each."""
    canary_every: Annotated[int, Field(ge=0)] = 0
    """For one request in so many the decode worker compares the KV it got with a digest of the
    prefill worker's; 0: for none. Not with `handoff: pool`."""
    lease_ttl: Seconds = 30.0
    """How long blocks and slabs stay held for a peer that makes no progress."""

    @field_validator("transports")
    @classmethod
    def _each_once(cls, given: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if given is not None and len(set(given)) < len(given):
            raise ValueError("each transport once")
        return given


class PreloadSection(Section):
    """A prompt's beginning that every prefill worker computes when it starts, and keeps."""

    system: str | None = None
    """A system message, as the model's chat template shows it."""
    text: str | None = None
    """The beginning of plain prompts."""
    tenant: str = ""
    """Whose requests find it."""

    @model_validator(mode="after")
    def _one_of_both(self) -> PreloadSection:
        if (self.system is None) == (self.text is None):
            raise ValueError("either system or text")
        return self


class PoolSection(Section):
    """The pool node of each host (kvrelay pool-node): there KV outlives the workers."""

    enabled: bool = False
    """true: one pool node on each host that has workers."""
    host_memory: Bytes = 4 * 2**30
    """The host tier: shared memory, taken as it fills."""
    disk: str | None = None
    """A folder for the disk tier, which survives restarts; null: no disk tier."""
    disk_size: Bytes = 32 * 2**30
    """The most that the disk tier takes."""
    policy: Literal["lru", "reuse"] = "lru"
    """Which blocks go first when a tier is full, leaves before what they continue. lru: those idle
    longest; reuse: those that the tier's history says are least likely to be used again."""
    transports: AutoFarTransports = None
    """Links for workers of other hosts; those of its own find it over shared memory. auto: those of
    transfer.transports."""
    resources: dict[str, Quantity] = Field(default_factory=dict)
    """What Ray sets aside for each pool node."""


class NetworkSection(Section):
    host: AutoText = None
    """Address of workers and pool nodes; auto: loopback on a Ray of our own, else the node's."""
    port_range: tuple[Port, Port] | None = None
    """First and last port that these may use; null: the system chooses."""
    secret: str | None = None
    """KV links between hosts take only processes that know it; null: any that reach the port."""

    @field_validator("port_range")
    @classmethod
    def _ascending(cls, given: tuple[int, int] | None) -> tuple[int, int] | None:
        if given is not None and not 1024 <= given[0] <= given[1]:
            raise ValueError("[first, last] with 1024 <= first <= last")
        return given


class Observability(Section):
    trace_dir: str | None = None
    """A folder in which each worker writes what it does when, as a Chrome trace; on CUDA it pushes
    NVTX ranges too. null: nothing is traced."""


class RaySection(Section):
    address: str | None = None
    """HOST:PORT of a running Ray, or auto to find one; null: RAY_ADDRESS, else our own."""
    startup_timeout: Seconds = 600.0
    """How long placement and loading may take, autoscaling included."""
    driver_timeout: Seconds = 15.0
    """A serve command that is silent for so long is gone; the cluster drains and stops."""
    hang_timeout: Seconds = 60.0
    """A router, worker or pool node that answers nothing for so long is killed, and started
    again."""


DEFAULT_POOLS = (WorkerPool(role=Role.PREFILL), WorkerPool(role=Role.DECODE))


class Config(Section):
    """A kvrelay cluster. Every key has a default: an empty file serves the bundled model."""

    name: Name = "kvrelay"
    """Several clusters share one Ray by name."""
    model: ModelSection = ModelSection()
    engine: EngineSection = EngineSection()
    attention: AttentionSection = AttentionSection()
    scheduler: SchedulerSection = SchedulerSection()
    workers: tuple[WorkerPool, ...] = DEFAULT_POOLS
    router: RouterSection = RouterSection()
    qos: Qos = Qos()
    transfer: Transfer = Transfer()
    preload: tuple[PreloadSection, ...] = ()
    """Prompts that many requests begin with."""
    pool: PoolSection = PoolSection()
    network: NetworkSection = NetworkSection()
    observability: Observability = Observability()
    ray: RaySection = RaySection()
    simulation: Simulation = Simulation()
    """What `kvrelay simulate` has instead of machines."""
    drain_timeout: Seconds = 30.0
    """How long running requests may take to finish when the cluster stops."""

    @model_validator(mode="after")
    def _has_its_pool(self) -> Config:
        if self.transfer.handoff == "pool" and not self.pool.enabled:
            raise ValueError("pool.enabled: true for transfer.handoff: pool")
        return self

    @model_validator(mode="after")
    def _encodes_once(self) -> Config:
        if self.engine.kv_dtype == "fp8" and self.transfer.codec != "none":
            raise ValueError("transfer.codec: none for engine.kv_dtype: fp8")
        return self

    @model_validator(mode="after")
    def _hands_over_one_dtype(self) -> Config:
        """As far as the file alone can tell."""
        given = {pool.dtype or self.model.dtype for pool in self.workers if pool.role != Role.BOTH}
        dtypes = sorted(given - {"auto"})
        if len(dtypes) > 1 and not self.transfer.allow_mixed_precision:
            both = " and ".join(dtypes)
            raise ValueError(f"transfer.allow_mixed_precision: true for workers of {both}")
        return self

    @field_validator("workers")
    @classmethod
    def _can_serve(cls, given: tuple[WorkerPool, ...]) -> tuple[WorkerPool, ...]:
        count = Counter(pool.role for pool in given)
        if bool(count[Role.PREFILL]) != bool(count[Role.DECODE]):
            present, absent = sorted((Role.PREFILL, Role.DECODE), key=lambda role: -count[role])
            raise ValueError(f"a {absent} pool beside the {present} pool")
        if not given:
            raise ValueError("a prefill pool and a decode pool, or a pool of role both")
        return given
