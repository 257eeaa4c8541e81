"""The `simulation` section of a cluster file: what simulations have instead of machines. Pure.

All else is the cluster's own: its pools, scheduler, router and transfer.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from cluster.config.types import AutoCount, Bytes, Count, Seconds, Section

ProfileSource = str | dict[str, Any] | None


class Kv(Section):
    """What one token's KV is."""

    layers: Count = 32
    heads: Count = 8
    head_dim: Count = 128
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"


class FabricSection(Section):
    """The links between the workers, all alike. Each worker sends, and receives, one transfer after
    another."""

    latency: Seconds = 20e-6
    """Of a message between two workers, one way."""
    bandwidth: Bytes = 50 * 10**9
    """Bytes a second that a worker sends, and as many that it receives."""
    copy_bandwidth: Bytes = 10**12
    """Bytes a second that a worker gathers into slabs, or scatters out of them."""
    router_latency: Seconds = 200e-6
    """Of a message between router and worker, one way."""


class SloSection(Section):
    """What a request must meet to count as good."""

    ttft: Seconds = 2.0
    """Time to first token."""
    tpot: Seconds = 0.1
    """Mean time per output token after it."""
    told: bool = True
    """Requests come with it, as their objectives; false: the router knows of none."""


class SimulatedPool(Section):
    """Each worker of a pool of the cluster file."""

    profile: ProfileSource = None
    """A hardware profile: a file, or its keys; none: simulation.profile."""
    blocks: Count | None = None
    """KV blocks; none: simulation.blocks."""


class FailureSection(Section):
    """A worker that dies, as on SIGKILL."""

    worker: str
    """Its name: prefill-0 is the first of the first prefill pool."""
    at: Seconds
    """When, in the trace's time at the simulated rate."""
    back_after: Seconds | None = None
    """Another one comes in its place, which knows nothing; none: no one does."""


class Simulation(Section):
    """Stands for the machines when the cluster is simulated."""

    seed: int = 0
    """The same seed, the same result."""
    profile: ProfileSource = None
    """The hardware profile of every worker: a file, or its keys; none: a built-in one."""
    blocks: Count = 6000
    """KV blocks of every worker."""
    block_size: AutoCount = None
    """Tokens in a KV block; auto: engine.block_size. It divides the 512 of a trace's hashes."""
    pools: tuple[SimulatedPool, ...] = ()
    """In the order of `workers`; those left out are as `profile` and `blocks` say."""
    kv: Kv = Kv()
    fabric: FabricSection = FabricSection()
    slo: SloSection = SloSection()
    max_model_len: Count = 262_144
    """Prompt plus output, in tokens."""
    max_tokens: AutoCount = None
    """What each request asks for at most; auto: just the tokens that the trace says it yields."""
    retries: Annotated[int, Field(ge=0)] = 0
    """How often a refused client comes back, when it was told to."""
    retrying_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The share of clients that do."""
    retry_rounding: Seconds | None = None
    """Clients wait for a multiple of it, no less than they were told: 1 s is what HTTP's
    `retry-after` can say."""
    failures: tuple[FailureSection, ...] = ()
    """Workers that die."""
    most_steps: Annotated[int, Field(ge=1, le=4096)] = 256
    """Decode steps that are computed together while nothing happens. The result is that of single
    steps, but a sequence takes its blocks, and routers hear of its tokens, once for all of them."""

    @field_validator("block_size")
    @classmethod
    def _divides(cls, given: int | None) -> int | None:
        if given is not None and 512 % given:
            raise ValueError("a divisor of 512")
        return given
