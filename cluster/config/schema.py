"""The keys of a cluster file, their types and their meaning, as strict, frozen models. Pure.

An unknown key, a wrong type or unit, or an impossible value is an error. "auto" is None here, and
`cluster.core.resolve` replaces it. `cluster.config.load` reads files and words the errors.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from cluster.config.elastic import ElasticSection
from cluster.config.network import NetworkSection
from cluster.config.qos import Qos
from cluster.config.router import RouterSection
from cluster.config.simulation import Simulation
from cluster.config.takes import untaken
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
    DtypeName,
    Name,
    Quantity,
    Quantization,
    Seconds,
    Section,
    StepTimesSource,
    format_duration,
)
from cluster.config.workers import WorkerPool, roles_of, with_names
from kvrelay.qos import ONE_TIER
from kvrelay.types import Role
from router.core.faults.silence import DETECT_S, LEAST_DETECT_S


class ModelSection(Section):
    """Which checkpoint is served, and how."""

    path: str | None = None
    """A folder or a hub id; null: the bundled model."""
    revision: str | None = None
    """The hub revision: a branch, a tag or a commit."""
    served_name: AutoText = None
    """The model's name for clients; auto: the hub id, or the folder's name."""
    dtype: DtypeName = "auto"
    """auto: the dtype of the checkpoint. A pool's dtype overrides it."""
    quantization: Quantization = "none"
    """fp8: a worker converts the weights of linear layers to e4m3 when it loads them, and their
    inputs in each step, with a scale for each output channel and token: prompts take about two
    thirds of the time and weights half the memory, and precision is lost (needs CUDA of compute
    capability 8.9 and bfloat16). A pool's quantization overrides it."""
    max_model_len: AutoCount = None
    """Prompt plus output, in tokens; auto: the model's own context length."""
    tool_format: Literal[
        "auto", "hermes", "llama3", "mistral", "mistral-list", "qwen3-coder", "harmony", "none"
    ] = "auto"
    """How the model writes tool calls; auto: as its chat template shows; none: it makes none."""
    reasoning_format: Literal["auto", "think", "mistral", "none"] = "auto"
    """How the model marks its reasoning. auto: as its chat template shows; think: with <think> and
    </think>; mistral: with [THINK] and [/THINK]; none: all it says is content."""


class EngineSection(Section):
    """The paged KV pool of each worker."""

    block_size: Annotated[int, Field(ge=8, le=128)] = 16
    """Tokens in a KV block."""
    kv_dtype: Literal["auto", "fp8"] = "auto"
    """auto: KV has the model's dtype; fp8: KV is stored as e4m3, which takes half the memory of
    bfloat16 and loses precision (needs CUDA and attention.backend triton)."""
    matmul_precision: Literal["highest", "high"] = "highest"
    """How CUDA multiplies fp32 matrices. highest: as fp32; high: as TF32, which is faster and has
    ten bits of fraction instead of 23."""
    memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of the device's memory for all that a worker has there: weights, KV and the rest."""
    kv_memory: AutoBytes = None
    """Size of one worker's KV pool; auto: the memory that memory_fraction leaves for it."""
    prefix_caching: bool = True
    """Keep the KV of finished requests while there is room, for requests with the same prefix."""
    eviction: Literal["lru", "reuse"] = "lru"
    """Which cached block is evicted first. lru: the least recently used one; reuse: the one least
    likely to be used again, as the pool's history shows. A block that others continue stays."""
    compile: AutoOrOff = "auto"
    """auto: on a CPU a worker compiles the model when it starts, which takes some seconds, and
    fewer at the next start; on CUDA it merges linear layers that have the same input. off: the
    model runs unchanged, as in transformers."""
    launch_ahead: AutoOnOff = "auto"
    """on: launch a decode step before the tokens of the previous step are known, and a chunk of
    prompts behind the one that runs; auto: on for CUDA. Always off with several ranks."""
    cuda_graphs: AutoOrOff = "auto"
    """auto: on CUDA a worker records decode steps of some batch sizes when it starts; off: steps
    are launched kernel by kernel."""
    profile: StepTimesSource = "auto"
    """How long steps take. auto: a worker times some steps when it starts; off: it guesses until it
    has run some; else the path of a YAML file of step times on the worker's machine."""
    rank_timeout: Seconds = 60.0
    """With several processes for a worker (parallel): one that keeps another waiting in a step for
    this long counts as hung, and the worker ends."""


