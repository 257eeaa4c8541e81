"""Makes a model's forward pass fast: packed or merged weights, a flat graph, fused operations.

The result is compared with the model's own forward pass, which stays in use if they differ.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.checks.summation_noise import noise_bound, row_differences, typical
from engine.compiled.chaining import FEW_TOKENS, by_tokens, chained, products_left
from engine.compiled.fp8 import in_fp8
from engine.compiled.fusing import (
    call_rotaries,
    fuse_attention,
    fuse_gates,
    fuse_norms,
    fuse_rotary,
    widen_softmax,
)
from engine.compiled.graph import Captured, call_group, call_stage, fold_constants
from engine.compiled.library import DTYPES, Fused, open_fused
from engine.compiled.merging import merge_graph, merge_projections, pack_graph, pack_modules
from engine.compiled.operations import Operations
from engine.compiled.recordings import recorded
from engine.compiled.source import write_forward
from engine.device.native_build import BuildError
from engine.model.capture import NotCaptured
from engine.model.families import has_experts
from engine.model.interface import Scores, attention_state
from engine.model.model import Model
from engine.model.packed_linear import padded
from kvrelay.errors import ModelError

log = logging.getLogger(__name__)

_LENGTHS = (1, 11, 19, 300)
"""Tokens of the compared runs; a model with a shorter context runs fewer."""
_MEASURED = 2
"""This many of the runs show how far rounding moves the logits."""
_ROWS = 19
"""Logits of this many last tokens are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The logits of the loaded model. `bound`: the largest allowed difference, as a share of their
    range."""

    rows: torch.Tensor
    bound: float


def compile_model(model: Model, *, fp8: bool = False, expected: Expected | None = None) -> Model:
    """Changes the modules of `model`. `fp8`: afterwards its linear layers multiply in FP8.
    `expected`: the model's own logits; None: they are measured. Raises ModelError if its new
    weights give other logits before that."""
    started_s = time.monotonic()
    expected = expected or expected_logits(model)
    compiled = _on_cpu(model) if model.on_cpu else _on_device(model)
    if compiled is None:
        _check(model, expected)
        return in_fp8(model) if fp8 else model
    worst = _worst(compiled.model, expected)
    if not worst <= expected.bound:
        _check(model, expected)
        log.warning("compile: the graph's logits are off by %.2g; the model's own is used", worst)
        return in_fp8(model) if fp8 else model
    log.info("compiled in %.1f s: %s", time.monotonic() - started_s, compiled.said)
    return in_fp8(compiled.model, compiled.made) if fp8 else compiled.model


@dataclass(frozen=True, slots=True)
class _Compiled:
    model: Model
    made: Captured
    said: str
    """What was done, in words."""


def _on_cpu(model: Model) -> _Compiled | None:
    """None: there is no graph, and the model's own weights are packed."""
    try:
        made = _captured(model)
    except NotCaptured as error:
        if model.recording is not None:
            return None
        pack_modules(model.module)
        log.info("compile: weights packed, but the forward pass is no graph: %s", error)
        return None
    pack_graph(made, model.module)
    fused = _open(model.dtype)
    said = _fuse(made, fused)
    return _Compiled(_written(model, made, fused), made, f"{made.calls} operations, {said}")


def _on_device(model: Model) -> _Compiled | None:
    """None: there is no graph, and the model's own projections are merged."""
    operations = _device_operations(model)
    try:
        made = None if operations is None else _captured(model)
    except NotCaptured as error:
        made = None
        log.info("compile: the forward pass is no graph: %s", error)
    if made is None:
        merged = merge_projections(model.module, lambda: _run(model, _ROWS))
        log.info("%d products of merged projections", merged)
        return None
    merged = merge_graph(made, model.module)
    said = _fuse(made, operations)
    if operations is not None:
        said += f", {fuse_attention(made, operations)} rotating attentions"
        said += f", {widen_softmax(made)} softmaxes with their conversion"
    flat = replace(model, flat=write_forward(made))
    return _Compiled(flat, made, f"{made.calls} operations, {merged} merged products, {said}")


def _device_operations(model: Model) -> Operations | None:
    """None: the model's own forward pass is kept. LongRoPE's modules are not captured."""
    if model.longrope is not None or find_spec("triton") is None:
        return None
    from engine.compiled.triton.operations import TritonOperations, runs_on

    return TritonOperations() if runs_on(model.device) else None


def _captured(model: Model) -> Captured:
    made = recorded(model)
    if model.group is not None:
        call_group(made, model.group)
    if model.stage is not None:
        call_stage(made, model.stage)
    call_rotaries(made, model.module)
    fold_constants(made)
    return made


def _fuse(made: Captured, fused: Operations | None) -> str:
    """The fused operations, in words."""
    if fused is None:
        return "none fused"
    gates, rotated = fuse_gates(made, fused), fuse_rotary(made, fused)
    return f"fused: {fuse_norms(made, fused)} norms, {rotated} rotations, {gates} gates"


def _written(model: Model, made: Captured, fused: Fused | None) -> Model:
    many = padded(write_forward(made))
    chains = None if fused is None else chained(made, fused)
    if chains is None:
        return replace(model, flat=many)
    few = write_forward(chains)
    own_tokens = 0 if products_left(chains) else FEW_TOKENS
    return replace(model, flat=by_tokens(few, many), own_tokens=own_tokens)


def _open(dtype: torch.dtype) -> Fused | None:
    if dtype not in DTYPES:
        return None
    try:
        return open_fused(dtype)
    except BuildError as error:
        log.warning("compile: operations are not fused: %s", error)
        return None


def _worst(compiled: Model, expected: Expected) -> float:
    try:
        return _difference(compiled, expected)
    except RuntimeError as error:
        log.warning("compile: the graph can't be run: %s", " ".join(str(error).split()))
        return float("inf")


def _check(model: Model, expected: Expected) -> None:
    if model.recording is not None:
        raise ModelError("its recorded forward pass can't be used, and it has no other")
    worst = _difference(model, expected)
    if not worst <= expected.bound:
        raise ModelError(
            f"packed or merged weights change the logits of this {model.config.model_type} model "
            f"by {worst:.2g} of their range: set engine.compile: off"
        )


def _difference(model: Model, expected: Expected) -> float:
    return _typical(model, row_differences(_logits(model).float(), expected.rows))


def expected_logits(model: Model) -> Expected:
    """The bound is measured in one short run, which takes a fraction of the time."""
    runs = [_run(model, tokens).float() for tokens in _LENGTHS]
    bounds = noise_bound(lambda: _run(model, _LENGTHS[_MEASURED]), runs[_MEASURED])
    rows = torch.cat(runs)
    return Expected(rows=rows, bound=_typical(model, bounds))


def _typical(model: Model, differences: torch.Tensor) -> float:
    return typical(differences, may_choose=has_experts(model.config), dtype=model.dtype)


@dataclass(frozen=True, slots=True)
class _OwnTokens:
    """Implements AttentionState: every token sees the tokens before it, and nothing is cached."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: Scores,
    ) -> torch.Tensor:
        out = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scores.scaling, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous()


def _logits(model: Model) -> torch.Tensor:
    return torch.cat([_run(model, tokens) for tokens in _LENGTHS])


@torch.inference_mode()
def _run(model: Model, tokens: int) -> torch.Tensor:
    most = getattr(model.config, "max_position_embeddings", None) or tokens
    places = torch.arange(min(tokens, most), device=model.device)
    ids = (places * 7 + 13) % model.config.vocab_size
    with attention_state(_OwnTokens()):
        return model.whole(ids[None], places[None], places[-_ROWS:])
