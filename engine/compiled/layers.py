"""Finds rotary embeddings and gated activations in a captured graph."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from engine.compiled.graph import Captured, is_call, kind, only_user, other_operand
from engine.compiled.library import Fused

aten = torch.ops.aten


def fuse_rotary(made: Captured, fused: Fused) -> int:
    """One call for each rotated query or key; how many were found."""
    count = sum(_rotary(made, node, fused) for node in list(made.graph.nodes))
    made.graph.eliminate_dead_code()
    return count


def _rotary(made: Captured, turned: Node, fused: Fused) -> bool:
    """x * cos + cat(-far, near) * sin, where x = cat(near, far)."""
    source = _halves(turned)
    by_sin = only_user(turned) if source is not None else None
    if source is None or by_sin is None or not is_call(by_sin, aten.mul.Tensor, 1):
        return False
    result = only_user(by_sin)
    if result is None or not is_call(result, aten.add.Tensor):
        return False
    by_cos: Any = other_operand(result, by_sin)
    if not is_call(by_cos, aten.mul.Tensor, 1) or source not in by_cos.args:
        return False
    cos, sin = other_operand(by_cos, source), other_operand(by_sin, turned)
    if not (_are_angles(cos, source) and _are_angles(sin, source)):
        return False
    with made.graph.inserting_before(result):
        new = made.graph.call_function(fused.rotate, (source, cos, sin))
    new.meta["kind"] = kind(result)
    result.replace_all_uses_with(new)
    return True


def _halves(turned: Node) -> Node | None:
    """The x of cat(-x[half:], x[:half])."""
    parts: Any = turned.args[0] if is_call(turned, aten.cat.default) else ()
    if len(parts) != 2:
        return None
    minus, near = parts
    far: Any = minus.args[0] if is_call(minus, aten.neg.default) else None
    slices = aten.slice.Tensor
    if not (is_call(near, slices) and is_call(far, slices) and near.args[0] is far.args[0]):
        return None
    source: Node = near.args[0]
    shape = kind(source).shape
    if len(shape) != 4 or not isinstance(shape[3], int) or not kind(source).is_step:
        return None
    half = shape[3] // 2
    is_whole = near.args[1:] == (3, 0, half) and far.args[1:3] == (3, half)
    return source if is_whole else None


def _are_angles(node: object, source: Node) -> bool:
    """`[1, 1, tokens, dim]`, as wide as `source`."""
    if not isinstance(node, Node):
        return False
    found, own = kind(node), kind(source)
    is_shared = len(found.shape) == 4 and found.shape[:2] == (1, 1)
    fits = found.shape[2:] == own.shape[2:] and found.dtype == own.dtype
    return is_shared and fits and found.is_step


def fuse_gates(made: Captured, fused: Fused) -> int:
    """One call for each activation of a gate and its product with the rest."""
    count = sum(_gate(made, node, fused) for node in list(made.graph.nodes))
    made.graph.eliminate_dead_code()
    return count


def _gate(made: Captured, activated: Node, fused: Fused) -> bool:
    function = None
    if is_call(activated, aten.silu.default, 1):
        function = fused.silu_mul
    elif is_call(activated, aten.gelu.default, 1) and activated.kwargs == {"approximate": "tanh"}:
        function = fused.gelu_tanh_mul
    product = only_user(activated) if function is not None else None
    if function is None or product is None or not is_call(product, aten.mul.Tensor):
        return False
    gate, up = activated.args[0], other_operand(product, activated)
    if not (isinstance(gate, Node) and isinstance(up, Node) and _are_alike(gate, up)):
        return False
    with made.graph.inserting_before(product):
        new = made.graph.call_function(function, (gate, up))
    new.meta["kind"] = kind(product)
    product.replace_all_uses_with(new)
    return True


def _are_alike(gate: Node, up: Node) -> bool:
    a, b = kind(gate), kind(up)
    is_same = len(a.shape) == 3 and a.shape == b.shape and a.dtype == b.dtype
    return is_same and a.is_step and b.is_step
