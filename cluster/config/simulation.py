"""The `simulation` section of a cluster file, which stands for the machines. Pure.

Pools, scheduler, router and transfer are those of the cluster.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from cluster.config.types import AutoCount, Bytes, Count, Seconds, Section

ProfileSource = str | dict[str, Any] | None


class Kv(Section):
    """The shape of one token's KV."""

    layers: Count = 32
    heads: Count = 8
    head_dim: Count = 128
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"


class FabricSection(Section):
    """The links between workers, all alike. Each worker sends one transfer at a time, and receives
    one at a time."""

    latency: Seconds = 20e-6
    """Time of a message between two workers, one way."""
    bandwidth: Bytes = 50 * 10**9
    """Bytes per second that a worker can send, and also receive."""
    copy_bandwidth: Bytes = 10**12
    """Bytes per second that a worker gathers into slabs or scatters from them."""
    router_latency: Seconds = 200e-6
    """Time of a message between router and worker, one way."""


class SloSection(Section):
    """A request that meets this counts as good."""

    ttft: Seconds = 2.0
    """Time to first token."""
    tpot: Seconds = 0.1
    """Mean time per output token after it."""
    told: bool = True
    """true: requests carry it as their objectives; false: the router doesn't know it."""


class SimulatedPool(Section):
    """The simulated workers of one pool of the cluster file."""

    profile: ProfileSource = None
    """A hardware profile: a file, or its keys; none: simulation.profile."""
    blocks: Count | None = None
    """KV blocks; none: simulation.blocks."""


class HostSection(Section):
    """The hosts of the workers, all alike. Each has a pool node if the
    cluster has a pool."""

    workers: Count = 8
    """Workers of one host, in the order of `workers`; the last host may have fewer."""
    memory_bandwidth: Bytes = 40 * 10**9
    """Bytes per second between a pool node's memory and all workers of its host, one transfer after
    another."""
    disk_bandwidth: Bytes = 3 * 10**9
    """Bytes per second that a disk reads or writes, one block after another."""
    disk_latency: Seconds = 100e-6
    """Time that a disk takes for each block besides."""


class NoiseSection(Section):
    """By how much steps last longer or shorter than the profile says."""

    sigma: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Steps last a log-normal factor of mean 1 as long; this is the standard deviation of its
    logarithm. 0: exactly as the profile says."""
    correlation: Seconds | None = None
    """The time in which a worker's factor changes: what is so far apart is alike to 1/e. null: each
    step has a factor of its own."""
    recorded: str | None = None
    """A folder with traces of live workers (observability.trace_dir): by how much their steps
    differed from what was predicted is replayed, in stretches as they came, prompts' and decode
    steps apart. null: none."""

    @model_validator(mode="after")
    def _one(self) -> NoiseSection:
        if self.recorded is not None and self.sigma:
            raise ValueError("either sigma or recorded")
        return self

    @property
    def is_any(self) -> bool:
        return self.recorded is not None or self.sigma > 0


class ServiceSection(Section):
    """What else takes time, one thing after another: each of these is a single server. null: no
    time. `python -m bench.live.simulated.fidelity` measures them on a real cluster."""

    router_request: Seconds | None = None
    """Of a router, for each request that comes: 0.6ms on a CPU core, HTTP included."""
    router_message: Seconds | None = None
    """Of a router, for each report of a worker: 0.2ms on a CPU core."""
    worker_turn: Seconds | None = None
    """Of a worker's loop, for all that came since its last turn: 0.2ms on a CPU core."""
    mover_job: Seconds | None = None
    """Of a worker's transfer thread to a peer, for each job beside its bytes: 0.1ms on a CPU core.
    Its jobs then run one after another, and the next one is not gathered while one is sent."""


class ArrivingSection(Section):
    """Requests whose prompts arrive in parts, and are computed meanwhile. The last part comes when
    the trace has the request; its time to first token counts from there."""

    share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Of all requests."""
    over: Seconds = 2.0
    """For so long before the last part the others come, evenly."""
    every: Seconds = 0.25
    """A part comes this often."""


class FailureSection(Section):
    """A worker or a pool node that dies, as if by SIGKILL."""

    worker: str | None = None
    """Its name: prefill-0 is the first of the first prefill pool."""
    pool_node: str | None = None
    """Its name: pool-0 is that of the first host. Its memory is lost, its disk stays."""
    at: Seconds
    """Time of its death, in the trace's time at the simulated rate."""
    back_after: Seconds | None = None
    """After this time a new process takes its place, a worker without any KV; none: it is not
    replaced."""

    @model_validator(mode="after")
    def _one(self) -> FailureSection:
        if (self.worker is None) == (self.pool_node is None):
            raise ValueError("either worker or pool_node")
        return self


class Simulation(Section):
    """Stands for the machines in a simulation of the cluster."""

    seed: int = 0
    """The same seed, the same result."""
    profile: ProfileSource = None
    """The hardware profile of every worker: a file, or its keys; none: a built-in one."""
    blocks: Count = 6000
    """KV blocks of every worker."""
    block_size: AutoCount = None
    """Tokens in a KV block; auto: engine.block_size. It divides the 512 of a trace's hashes."""
    pools: tuple[SimulatedPool, ...] = ()
    """In the order of `workers`; pools left out have `profile` and `blocks`."""
    kv: Kv = Kv()
    fabric: FabricSection = FabricSection()
    host: HostSection = HostSection()
    noise: NoiseSection = NoiseSection()
    service: ServiceSection = ServiceSection()
    slo: SloSection = SloSection()
    arriving: ArrivingSection = ArrivingSection()
    max_model_len: Count = 262_144
    """Prompt plus output, in tokens."""
    max_tokens: AutoCount = None
    """The `max_tokens` of each request; auto: the number of tokens that it has in the trace."""
    retries: Annotated[int, Field(ge=0)] = 0
    """How often a refused client comes back, if the refusal named a time."""
    retrying_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The share of clients that come back."""
    retry_rounding: Seconds | None = None
    """Clients round their waiting time up to a multiple of this. 1 s is the resolution of HTTP's
    `retry-after`."""
    balancing: Literal["in_turn", "random"] = "in_turn"
    """To which router a request goes. in_turn: to the next one, and back to the same when it was
    refused; random: to any, each time."""
    promise_sent: bool = True
    """Clients send back what a refusal promised."""
    start_up: Seconds = 60.0
    """A worker that is added serves after so long."""
    failures: tuple[FailureSection, ...] = ()
    """Workers and pool nodes that die."""
    most_steps: Annotated[int, Field(ge=1, le=4096)] = 256
    """At most this many decode steps are simulated together while no event occurs. The result is
    that of single steps, but a sequence takes its blocks, and reports its tokens, once for all."""

    @field_validator("block_size")
    @classmethod
    def _divides(cls, given: int | None) -> int | None:
        if given is not None and 512 % given:
            raise ValueError("a divisor of 512")
        return given
