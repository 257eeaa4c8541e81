"""Whether packed weights lie in memory as code of ours reads them: panels of 64 outputs, one behind
the other, in each `[units, 64]`, where a unit is one float32 or a pair of bfloat16."""

from __future__ import annotations

import ctypes

import torch

PANEL = 64
_UNIT_BYTES = 4
_BITS = {2: torch.int16, 4: torch.int32}


def panel_depth(packed: torch.Tensor, weight: torch.Tensor) -> int | None:
    """The inputs in a panel, with what is filled up; None where it isn't so.

    `packed` is what oneDNN made of `weight`, `[outputs, inputs]`; the first and the last panel are
    compared, to the bit.
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
