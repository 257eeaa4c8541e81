"""Linear layers whose weights lie in memory as oneDNN computes with them. Runs in the worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.compiled.panels import panel_depth

_NO_MORE: tuple[str, list[float], str] = ("none", [], "")  # what to do with the product: nothing


@dataclass(frozen=True, slots=True)
class Packed:
    """`[width, in]` weights, packed, and their biases. Called with `[..., in]`."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    width: int
    nbytes: int
    depth: int | None = None
    """Of `panel_depth`: code of ours can read the weights."""

    @property
    def kind(self) -> tuple[torch.Size, bool]:
        """Of one kind, one piece of code computes."""
        return self.weight.shape, self.bias is None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(
            x, self.weight, self.bias, *_NO_MORE
        )
        return product


def can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN computes in this type here; float16 needs processors of its own kind."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def pack(weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]) -> Packed:
    """One layer that computes what these do beside each other: rows of weights after rows."""
    rows = weights[0] if len(weights) == 1 else torch.cat(list(weights))
    bias = join_biases(weights, biases)
    own_bytes = 0 if bias is None else bias.nbytes
    packed = torch.ops.mkldnn._reorder_linear_weight(rows.detach())
    return Packed(
        packed, bias, rows.shape[0], rows.nbytes + own_bytes, panel_depth(packed, rows.detach())
    )


def join_biases(
    weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> torch.Tensor | None:
    if all(bias is None for bias in biases):
        return None
    parts = [
        weight.new_zeros(weight.shape[0]) if bias is None else bias.detach()
        for weight, bias in zip(weights, biases, strict=True)
    ]
    return torch.cat(parts)


class PackedLinear(torch.nn.Module):
    """In place of an `nn.Linear`: `stop - start` of the columns that `packed` computes."""

    def __init__(self, packed: Packed, start: int, stop: int) -> None:
        super().__init__()
        self.packed, self.start, self.stop = packed, start, stop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = self.packed(x)
        if self.stop - self.start == self.packed.width:
            return product
        return product[..., self.start : self.stop]

    @property
    def weight(self) -> torch.Tensor:
        """A copy, for families whose routers read the weights of a layer that they don't call."""
        return self.packed.weight.to_dense()[self.start : self.stop]

    def extra_repr(self) -> str:
        return f"{self.start} to {self.stop} of {self.packed.width}"


def packed_bytes(module: torch.nn.Module) -> int:
    return sum(packed.nbytes for packed in _packed(module))


@torch.inference_mode()
def prepare(module: torch.nn.Module, tokens: int) -> None:
    """Has oneDNN make its code for so many tokens, once for layers that are alike."""
    alike = {packed.kind: packed for packed in _packed(module)}
    for packed in alike.values():
        x = torch.zeros(1, tokens, packed.weight.shape[1], dtype=packed.weight.dtype)
        packed(x)


def _packed(module: torch.nn.Module) -> list[Packed]:
    """Of all in `module`, shared ones once."""
    parts = {id(m.packed): m.packed for m in module.modules() if isinstance(m, PackedLinear)}
    return list(parts.values())
