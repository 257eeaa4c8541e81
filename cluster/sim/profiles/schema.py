"""What a hardware profile's YAML file may hold, by its `kind`. Pure.

Units are in the names. What a file leaves out is taken from the `device` it names, if any.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cluster.config.types import Count, Quantity, Section

Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Dtype = Literal["float32", "float16", "float8", "int8", "float4", "int4"]

BYTES_PER_PARAMETER: dict[Dtype, float] = {
    "float32": 4.0,
    "float16": 2.0,
    "float8": 1.0,
    "int8": 1.0,
    "float4": 0.53125,
    "int4": 0.5625,
}
"""float16 stands for bfloat16 too; the 4-bit ones with their scales (of 32: one or two bytes)."""


class Power(Section):
    idle: Quantity = 0.0
    peak: Quantity


class DeviceLink(Section):
    """One direction of one device's way to another."""

    bandwidth_bytes_per_s: Positive
    latency_s: Quantity = 0.0


class DeviceLinks(Section):
    intra_node: DeviceLink
    inter_node: DeviceLink
    host: DeviceLink


class DeviceProfile(Section):
    """One accelerator. `flops_per_s` are dense operations by the type they are done in."""

    source: str
    memory_bytes: Count
    memory_bandwidth_bytes_per_s: Positive
    flops_per_s: dict[Dtype, Positive]
    power_w: Power
    price_per_hour: Quantity | None = None
    links: DeviceLinks


class _Profile(Section):
    """What every kind has. Prices, power and memory are of all `devices` together."""

    name: str
    device: str | None = None
    """A known device's name, or none."""
    devices: Count = 1
    price_per_hour: Quantity | None = None
    power_w: Power | None = None
    memory_bytes: Count | None = None
    links: DeviceLinks | None = None


class LinearProfile(_Profile):
    """Coefficients as a worker fits them when it starts."""

    kind: Literal["linear"]
    prefill_overhead_s: Quantity
    prefill_token_s: Quantity
    prefill_pair_s: Quantity
    prefill_sequence_s: Quantity = 0.0
    decode_knots: tuple[tuple[Count, Quantity], ...] = Field(min_length=1)
    """Pairs of sequences and seconds, ascending: a decode step at no context."""
    decode_kv_token_s: Quantity


class TableProfile(_Profile):
    """Measured rows of prompt_size, batch_size, prompt_time and token_time (ms), as splitwise-sim's
    perf_model.csv has them; `where` picks the rows by other columns."""

    kind: Literal["table"]
    file: str
    where: dict[str, str]
    mixed_factor: Positive = 1.1
    extrapolate: bool = False


class SiliconProfile(_Profile):
    """End-to-end rows of TTFT and TPOT at fixed concurrency, as aiconfigurator's h200 table."""

    kind: Literal["silicon"]
    file: str
    where: dict[str, str]
    extrapolate: bool = False


class DistServeProfile(_Profile):
    """Polynomials fitted by DistServe's simulator, in its profiler-*.json files."""

    kind: Literal["distserve"]
    file: str
    model: str
    tensor_parallel: Count = 1
    pipeline_parallel: Count = 1


class DynamoProfile(_Profile):
    """Dynamo's mocker: polynomials in new tokens and in the used share of `kv_capacity_tokens`.

    `saturates`: sequences that share blocks may sum to more than the capacity: it counts as full.
    """

    kind: Literal["dynamo"]
    kv_capacity_tokens: Count
    saturates: bool = False


class Efficiency(Section):
    """What share of the data sheet is reached, and what no data sheet says."""

    memory: Fraction = 0.8
    compute: Fraction = 0.6
    overhead_s: Quantity = 0.002
    per_sequence_s: Quantity = 0.0
    all_reduce_latency_s: Quantity = 10e-6


class RooflineProfile(_Profile):
    """From a device's data sheet (required here) and a model's shape. `model` is a bundled shape's
    name or a folder with a config.json; `devices` is the product of both degrees."""

    kind: Literal["roofline"]
    model: str
    weight_dtype: Dtype = "float16"
    expert_dtype: Dtype | None = None
    kv_dtype: Dtype = "float16"
    tensor_parallel: Count = 1
    pipeline_parallel: Count = 1
    efficiency: Efficiency = Efficiency()


Profile = (
    LinearProfile
    | TableProfile
    | SiliconProfile
    | DistServeProfile
    | DynamoProfile
    | RooflineProfile
)
KINDS: dict[str, type[Profile]] = {
    "linear": LinearProfile,
    "table": TableProfile,
    "silicon": SiliconProfile,
    "distserve": DistServeProfile,
    "dynamo": DynamoProfile,
    "roofline": RooflineProfile,
}