class AttentionSection(Section):
    """How attention over the paged KV is computed."""

    backend: AttentionBackend = "auto"
    """auto: native on a CPU; on CUDA the one of triton, flashinfer and flash whose decode steps are
    the fastest when a worker starts; sdpa where none can serve the model. native and triton: our
    own kernels; flashinfer and flash (FlashAttention-3): where installed; sdpa: plain torch
    operations."""


class SchedulerSection(Section):
    prefill_chunk_tokens: Annotated[int, Field(ge=16)] | None = None
    """At most this many prompt tokens in one step; null: 512 on a CPU and 2,048 on a GPU."""
    mixed_chunk_tokens: Annotated[int, Field(ge=16)] = 512
    """At most this many prompt tokens in a decode worker's step, beside the next token of its
    batch, which waits for them. Not more than prefill_chunk_tokens."""
    max_running_requests: Count = 64
    """At most this many sequences in one step."""

    def chunk_tokens(self, *, on_gpu: bool) -> int:
        return self.prefill_chunk_tokens or (2048 if on_gpu else 512)


class Ucx(Section):
    """Settings of UCX for nixl and ucx; null: UCX's own choice, or the worker's UCX_ variables."""

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
    """In order of preference: each pair of workers uses the first one that both have and that
    connects them. auto: those that a worker finds on its machine: cuda_ipc, shm, and nixl (else
    ucx) where workers of other hosts can reach it. shm: memory of one host; cuda_ipc: GPU to GPU of
    one host; nixl and ucx: RDMA or TCP between hosts (need kvrelay[nixl], kvrelay[ucx])."""
    require: tuple[Literal["shm", "cuda_ipc", "rdma", "gpudirect"], ...] = ()
    """Use only links of these kinds; a worker that can't have one doesn't start. rdma: nixl or ucx
    with an RDMA device; gpudirect: one that reaches the GPU's memory, not the host's only."""
    ucx: Ucx = Ucx()
    handoff: Literal["push", "pull", "pool"] = "push"
    """push: KV is sent while the prompt is computed, into blocks that the decode worker reserved
    before; pull: the same, but the decode worker accepts the request without room, and KV is sent
    once it has some; pool: KV goes to the host's pool node, and the decode worker fetches it there
    (needs pool.enabled: on)."""
    codec: Literal["none", "fp8", "int8", "auto"] = "none"
    """How KV is encoded for the transfer. fp8 and int8 take one byte for each value and lose
    precision. auto: one of them, on links where that is faster. Both workers must allow it, else
    none is used."""
    allow_mixed_precision: bool = False
    """true: KV may go between workers of different dtypes; it is converted."""
    staging_slabs: Annotated[int, Field(ge=2)] = 4
    """Buffers that a worker lends to its peers; each transfer in flight uses one."""
    staging_bytes: AutoBytes = None
    """Size of all these buffers together; auto: each holds the KV of one prefill chunk."""
    canary_every: Annotated[int, Field(ge=0)] = 0
    """For one of N requests the decode worker compares the KV that it received with a digest from
    the prefill worker; 0: never. Not with `handoff: pool`."""
    lease_ttl: Seconds = 30.0
    """Blocks and slabs stay held this long for a peer that says nothing."""

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
    """Requests of this tenant find it."""

    @model_validator(mode="after")
    def _one_of_both(self) -> PreloadSection:
        if (self.system is None) == (self.text is None):
            raise ValueError("either system or text")
        return self


class PoolSection(Section):
    """The pool node of each host (kvrelay pool-node), which keeps KV when workers are gone."""

    enabled: AutoOnOff = "auto"
    """on: one pool node on each host that has workers; the cluster is ready when they serve. auto:
    they start when it is ready, on hosts with memory to spare. off: none. In a simulation auto is
    on if host_memory is given. Plain workers use a pool node only if they are told to."""
    host_memory: AutoBytes = None
    """The host tier: shared memory, taken as it fills. auto: a quarter of the memory that is
    available when the pool node starts, at most 64GiB."""
    disk: str | None = None
    """A folder for the disk tier, which survives restarts; null: no disk tier."""
    disk_size: Bytes = 32 * 2**30
    """The largest size of the disk tier."""
    policy: Literal["lru", "reuse"] = "lru"
    """Which blocks are evicted first when a tier is full. lru: the least recently used ones; reuse:
    those least likely to be used again, as the tier's history shows. A block goes before the block
    that it continues."""
    transports: AutoFarTransports = None
    """Transports for workers of other hosts; workers of its own host use shared memory. auto: those
    of transfer.transports."""
    resources: dict[str, Quantity] = Field(default_factory=dict)
    """Resources that Ray reserves for each pool node."""


