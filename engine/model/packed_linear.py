"""Linear layers with weights in oneDNN's own memory order. Runs in the worker.

Our code can read packed weights if they are in panels of 64 outputs, one after another, each
`[units, 64]`, where a unit is one float32 or a pair of bfloat16.

A step's number of tokens is rounded up to one of few, because oneDNN generates code for each
number. That takes some milliseconds for each kind of product, and oneDNN keeps only the last
thousand. Results for added tokens are never read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from engine.model.capture import Forward
from engine.model.interface import AttentionState, Scores, attention_state, current_state

PANEL = 64
_UNIT_BYTES = 4
_BITS = {2: torch.int16, 4: torch.int32}


def panel_depth(packed: torch.Tensor, weight: torch.Tensor) -> int | None:
    """The inputs in a panel, with padding; None if the weights have another order.

    `packed` is oneDNN's form of `weight`, `[outputs, inputs]`; the first and the last panel are
    compared bit by bit.
    """
    outputs, inputs = weight.shape
    size = weight.element_size()
    panels, numbers = -(-outputs // PANEL), _UNIT_BYTES // size
    nbytes = torch.ops.mkldnn._nbytes(packed)
    depth, rest = divmod(nbytes, panels * PANEL * size)
    if rest or depth < inputs or depth % numbers or inputs % numbers:
        return None
    memory = (ctypes.c_char * nbytes).from_address(torch.ops.mkldnn.data_ptr(packed))
    bits = torch.frombuffer(memory, dtype=_BITS[size])
    found = bits.view(panels, depth // numbers, PANEL, numbers)
    is_so = all(torch.equal(found[i], _panel(weight, i, depth, numbers)) for i in (0, panels - 1))
    return depth if is_so else None


def _panel(weight: torch.Tensor, index: int, depth: int, numbers: int) -> torch.Tensor:
    part = weight[index * PANEL : (index + 1) * PANEL]
    whole = part.new_zeros(PANEL, depth)
    whole[: part.shape[0], : part.shape[1]] = part
    bits = whole.view(_BITS[weight.element_size()])
    return bits.view(PANEL, depth // numbers, numbers).transpose(0, 1)


_NO_MORE: tuple[str, list[float], str] = ("none", [], "")  # the product is not changed further


@dataclass(frozen=True, slots=True)
class Packed:
    """Packed `[width, in]` weights and their biases. Called with `[..., in]`."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    width: int
    nbytes: int
    depth: int | None = None
    """From `panel_depth`: our code can read the weights."""

    @property
    def kind(self) -> tuple[torch.Size, bool]:
        """The same code computes products of one kind."""
        return self.weight.shape, self.bias is None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(
            x, self.weight, self.bias, *_NO_MORE
        )
        return product


def can_pack(weight: torch.Tensor) -> bool:
    """True if oneDNN computes in this type here; float16 needs special processors."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def pack(weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]) -> Packed:
    """One layer that computes these side by side: the rows of their weights in order."""
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
    """Replaces an `nn.Linear`: `stop - start` of the columns that `packed` computes."""

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
    """Lets oneDNN generate its code for this many tokens, once for identical layers."""
    alike = {packed.kind: packed for packed in _packed(module)}
    for packed in alike.values():
        x = torch.zeros(1, tokens, packed.weight.shape[1], dtype=packed.weight.dtype)
        packed(x)


def _packed(module: torch.nn.Module) -> list[Packed]:
    """All packed layers in `module`, shared ones once."""
    parts = {id(m.packed): m.packed for m in module.modules() if isinstance(m, PackedLinear)}
    return list(parts.values())


_STEPS = ((16, 1), (64, 4), (512, 16))
"""Up to the first number of tokens: multiples of the second."""
_LARGE = 64


def rounded(tokens: int) -> int:
    size = next((size for most, size in _STEPS if tokens <= most), _LARGE)
    return -(-tokens // size) * size


def sizes(most: int) -> list[int]:
    """Padded sizes of steps of up to `most` tokens."""
    return sorted({rounded(tokens) for tokens in range(1, most + 1)})


def padded(forward: Forward) -> Forward:
    """`forward` for any number of tokens and of rows."""

    def run(ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        tokens, wanted = ids.shape[1], rows.shape[0]
        rows = pad(rows, (0, rounded(wanted) - wanted))
        more = rounded(tokens) - tokens
        if not more:
            return forward(ids, positions, rows)[:wanted]
        with attention_state(_Unpadded(current_state(), tokens, more)):
            return forward(pad(ids, (0, more)), pad(positions, (0, more)), rows)[:wanted]

    return run


@dataclass(frozen=True, slots=True)
class _Unpadded:
    """Implements AttentionState: `state` sees only the step's own tokens."""

    state: AttentionState
    tokens: int
    more: int

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: Scores,
    ) -> torch.Tensor:
        query, key, value = (one.narrow(2, 0, self.tokens) for one in (query, key, value))
        out = self.state.attend(layer, query, key, value, scores)
        return pad(out, (0, 0, 0, 0, 0, self.more))
