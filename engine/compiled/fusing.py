"""Finds operations to fuse in a captured graph: rotary embeddings, gated activations, and RMS norms
(arXiv:1910.07467 §4) with the sums before them.

Rotary embeddings that choose their factors while they run (LongRoPE) stay whole in a capture.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from engine.compiled.graph import Captured, TensorKind, is_call, kind, only_user, other_operand
from engine.compiled.operations import Operations
from engine.model.interface import OPERATOR, AttentionState

aten = torch.ops.aten
_Rotate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def fuse_rotary(made: Captured, fused: Operations) -> int:
    """One call for each rotated query or key. Returns their number."""
    count = sum(_rotary(made, node, fused) for node in list(made.graph.nodes))
    made.graph.eliminate_dead_code()
    return count


def _rotary(made: Captured, turned: Node, fused: Operations) -> bool:
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


def attend_rotating(
    state: AttentionState, rotate: _Rotate, layer: int, *parts: Any
) -> torch.Tensor:
    """`parts`: query, key, value, cos, sin, scores. `rotate` does it where `state` can't itself."""
    own: Callable[..., torch.Tensor] | None = getattr(state, "attend_rotating", None)
    if own is not None:
        return own(layer, *parts)
    query, key, value, cos, sin, scores = parts
    query, key = rotate(query, cos, sin), rotate(key, cos, sin)
    return state.attend(layer, query, key, value, scores)


def fuse_attention(made: Captured, fused: Operations) -> int:
    """One call for each attention and the rotations of its queries and keys, once `fuse_rotary` has
    found these. Returns their number."""
    found = made.graph.find_nodes(op="call_function", target=OPERATOR)
    return sum(_attention(made, node, fused.rotate) for node in found)


def _attention(made: Captured, node: Node, rotate: _Rotate) -> bool:
    """The new call has (rotate, cos, sin) and then the operator's own arguments."""
    query, key, *others = node.args
    if not (_is_rotation(query, rotate) and _is_rotation(key, rotate)):
        return False
    (asked, *angles), (held, *same) = query.args, key.args  # type: ignore[union-attr]
    if angles != same:
        return False
    known = made.add_constant(rotate, node)
    with made.graph.inserting_before(node):
        new = made.graph.call_function(attend_rotating, (known, *angles, asked, held, *others))
    new.meta["kind"] = kind(node)
    node.replace_all_uses_with(new)
    made.graph.eliminate_dead_code()
    return True


def _is_rotation(node: object, rotate: _Rotate) -> bool:
    """That only this attention needs. A method is a new object at each look-up."""
    return (
        isinstance(node, Node)
        and node.op == "call_function"
        and node.target == rotate
        and len(node.users) == 1
    )


def fuse_gates(made: Captured, fused: Operations) -> int:
    """One call for each activation of a gate and its product with the rest. Returns their
    number."""
    count = sum(_gate(made, node, fused) for node in list(made.graph.nodes))
    made.graph.eliminate_dead_code()
    return count


def _gate(made: Captured, activated: Node, fused: Operations) -> bool:
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
        if len(kind(gate).shape) == 3:
            new = made.graph.call_function(function, (gate, up))
        else:
            new = _of_rows(made, function, gate, up)
    new.meta["kind"] = kind(product)
    product.replace_all_uses_with(new)
    return True


def _of_rows(made: Captured, function: Any, *rows: Node) -> Node:
    """`[rows, width]`, such as experts have, as tokens of one step and back: views only."""
    parts = [made.graph.call_function(aten.unsqueeze.default, (one, 0)) for one in rows]
    for part, one in zip(parts, rows, strict=True):
        own = kind(one)
        part.meta["kind"] = TensorKind(own.dtype, (1, *own.shape), (own.strides[0], *own.strides))
    gated = made.graph.call_function(function, tuple(parts))
    gated.meta["kind"] = kind(parts[0])
    return made.graph.call_function(aten.squeeze.dim, (gated, 0))


def _are_alike(gate: Node, up: Node) -> bool:
    a, b = kind(gate), kind(up)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if len(a.shape) == 2:
        return a.strides[-1] == b.strides[-1] == 1
    return len(a.shape) == 3 and a.is_step and b.is_step


def _is_16_bit(node: Node) -> bool:
    return kind(node).dtype in (torch.bfloat16, torch.float16)


def widen_softmax(made: Captured) -> int:
    """A softmax in fp32 of 16-bit numbers, such as a router's: on a GPU it reads these itself, and
    the conversion is no kernel of its own. Returns their number."""
    found = made.graph.find_nodes(op="call_function", target=aten._softmax.default)
    count = sum(_softmax(made, node) for node in found)
    made.graph.eliminate_dead_code()
    return count


def _softmax(made: Captured, node: Node) -> bool:
    wide: Any = node.args[0] if is_call(node, aten._softmax.default) else None
    if not is_call(wide, aten._to_copy.default, 1) or wide.kwargs.get("dtype") != torch.float32:
        return False
    if not wide.kwargs.keys() <= {"dtype", "layout", "device"} or not _is_16_bit(wide.args[0]):
        return False
    with made.graph.inserting_before(node):
        new = made.graph.call_function(
            torch.softmax, (wide.args[0], node.args[1]), {"dtype": torch.float32}
        )
    new.meta["kind"] = kind(node)
    node.replace_all_uses_with(new)
    return True


@dataclass(frozen=True, slots=True)
class _Norm:
    source: Node
    weight: torch.Tensor  # [width], fp32
    eps: float
    rounds: bool  # before the weight
    result: Node


