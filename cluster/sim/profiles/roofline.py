"""Step times from a device's data sheet and a model's shape. Pure.

    step = overhead + per sequence + max(weights / bandwidth, operations / FLOP/s) of the linear
           layers + the same of attention (KV / bandwidth) + all-reduces, two per layer

Tensor parallelism divides all of it but the latency of the all-reduces. A step of prompts takes its
way through all stages of a pipeline, whose first stage is soon free for the next one. Where it
decodes, the pipeline is charged as a full one: a batch is cut into as many micro-batches as there
are stages, so each stage reads its weights for every one of them.

Which number formats a checkpoint's configuration says its weights are in. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.sim.profiles.schema import (
    BYTES_PER_PARAMETER,
    DeviceLink,
    DeviceProfile,
    Dtype,
    Efficiency,
)
from engine.core.model_shape import Attention, ModelShape
from engine.core.step_times import StepWork
from kvrelay.errors import ConfigError

_ACTIVATION_BYTES = 2
_ALL_REDUCES_PER_LAYER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Of weights, of routed experts' weights, and of the KV cache."""

    weights: Dtype = "float16"
    experts: Dtype = "float16"
    kv: Dtype = "float16"

    @property
    def computed(self) -> Dtype:
        """Of embeddings, head and activations."""
        return "float32" if self.weights == "float32" else "float16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    tensor: int = 1
    pipeline: int = 1

    @property
    def devices(self) -> int:
        return self.tensor * self.pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineTimes:
    """`link` joins the devices that share the model, `hop` the stages of the pipeline."""

    shape: ModelShape
    memory_bytes_per_s: float
    flops_per_s: float
    expert_flops_per_s: float
    link: DeviceLink
    hop: DeviceLink
    precision: Precision
    parallel: Parallel
    efficiency: Efficiency

    def step_s(self, work: StepWork) -> float:
        sampled = work.prefill_sequences + work.decode_sequences
        fixed_s = self.efficiency.overhead_s + self.efficiency.per_sequence_s * sampled
        tokens = work.prefill_tokens + work.decode_sequences
        attention_s = sum(self._attention_s(kind, work) for kind in self.shape.attentions)
        layers_s = self._linear_s(work, tokens, sampled) + attention_s
        layers_s += self._all_reduces_s(tokens, work)
        passes = 1 if work.decode_sequences else self.parallel.pipeline
        return fixed_s + passes * layers_s + self._hops_s(work, tokens)

    # --- linear layers --------------------------------------------------------------------------

    def _linear_s(self, work: StepWork, tokens: int, sampled: int) -> float:
        shape = self.shape
        routed = shape.active_parameters - shape.dense_parameters
        dense = shape.dense_parameters * tokens + shape.head_parameters * sampled
        ideal_s = 2 * dense / self.flops_per_s + 2 * routed * tokens / self.expert_flops_per_s
        compute_s = ideal_s / (self.efficiency.compute * self.parallel.devices)
        return max(compute_s, self._weights_s(work, tokens))

    def _weights_s(self, work: StepWork, tokens: int) -> float:
        shape, each = self.shape, BYTES_PER_PARAMETER
        dense = (shape.dense_parameters + shape.head_parameters) * each[self.precision.weights]
        experts = shape.touched_expert_parameters(tokens) * each[self.precision.experts]
        readers = self.parallel.tensor if work.decode_sequences else self.parallel.devices
        return self._read_s(dense + experts) / readers

    def _read_s(self, size_bytes: float) -> float:
        return size_bytes / (self.memory_bytes_per_s * self.efficiency.memory)

    # --- attention ------------------------------------------------------------------------------

    def _attention_s(self, kind: Attention, work: StepWork) -> float:
        """Prefill's KV is read from caches and left out; decode reads all that it sees."""
        mean_context = work.kv_tokens / max(1, work.decode_sequences)
        seen = kind.seen_tokens(mean_context) * work.decode_sequences
        new = work.prefill_tokens
        pairs = new * kind.seen_tokens(work.attended_tokens / new) if new else 0.0
        flops = pairs * kind.prefill_flops_per_pair + seen * kind.decode_flops_per_pair
        rate = self.flops_per_s * self.efficiency.compute * self.parallel.devices
        compute_s = flops * kind.layers / rate
        return max(compute_s, self._kv_s(kind, seen, work.decode_sequences))

    def _kv_s(self, kind: Attention, seen: float, sequences: int) -> float:
        """KV heads are split among devices as far as there are any; a state is read and written."""
        kv_bytes = seen * kind.kv_elements * BYTES_PER_PARAMETER[self.precision.kv]
        split = min(self.parallel.tensor, kind.kv_heads) * self.parallel.pipeline
        states_bytes = 2 * sequences * kind.state_bytes / self.parallel.devices
        return self._read_s(kind.layers * (kv_bytes / split + states_bytes))

    # --- between devices ------------------------------------------------------------------------

    def _all_reduces_s(self, tokens: int, work: StepWork) -> float:
        """A ring moves 2 (n - 1) / n of the activations over each device's link."""
        ways = self.parallel.tensor
        if ways == 1:
            return 0.0
        size_bytes = tokens * self.shape.hidden * _ACTIVATION_BYTES / self.parallel.pipeline
        each_s = 2 * (ways - 1) / ways * size_bytes / self.link.bandwidth_bytes_per_s
        latency_s = self.efficiency.all_reduce_latency_s + self.link.latency_s
        if not work.decode_sequences:
            latency_s /= self.parallel.pipeline
        return _ALL_REDUCES_PER_LAYER * self.shape.layers * (latency_s + each_s)

    def _hops_s(self, work: StepWork, tokens: int) -> float:
        """Of a whole step of prompts from stage to stage, or of each micro-batch."""
        stages = self.parallel.pipeline
        if stages == 1:
            return 0.0
        hops, passed = (stages, tokens / stages) if work.decode_sequences else (stages - 1, tokens)
        size_bytes = passed * self.shape.hidden * _ACTIVATION_BYTES / self.parallel.tensor
        return hops * (self.hop.latency_s + size_bytes / self.hop.bandwidth_bytes_per_s)


