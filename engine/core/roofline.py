"""Guesses step times from a model's size and the kind of device, without measurements. Pure.

The guess is off by some factor, which the worker's corrections learn as it runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.step_times import LinearTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """`kv_elements`: of one token's KV over all layers."""

    weight_bytes: int
    parameters: int
    layers: int
    kv_elements: int
    kv_token_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """`layer_s` is the fixed time of a layer."""

    flops_per_s: float
    bytes_per_s: float
    layer_s: float


CPU_THREAD = Roofline(flops_per_s=3e10, bytes_per_s=1e10, layer_s=6e-4)
CUDA = Roofline(flops_per_s=1e14, bytes_per_s=1e12, layer_s=1e-4)


def guessed_times(size: ModelSize, device: Roofline, *, most_sequences: int) -> LinearTimes:
    token_s = 2 * size.parameters / device.flops_per_s
    step_s = device.layer_s * size.layers + size.weight_bytes / device.bytes_per_s
    return LinearTimes(
        prefill_overhead_s=step_s,
        prefill_token_s=token_s,
        prefill_pair_s=2 * size.kv_elements / device.flops_per_s,
        decode_knots=tuple((n, step_s + n * token_s) for n in sorted({1, most_sequences})),
        decode_kv_token_s=size.kv_token_bytes / device.bytes_per_s,
        error=1.0,
    )
