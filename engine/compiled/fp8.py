"""Linear layers whose weights and activations are multiplied in FP8 (e4m3).

Each output channel of a weight has a scale, and so has each token of an activation: its largest
number becomes e4m3's largest. Weights are converted once, when a worker loads, activations in each
step. Embeddings and the output layer stay as they are (Micikevicius et al., arXiv:2209.05433;
scales by row as in `torch._scaled_mm`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import Node

from engine.compiled.graph import Captured
from engine.compiled.merging import linears
from engine.compiled.source import write_forward
from engine.model.model import Model
from kvrelay.errors import ModelError

LARGEST = 448.0
LEAST_SCALE = 1e-12
"""Rows of zeros have this scale, and stay zeros."""
_ALIGNED = 16
"""Numbers of inputs and outputs of a product in FP8 are multiples of this."""
_CAPABILITY = (8, 9)


class Fp8Linear(torch.nn.Module):
    """Replaces an `nn.Linear`."""

    values: torch.Tensor  # e4m3 [outputs, inputs]
    scales: torch.Tensor  # fp32 [1, outputs]

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        values, scales = to_fp8(weight)
        self.register_buffer("values", values)
        self.register_buffer("scales", scales.T)
        self.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fp8_linear(x, self.values, self.scales, self.bias)

    def extra_repr(self) -> str:
        return "{1} to {0} in FP8".format(*self.values.shape)


def to_fp8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`rows` `[rows, width]` as e4m3, and the scale of each, fp32 `[rows, 1]`."""
    if rows.is_cuda:
        from engine.compiled.triton.fp8 import rows_to_fp8

        return rows_to_fp8(rows)
    wide = rows.float()
    scales = wide.abs().amax(dim=1, keepdim=True).clamp(min=LEAST_SCALE) / LARGEST
    return (wide / scales).to(torch.float8_e4m3fn), scales


def fp8_linear(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`x` `[..., inputs]` in bfloat16, times weights as Fp8Linear holds them."""
    rows, row_scales = to_fp8(x.reshape(-1, x.shape[-1]))
    product = torch._scaled_mm(
        rows, values.T, row_scales, scales, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    if bias is not None:
        product += bias
    return product.view(*x.shape[:-1], values.shape[0])


def in_fp8(model: Model, made: Captured | None = None) -> Model:
    """Changes the modules of `model`, and its graph if it has one. Raises ModelError for another
    dtype than bfloat16."""
    if model.dtype is not torch.bfloat16:
        raise ModelError(f"quantization: fp8 serves bfloat16, not {model.dtype}: set model.dtype")
    places = [place for place in linears(model.module) if _becomes_fp8(model, place.module)]
    nodes = {} if made is None else _linear_nodes(made)
    while places:
        place = places.pop()
        layer = Fp8Linear(place.module.weight.detach(), place.module.bias)
        setattr(place.parent, place.name, layer)
        node = nodes.pop(id(place.module.weight), None)
        if made is not None and node is not None:
            _use(made, node, layer)
    if made is None:
        return replace(model, in_fp8=True)
    return replace(model, in_fp8=True, flat=write_forward(made))


def check_fp8(device: torch.device) -> None:
    """Raises ModelError for a device that does not multiply in FP8."""
    if device.type != "cuda":
        raise ModelError(f"quantization: fp8 needs a CUDA device, not {device}: set none")
    if torch.cuda.get_device_capability(device) < _CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise ModelError(f"quantization: fp8 needs compute capability 8.9, which {name} has not")


def _becomes_fp8(model: Model, layer: torch.nn.Linear) -> bool:
    fits = all(size % _ALIGNED == 0 for size in layer.weight.shape)
    return fits and layer is not model.module.get_output_embeddings()


def _linear_nodes(made: Captured) -> dict[int, Node]:
    """# id of a weight |-> the call that multiplies with it"""
    linear = torch.nn.functional.linear
    nodes = made.graph.find_nodes(op="call_function", target=linear)
    return {id(made.constant(node.args[1])): node for node in nodes}


def _use(made: Captured, node: Node, layer: Fp8Linear) -> None:
    """In place of the node's weight, which is freed."""
    x, weight, bias = node.args
    parts = [made.add_constant(one, node) for one in (layer.values, layer.scales)]
    node.target, node.args = fp8_linear, (x, *parts, bias)
    assert isinstance(weight, Node), weight
    made.forget(weight)