def roofline_times(
    device: DeviceProfile,
    shape: ModelShape,
    *,
    precision: Precision,
    parallel: Parallel,
    efficiency: Efficiency,
    devices_per_node: int = 8,
) -> RooflineTimes:
    """Raises ConfigError where the device can't compute in the precision, or wider."""
    near, far = device.links.intra_node, device.links.inter_node
    return RooflineTimes(
        shape=shape,
        memory_bytes_per_s=device.memory_bandwidth_bytes_per_s,
        flops_per_s=_flops_per_s(device, precision.weights),
        expert_flops_per_s=_flops_per_s(device, precision.experts),
        link=near if parallel.tensor <= devices_per_node else far,
        hop=near if parallel.devices <= devices_per_node else far,
        precision=precision,
        parallel=parallel,
        efficiency=efficiency,
    )


def _flops_per_s(device: DeviceProfile, dtype: Dtype) -> float:
    """Weights that the device can't multiply as they are, are widened to float16 first."""
    found = device.flops_per_s.get(dtype) or device.flops_per_s.get("float16")
    if found is None:
        raise ConfigError(f"flops_per_s has neither {dtype} nor float16")
    return found


def weight_bytes(shape: ModelShape, precision: Precision) -> float:
    """Embeddings and head have at least 16 bits, whatever the rest has."""
    each = BYTES_PER_PARAMETER
    layers = shape.dense_parameters * each[precision.weights]
    outside = shape.parameters - shape.dense_parameters - shape.expert_parameters
    experts = shape.expert_parameters * each[precision.experts]
    return layers + outside * each[precision.computed] + experts


_QUANTISED: dict[str, tuple[Dtype, Dtype]] = {
    "fp8": ("float8", "float8"),
    "mxfp4": ("float16", "float4"),
    "gptq": ("int4", "int4"),
    "awq": ("int4", "int4"),
}
"""# quantization_config's quant_method |-> of the dense weights, of the experts'"""


def precision_of(config: Mapping[str, object]) -> Precision:
    """16 bits where nothing is said."""
    quantised = config.get("quantization_config")
    method = quantised.get("quant_method") if isinstance(quantised, Mapping) else None
    if method in _QUANTISED:
        weights, experts = _QUANTISED[str(method)]
        return Precision(weights=weights, experts=experts)
    stored = config.get("dtype", config.get("torch_dtype"))
    dtype: Dtype = "float32" if stored == "float32" else "float16"
    return Precision(weights=dtype, experts=dtype)
