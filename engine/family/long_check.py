"""Compares kvrelay's attention with the model's own on long sequences, in a small copy of it.

The copy is a random model of the family with a few layers, one of each kind, in float32, where
rounding hides nothing. Heads and their sizes are the checkpoint's own; vocabulary and feed-forward
layers are narrow. Windows and other borders are a few tokens, so that the effects of long sequences
appear early.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.initialization import no_init_weights

from engine.attention.torch_paged import PagedAttention
from engine.attention.torch_plan import Planner
from engine.checks.self_check import Trial, check_difference, trial_differences, trial_token_ids
from engine.core.step import StepBatch
from engine.model import interface
from engine.model.families import LongRope, longrope_border_tokens, refusal
from engine.model.kv_layout import derive_layout, layer_places, probe
from engine.model.model import LOAD_ERRORS, Model
from kvpool.memory.kv_memory import KvMemory

BORDER_TOKENS = 8
CHECK = "long sequence"
_LAYERS, _VOCAB_SIZE, _WIDTH = 2, 512, 32
_SPREAD = 1.6
"""Weights with this standard deviation, over the root of the inputs, make attention selective."""
_BORDERS = re.compile("window|chunk|original_max_position|index_topk|index_block")
_WIDTHS = re.compile("intermediate_size|ffn_(hidden_size|dim)|^n_inner$|^dff$")
_OF_LAYERS = re.compile("layer")
_LONG_TOLERANCE = 1e-3
_BLOCK_SIZE = 16


def check_long_sequences(model: Model, longest: int) -> None:
    """Runs a small copy of `model`. Raises ModelError that names the family."""
    small = small_copy(model, longest)
    shapes = probe(small)
    layout = derive_layout(shapes, dtype=small.dtype_name, block_size=_BLOCK_SIZE)
    masked = not all(shape.is_plain for shape in shapes.values())
    planner = Planner(layout, small.device, small.dtype, masked)
    trial = _long(min(300, longest))
    with _whole_products():
        found = trial_differences(
            small,
            layout,
            trial,
            small.eager_logits(trial_token_ids(small, trial)),
            lambda memory, batch: _paged_logits(small, planner, memory, batch, trial.tokens),
        )
    check_difference(model, CHECK, float(found.max()), _LONG_TOLERANCE)


@contextmanager
def _whole_products() -> Iterator[None]:
    """fp32 is multiplied with all its bits, even if the serving model uses TF32."""
    usual = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(usual)


def _paged_logits(
    model: Model, planner: Planner, memory: KvMemory, batch: StepBatch, tokens: int
) -> torch.Tensor:
    """`tokens` of each sequence in the end."""
    plan = planner.plan(batch.slices)
    state = PagedAttention(memory, plan, layer_places(memory.layout))
    longrope = model.longrope
    with nullcontext() if longrope is None else longrope.long(tokens > longrope.border_tokens):
        return model.forward(plan.token_ids, plan.positions, plan.logit_rows, state).float()


def small_copy(model: Model, longest: int) -> Model:
    """`longest`: tokens of the longest sequence that will be served; borders beyond it stay. Raises
    ModelError if the family has no such copy."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module, config = _built(model, longest)
        _unsettle(module)
    return _running(model, module, config)


def blank_copy(model: Model) -> Model:
    """A small copy with whatever its memory holds as weights: enough to learn its shapes, and made
    at once. Raises ModelError like `small_copy`."""
    with no_init_weights():
        module, config = _built(model, longest=0)
    return _running(model, module, config)


def _built(model: Model, longest: int) -> tuple[Any, Any]:
    try:
        config = small_config(model.module.config, longest)
        module = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=interface.NAME
        )
    except LOAD_ERRORS as error:
        reason = " ".join(str(error).split())
        kind = model.config.model_type
        raise refusal(kind, CHECK, f"a model of two layers can't be made: {reason}") from error
    return module, config


def _running(model: Model, module: Any, config: Any) -> Model:
    border = longrope_border_tokens(config)
    return Model(
        module=module.to(model.device).eval().requires_grad_(False),
        config=config,
        device=model.device,
        dtype=torch.float32,
        longrope=None if border is None else LongRope(module, border),
    )


def small_config(config: PretrainedConfig, longest: int) -> Any:
    """Derived from `config`, which stays unchanged."""
    small = copy.deepcopy(config)
    _keep_layers(small)
    for name, value in list(vars(small).items()):
        if _is_count(value):
            setattr(small, name, _small_count(name, value, longest))
        elif isinstance(value, dict):
            setattr(small, name, _small_rope(value, longest))
    if hasattr(small, "initializer_range"):
        small.initializer_range = _SPREAD / small.hidden_size**0.5
    return small


def _small_count(name: str, value: int, longest: int) -> int:
    if _OF_LAYERS.search(name):
        return value
    if _BORDERS.search(name):
        return BORDER_TOKENS if BORDER_TOKENS < value < longest else value
    if "vocab_size" in name:
        return min(value, _VOCAB_SIZE)
    if name.endswith("token_id"):
        return value if value < _VOCAB_SIZE else 0
    return min(value, _WIDTH) if _WIDTHS.search(name) else value


def _small_rope(parameters: dict[str, Any], longest: int) -> dict[str, Any]:
    """The parameters of rotary embeddings, which may be one level deeper for kinds of layers."""
    return {
        name: _small_rope(value, longest)
        if isinstance(value, dict)
        else _small_count(name, value, longest)
        if _is_count(value) and _BORDERS.search(name)
        else value
        for name, value in parameters.items()
    }


def _keep_layers(config: Any) -> None:
    """The first layer of each kind; twice as many if layers share the KV of earlier ones."""
    count = config.num_hidden_layers
    kinds: Sequence[str] = getattr(config, "layer_types", None) or ["full_attention"] * count
    firsts = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    if getattr(config, "num_kv_shared_layers", 0):
        config.num_kv_shared_layers = len(firsts)
        firsts *= 2
    keep_layers(config, (firsts * _LAYERS)[: max(_LAYERS, len(firsts))])


def keep_layers(config: Any, kept: Sequence[int]) -> None:
    """Changes what the configuration says for each layer."""
    count = config.num_hidden_layers
    for name, value in list(vars(config).items()):
        if isinstance(value, list | tuple) and len(value) == count:
            setattr(config, name, type(value)(value[layer] for layer in kept))
    config.num_hidden_layers = len(kept)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _unsettle(module: torch.nn.Module) -> None:
    """Gives parameters that start as constants (norms, biases, sinks) values with an effect."""
    for tensor in module.parameters():
        if tensor.ndim == 1:
            tensor.data += 0.2 * torch.randn_like(tensor)


def _long(tokens: int) -> Trial:
    """For sequences of at least four tokens."""
    half = tokens // 2
    return Trial(
        sequences=2,
        tokens=tokens,
        steps=(
            ((0, 0, half),),
            ((0, half, tokens - 2), (1, 0, tokens - 1)),
            ((0, tokens - 2, tokens - 1), (1, tokens - 1, tokens)),
            ((0, tokens - 1, tokens),),
        ),
    )
