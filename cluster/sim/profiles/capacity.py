"""What of a model fits on devices, and how fast they could serve it at the very best. Pure.

The bounds take the data sheet at its word: no overheads, no latencies, every rate reached.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.sim.profiles.roofline import Parallel, Precision, roofline_times, weight_bytes
from cluster.sim.profiles.schema import BYTES_PER_PARAMETER, DeviceProfile, Efficiency
from engine.core.model_shape import ModelShape
from engine.core.step_times import decode_work, prefill_work

IDEAL = Efficiency(memory=1.0, compute=1.0, overhead_s=0.0, all_reduce_latency_s=0.0)
TENSOR_DEGREES = (1, 2, 4, 8)
"""The ranks of a worker are processes of one machine, with a device each."""
STAGE_COUNTS = (1, 2, 4)
_EMBEDDING_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusals:
    """What no worker can start. `refused`: why it can't serve the model at all; empty: it can.
    `unsplit`: # degree of tensor parallelism |-> why a worker can't start with it; `unstaged`: #
    number of stages |-> the same"""

    refused: str = ""
    unsplit: Mapping[int, str] = field(default_factory=dict)
    unstaged: Mapping[int, str] = field(default_factory=dict)

    @property
    def degrees(self) -> tuple[int, ...]:
        """All, where the model is refused: then the plan is an estimate."""
        return tuple(degree for degree in TENSOR_DEGREES if degree not in self.unsplit)

    @property
    def stages(self) -> tuple[int, ...]:
        """All, where the model is refused."""
        return tuple(count for count in STAGE_COUNTS if count not in self.unstaged)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """`weight_bytes` are the checkpoint's own where it is here, else computed."""

    shape: ModelShape
    precision: Precision
    weight_bytes: float
    refusals: Refusals

    @staticmethod
    def of(shape: ModelShape, precision: Precision, refusals: Refusals) -> PlannedModel:
        return PlannedModel(
            shape=shape,
            precision=precision,
            weight_bytes=weight_bytes(shape, precision),
            refusals=refusals,
        )

    @property
    def kv_bytes_per_token(self) -> float:
        return self.shape.kv_bytes_per_token(BYTES_PER_PARAMETER[self.precision.kv])

    def rank_bytes(self, parallel: Parallel) -> float:
        """The weights of each device. All ranks keep the embeddings whole; a head that shares their
        weights becomes a matrix of its own, of which each has a part."""
        if parallel.tensor == 1:
            return self.weight_bytes / parallel.pipeline
        whole = _EMBEDDING_BYTES * self.shape.head_parameters
        split = self.weight_bytes - whole + (whole if self.shape.is_tied else 0.0)
        return (split / parallel.tensor + whole) / parallel.pipeline

    def kv_bytes(self, tokens: float, parallel: Parallel) -> float:
        """On each device, of a sequence of `tokens` with its state."""
        element_bytes = BYTES_PER_PARAMETER[self.precision.kv]
        kept = sum(
            kind.layers
            * kind.kv_elements
            * kind.kept_tokens(tokens)
            * element_bytes
            / min(parallel.tensor, kind.kv_heads)
            for kind in self.shape.attentions
        )
        state = self.shape.state_bytes_per_sequence / parallel.tensor
        return (kept + state) / parallel.pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyCapacity:
    """Of `devices` that share one copy. `kv_tokens` fit with all their KV, as none that a window
    has passed yet; `batch` sequences of the context asked for fit. The decode bounds are at that
    context, of one sequence and of the batch; the prefill bound is of one prompt of it."""

    device: str
    devices: int
    weight_bytes_per_device: float
    kv_tokens: int
    batch: int
    least_tpot_s: float
    batch_tpot_s: float
    decode_tokens_per_s: float
    prefill_s: float
    prefill_tokens_per_s: float


def smallest_copy(
    facts: PlannedModel,
    name: str,
    device: DeviceProfile,
    context_tokens: int,
    memory_fraction: float,
) -> CopyCapacity | None:
    """With the fewest devices (a power of two, by tensor parallelism) that hold the weights and
    one sequence. None: not even 8 do, or no worker can start with so many."""
    for ways in facts.refusals.degrees:
        found = capacity(
            facts, name, device, Parallel(tensor=ways), context_tokens, memory_fraction
        )
        if found.batch:
            return found
    return None


def capacity(
    facts: PlannedModel,
    name: str,
    device: DeviceProfile,
    parallel: Parallel,
    context_tokens: int,
    memory_fraction: float,
) -> CopyCapacity:
    """`batch` is 0 where the weights, or one sequence beside them, don't fit."""
    held = facts.rank_bytes(parallel)
    free = max(0.0, memory_fraction * device.memory_bytes - held)
    batch = int(free / facts.kv_bytes(context_tokens, parallel))
    times = roofline_times(
        device,
        facts.shape,
        precision=facts.precision,
        parallel=parallel,
        efficiency=IDEAL,
    )
    batch_tpot_s = times.step_s(decode_work(max(1, batch), max(1, batch) * context_tokens))
    prefill_s = times.step_s(prefill_work(context_tokens))
    return CopyCapacity(
        device=name,
        devices=parallel.devices,
        weight_bytes_per_device=held,
        kv_tokens=_tokens(facts, parallel, free),
        batch=batch,
        least_tpot_s=times.step_s(decode_work(1, context_tokens)),
        batch_tpot_s=batch_tpot_s,
        decode_tokens_per_s=batch / batch_tpot_s,
        prefill_s=prefill_s,
        prefill_tokens_per_s=parallel.pipeline * context_tokens / prefill_s,
    )


def _tokens(facts: PlannedModel, parallel: Parallel, free_bytes: float) -> int:
    state_bytes = facts.shape.state_bytes_per_sequence / parallel.devices
    per_token = facts.kv_bytes(1, parallel) - state_bytes
    return int(free_bytes / per_token) if per_token else 0
