"""Records a model's forward pass as a graph of operations, once, for any number of tokens.

Linear layers and attention stay whole. A model whose control flow depends on values can't be
recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

_TOKENS, _ROWS = 24, 3

_LIBRARY = torch.library.Library("kvrelay", "FRAGMENT")
_LIBRARY.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
LINEAR = torch.ops.kvrelay.linear.default
_LIBRARY.define("grouped_mm(Tensor rows, Tensor weights, Tensor ends) -> Tensor")
_GROUPED_MM = torch.ops.kvrelay.grouped_mm.default
"""Without torch's own checks, which accept only bfloat16."""


class NotCaptured(Exception):
    """The model's forward pass is no graph; the message says why."""


@torch.library.impl(_LIBRARY, "linear", "CompositeExplicitAutograd")
def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight, bias)


@torch.library.register_fake("kvrelay::linear", lib=_LIBRARY)
def _linear_shape(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@torch.library.impl(_LIBRARY, "grouped_mm", "CompositeExplicitAutograd")
def _grouped_mm(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.grouped_mm(rows, weights, offs=ends)


@torch.library.register_fake("kvrelay::grouped_mm", lib=_LIBRARY)
def _grouped_shape(rows: torch.Tensor, weights: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[2])


class _WholeProducts(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.nn.functional.linear:
            return _call_linear(*args, **(kwargs or {}))
        if func is torch._grouped_mm:
            return _call_grouped_mm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _call_linear(input: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
    product: torch.Tensor = LINEAR(input, weight, bias)
    return product


def _call_grouped_mm(
    rows: torch.Tensor, weights: torch.Tensor, offs: torch.Tensor, bias: None = None, **_: object
) -> torch.Tensor:
    product: torch.Tensor = _GROUPED_MM(rows, weights, offs)
    return product


Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Token ids and positions `[1, tokens]`, rows that need logits: logits `[rows, vocab]`."""


def capture(forward: Forward, device: torch.device) -> GraphModule:
    """`device` is the model's. Raises NotCaptured."""

    def traced(ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        with _WholeProducts():
            return forward(ids, positions, rows)

    places = torch.arange(_TOKENS, device=device)
    inputs = (torch.zeros_like(places)[None], places[None], places[-_ROWS:].clone())
    try:
        with torch.no_grad():
            made = make_fx(traced, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*inputs)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise NotCaptured(f"{type(error).__name__}: {reason}") from error
    _check_inputs(made)
    return made


def _check_inputs(made: GraphModule) -> None:
    """The graph must accept any number of tokens and of rows."""
    found = [node.meta["val"] for node in made.graph.find_nodes(op="placeholder")]
    tokens, _, rows = found
    if not isinstance(tokens.shape[1], torch.SymInt) or not isinstance(rows.shape[0], torch.SymInt):
        raise NotCaptured("it takes only one number of tokens")
    guards = sorted({str(guard.expr) for guard in tokens.fake_mode.shape_env.guards})
    if guards:
        raise NotCaptured(f"it branches on the number of tokens or rows: {', '.join(guards)}")
