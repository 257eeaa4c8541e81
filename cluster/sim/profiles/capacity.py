"""What of a model fits on devices, and how fast they could serve it at the very best. Pure.

The bounds take the data sheet at its word: no overheads, no latencies, every rate reached.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cluster.sim.profiles.roofline import Parallel, Precision, roofline_times, weight_bytes
from cluster.sim.profiles.schema import BYTES_PER_PARAMETER, DeviceProfile, Efficiency
from cluster.sim.profiles.worker_memory import PlannedWorker
from engine.core.model_shape import ModelShape
from engine.core.sizing import MOST_CONTEXT_BYTES, EngineLimits
from engine.core.step_times import decode_work, prefill_work
from engine.parallel.grid import Grid
from kvrelay.errors import ModelError
from kvrelay.types import size_text

IDEAL = Efficiency(memory=1.0, compute=1.0, overhead_s=0.0, all_reduce_latency_s=0.0)
TENSOR_DEGREES = (1, 2, 4, 8)
"""The ranks of a worker are processes of one machine, with a device each."""
STAGE_COUNTS = (1, 2, 4)


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
    """`weight_bytes` are the checkpoint's own where it is here, else computed. `dtype`: model.dtype
    of a cluster file that serves it so."""

    shape: ModelShape
    precision: Precision
    weight_bytes: float
    refusals: Refusals
    dtype: str = "auto"

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

    def rank_bytes(self, parallel: Parallel) -> tuple[float, ...]:
        """# stage |-> the weights on each of its devices. All ranks of the first stage keep the
        embeddings whole. A head that shares their weights becomes a matrix of its own, of which
        each rank of the last stage has a part."""
        if parallel.devices == 1:
            return (self.weight_bytes,)
        whole = BYTES_PER_PARAMETER[self.precision.computed] * self.shape.head_parameters
        layers = self.weight_bytes - whole * (1 if self.shape.is_tied else 2)
        grid, total = Grid(tensor=parallel.tensor, stages=parallel.pipeline), self.shape.layers
        shares = [len(grid.layers(at, total)) / total for at in range(grid.stages)]
        held = [layers * share / grid.tensor for share in shares]
        held[0] += whole
        held[-1] += whole / grid.tensor
        return tuple(held)

    def worker(
        self, device: DeviceProfile, parallel: Parallel, limits: EngineLimits
    ) -> PlannedWorker:
        """Raises ModelError for a device that can't hold the weights as they are loaded."""
        held = self.rank_bytes(parallel)
        if not self.refusals.refused and "float8" in (self.precision.weights, self.precision.kv):
            self._check_float8(device, parallel)
        return PlannedWorker(
            shape=self.shape,
            grid=Grid(tensor=parallel.tensor, stages=parallel.pipeline),
            weight_bytes=held,
            kv_element_bytes=BYTES_PER_PARAMETER[self.precision.kv],
            computed_bytes=BYTES_PER_PARAMETER[self.precision.computed],
            memory_bytes=device.memory_bytes,
            limits=limits,
        )

    def _check_float8(self, device: DeviceProfile, parallel: Parallel) -> None:
        """A worker loads weights of 16 bits and converts them there."""
        if "float8" not in device.flops_per_s:
            raise ModelError("float8 needs a device of compute capability 8.9, which it has not")
        if self.precision.weights != "float8":
            return
        wide = PlannedModel.of(
            self.shape, replace(self.precision, weights="float16"), self.refusals
        )
        loaded = max(wide.rank_bytes(parallel))
        if loaded + MOST_CONTEXT_BYTES > device.memory_bytes:
            raise ModelError(
                f"a worker converts weights to float8 on the device, where {size_text(loaded)} of "
                f"them in 16 bits don't fit in {size_text(device.memory_bytes)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyCapacity:
    """Of `devices` that share one copy. `weight_bytes_per_device` are those of the fullest.
    `kv_tokens` fit; `batch` sequences of the context asked for fit. The decode bounds are at that
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


@dataclass(frozen=True, slots=True)
class Unfit:
    """No worker starts, or it has no room for one sequence of the context asked for."""

    why: str


def smallest_copy(
    facts: PlannedModel,
    name: str,
    device: DeviceProfile,
    context_tokens: int,
    limits: EngineLimits,
) -> CopyCapacity | Unfit:
    """With the fewest devices (a power of two, by tensor parallelism) that hold the weights and
    one sequence, of the numbers with which a worker can start. If none do: why the most don't."""
    found: CopyCapacity | Unfit | None = None
    for ways in facts.refusals.degrees:
        found = capacity(facts, name, device, Parallel(tensor=ways), context_tokens, limits)
        if isinstance(found, CopyCapacity):
            return found
    assert found is not None, "a worker with one rank starts"
    return found


def capacity(
    facts: PlannedModel,
    name: str,
    device: DeviceProfile,
    parallel: Parallel,
    context_tokens: int,
    limits: EngineLimits,
) -> CopyCapacity | Unfit:
    try:
        worker = facts.worker(device, parallel, limits)
        sizing = worker.sizing()
    except ModelError as error:
        return Unfit(f"{parallel.devices} of them: {error}")
    batch = _batch(facts, parallel, worker, sizing.blocks, context_tokens)
    if not batch:
        room = f"{sizing.tokens} tokens of KV fit, a sequence has {context_tokens}"
        return Unfit(f"{parallel.devices} of them: {room}")
    times = roofline_times(
        device,
        facts.shape,
        precision=facts.precision,
        parallel=parallel,
        efficiency=IDEAL,
    )
    batch_tpot_s = times.step_s(decode_work(batch, batch * context_tokens))
    prefill_s = times.step_s(prefill_work(context_tokens))
    return CopyCapacity(
        device=name,
        devices=parallel.devices,
        weight_bytes_per_device=max(worker.weight_bytes),
        kv_tokens=sizing.tokens,
        batch=batch,
        least_tpot_s=times.step_s(decode_work(1, context_tokens)),
        batch_tpot_s=batch_tpot_s,
        decode_tokens_per_s=batch / batch_tpot_s,
        prefill_s=prefill_s,
        prefill_tokens_per_s=parallel.pipeline * context_tokens / prefill_s,
    )


def _batch(
    facts: PlannedModel, parallel: Parallel, worker: PlannedWorker, blocks: int, context: int
) -> int:
    """At most as many as a worker runs. Each kind of layers has as many blocks as any other, so
    windows help only where all have them. No worker can keep a state: it counts as blocks."""
    shape, layout = facts.shape, worker.layout
    kept = max(kind.kept_tokens(context) for kind in shape.attentions)
    state = shape.state_bytes_per_sequence / layout.bytes_per_block
    fit = int(blocks / (layout.blocks_for(int(kept)) + state))
    return min(fit, worker.limits.max_running_requests)
