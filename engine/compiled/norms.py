"""Finds RMS norms (arXiv:1910.07467 §4) in a captured graph, and the sums before them."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from engine.compiled.graph import Captured, is_call, kind, only_user, other_operand
from engine.compiled.library import Fused

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _Norm:
    source: Node
    weight: torch.Tensor  # [width], fp32
    eps: float
    rounds: bool  # before the weight
    result: Node


def fuse_norms(made: Captured, fused: Fused) -> int:
    """One call for each norm, and for a sum with the norm of it; how many norms were found."""
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
    """x * rsqrt(mean(x^2) + eps), in fp32, times a weight, in whatever order it is rounded."""
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
    """Follows the weight and the roundings behind `scaled`."""
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


def _replace(made: Captured, norm: _Norm, weight: Node, fused: Fused) -> None:
    with made.graph.inserting_before(norm.result):
        new = made.graph.call_function(fused.rms_norm, (norm.source, weight, norm.eps, norm.rounds))
    new.meta["kind"] = kind(norm.result)
    norm.result.replace_all_uses_with(new)


def _replace_both(made: Captured, norm: _Norm, weight: Node, fused: Fused) -> None:
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