class FailureSection(Section):
    """When something counts as failed."""

    detect: Seconds = DETECT_S
    """A worker that reports nothing to a router for this long is lost: its requests go on
    elsewhere, and other workers close their connections to it. Workers report every 0.5 s. One
    that is silent for 2 s gets no new requests if others can take them."""

    @field_validator("detect")
    @classmethod
    def _longer_than_a_report(cls, given: float) -> float:
        if given < LEAST_DETECT_S:
            raise ValueError(f"at least {format_duration(LEAST_DETECT_S)}")
        return given


class Observability(Section):
    trace_dir: str | None = None
    """A folder in which each worker writes a Chrome trace of its steps and transfers; on CUDA also
    as the device tells them, and NVTX ranges. null: no trace."""


class RaySection(Section):
    address: str | None = None
    """HOST:PORT of a running Ray, or auto to find one; null: RAY_ADDRESS if set, else kvrelay
    starts its own."""
    startup_timeout: Seconds = 600.0
    """Limit for placement and loading, autoscaling included."""
    hang_timeout: Seconds = 60.0
    """A router, worker or pool node that doesn't answer for this long is killed and started
    again."""


DEFAULT_POOLS = (WorkerPool(role=Role.PREFILL), WorkerPool(role=Role.DECODE))


class Config(Section):
    """A kvrelay cluster. Every key has a default: an empty file serves the bundled model."""

    name: Name = "kvrelay"
    """The cluster's name. Clusters with different names can share one Ray."""
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
    failure: FailureSection = FailureSection()
    observability: Observability = Observability()
    ray: RaySection = RaySection()
    elastic: ElasticSection = ElasticSection()
    simulation: Simulation = Simulation()
    """Stands for the machines in `kvrelay simulate`."""
    drain_timeout: Seconds = 30.0
    """Time for running requests to finish when the cluster stops."""

    @model_validator(mode="after")
    def _has_its_pool(self) -> Config:
        if self.transfer.handoff == "pool" and self.pool.enabled != "on":
            raise ValueError("pool.enabled: on for transfer.handoff: pool")
        return self

    @model_validator(mode="after")
    def _encodes_once(self) -> Config:
        if self.engine.kv_dtype == "fp8" and self.transfer.codec != "none":
            raise ValueError("transfer.codec: none for engine.kv_dtype: fp8")
        return self

    @model_validator(mode="after")
    def _knows_its_tiers(self) -> Config:
        named = {tier for pool in self.workers for tier in pool.takes.tiers}
        if unknown := sorted(named - {*self._tiers}):
            tiers = ", ".join(self._tiers)
            raise ValueError(f"takes.tiers of workers: {tiers}, and not {unknown[0]}")
        return self

    @model_validator(mode="after")
    def _takes_every_prompt(self) -> Config:
        rules = [pool.takes.rule for pool in self.workers if pool.role is not Role.DECODE]
        if (gap := untaken(rules, self._tiers)) is not None:
            raise ValueError(f"a pool of workers that takes prompts of {gap}")
        return self

    @property
    def _tiers(self) -> tuple[str, ...]:
        return tuple(self.qos.tiers) or (ONE_TIER.default,)

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
        count = roles_of(given)
        if bool(count[Role.PREFILL]) != bool(count[Role.DECODE]):
            present, absent = sorted((Role.PREFILL, Role.DECODE), key=lambda role: -count[role])
            raise ValueError(f"a {absent} pool beside the {present} pool")
        if not given:
            raise ValueError("a prefill pool and a decode pool, or a pool of role both")
        return given

    @field_validator("workers")
    @classmethod
    def _have_names(cls, given: tuple[WorkerPool, ...]) -> tuple[WorkerPool, ...]:
        named = with_names(given)
        twice = [label for label, n in Counter(pool.label for pool in named).items() if n > 1]
        if twice:
            raise ValueError(f"another name for each pool, not {twice[0]} twice")
        return named