def fuse_norms(made: Captured, fused: Operations) -> int:
    """One call for each norm, or for a sum with its norm. Returns the number of norms."""
    found = [_match(made, node) for node in list(made.graph.nodes)]
    norms = [norm for norm in found if norm is not None]
    for norm in norms:
        weight = made.add_constant(norm.weight, norm.source.next)
        if _is_sum(norm.source):
            _replace_both(made, norm, weight, fused)
        else:
            _replace(made, norm, weight, fused)
    made.graph.eliminate_dead_code()
    return len(norms)


def _match(made: Captured, rsqrt: Node) -> _Norm | None:
    """x * rsqrt(mean(x^2) + eps), in fp32, times a weight, whatever the order of roundings."""
    if not is_call(rsqrt, aten.rsqrt.default, 1):
        return None
    total: Any = rsqrt.args[0]
    if not (is_call(total, aten.add.Tensor, 1) and isinstance(total.args[1], float)):
        return None
    mean: Any = total.args[0]
    if not (is_call(mean, aten.mean.dim, 1) and mean.args[1:] == ([-1], True)):
        return None
    power: Any = mean.args[0]
    if not (is_call(power, aten.pow.Tensor_Scalar, 1) and power.args[1] == 2):
        return None
    wide: Any = power.args[0]
    source: Any = wide.args[0] if is_call(wide, aten._to_copy.default) else wide
    scaled = only_user(rsqrt)
    assert scaled is not None
    if not is_call(scaled, aten.mul.Tensor) or other_operand(scaled, rsqrt) is not wide:
        return None
    eps: float = total.args[1]
    return _finish(made, source, scaled, eps)


def _finish(made: Captured, source: Node, scaled: Node, eps: float) -> _Norm | None:
    """Follows the weight and the roundings after `scaled`."""
    dtype, width = kind(source).dtype, kind(source).shape[-1]
    node, weight, result, rounds = scaled, None, None, False
    while (user := only_user(node)) is not None:
        if is_call(user, aten.mul.Tensor) and weight is None:
            weight, rounds = made.constant(other_operand(user, node)), kind(node).dtype == dtype
            if weight is None or weight.shape != (width,):
                break
        elif not is_call(user, aten._to_copy.default):
            break
        node = user
        if weight is not None and kind(node).dtype == dtype:
            result = node
            break
    if weight is None or result is None or not _is_ranked(source):
        return None
    return _Norm(source, weight.detach().float(), eps, rounds, result)


def _is_ranked(source: Node) -> bool:
    """`[1, tokens, width]` or `[1, tokens, heads, width]`."""
    return len(kind(source).shape) in (3, 4) and kind(source).is_step


def _is_sum(node: Node) -> bool:
    if not is_call(node, aten.add.Tensor) or node.kwargs or len(kind(node).shape) != 3:
        return False
    if not kind(node).is_step:
        return False
    return all(isinstance(part, Node) and kind(part) == kind(node) for part in node.args)


def _replace(made: Captured, norm: _Norm, weight: Node, fused: Operations) -> None:
    with made.graph.inserting_before(norm.result):
        new = made.graph.call_function(fused.rms_norm, (norm.source, weight, norm.eps, norm.rounds))
    new.meta["kind"] = kind(norm.result)
    norm.result.replace_all_uses_with(new)


def _replace_both(made: Captured, norm: _Norm, weight: Node, fused: Operations) -> None:
    source = norm.source
    with made.graph.inserting_after(weight):
        both = made.graph.call_function(
            fused.add_rms_norm, (*source.args, weight, norm.eps, norm.rounds)
        )
    with made.graph.inserting_after(both):
        new = made.graph.call_function(operator.getitem, (both, 1))
        total = made.graph.call_function(operator.getitem, (both, 0))
    new.meta["kind"], total.meta["kind"] = kind(norm.result), kind(source)
    norm.result.replace_all_uses_with(new)
    source.replace_all_uses_with(total)


_LIBRARY = torch.library.Library("kvrelay", "FRAGMENT")
_LIBRARY.define("angles(Tensor x, Tensor positions, str name, int width) -> (Tensor, Tensor)")
_ANGLES = torch.ops.kvrelay.angles.default


@torch.library.register_fake("kvrelay::angles", lib=_LIBRARY)
def _shapes(
    x: torch.Tensor, positions: torch.Tensor, _: str, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*positions.shape, width)
    return x.new_empty(shape), x.new_empty(shape)


@contextmanager
def whole_rotaries(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """A graph captured in this context names these modules instead of their operations."""
    found = {name: part for name, part in model.named_modules() if _is_rotary(part)}
    try:
        for name, part in found.items():
            part.forward = _Named(name, _width(part, dtype))
        yield
    finally:
        for part in found.values():
            del part.forward


def call_rotaries(made: Captured, model: torch.nn.Module) -> None:
    """The modules that a captured graph names."""
    for node in made.graph.find_nodes(op="call_function", target=_ANGLES):
        x, positions, name, _ = node.args
        module = made.add_constant(model.get_submodule(str(name)), node)
        with made.graph.inserting_before(node):
            angles = made.graph.call_function(operator.call, (module, x, positions))
        node.replace_all_uses_with(angles)
        made.graph.erase_node(node)


@dataclass(frozen=True, slots=True)
class _Named:
    name: str
    width: int

    def __call__(self, x: torch.Tensor, position_ids: torch.Tensor) -> object:
        return _ANGLES(x, position_ids, self.name, self.width)


def _is_rotary(part: torch.nn.Module) -> bool:
    return type(part).__name__.endswith("RotaryEmbedding")


def _width(part: torch.nn.Module, dtype: torch.dtype) -> int:
    cos, _ = part(torch.zeros(1, 1, 1, dtype=dtype), torch.zeros(1, 1, dtype=torch.long))
    return cos.shape[-1]
