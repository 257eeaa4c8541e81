"""A small random model of a checkpoint's family: what only long sequences show appears early.

It has few layers, one of each kind, in float32. Heads and their sizes are the checkpoint's own;
vocabulary and feed-forward layers are narrow. Windows and other borders are a few tokens.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from engine import attention
from engine.families import longrope_border_tokens, refusal
from engine.longrope import LongRope
from engine.model import LOAD_ERRORS, Model

BORDER_TOKENS = 8
CHECK = "long sequence"
_LAYERS, _VOCAB_SIZE, _WIDTH = 2, 512, 32
_SPREAD = 1.6
"""Weights of this standard deviation, over the root of the inputs, make attention choose."""
_BORDERS = re.compile("window|chunk|original_max_position|index_topk|index_block")
_WIDTHS = re.compile("intermediate_size|ffn_(hidden_size|dim)|^n_inner$|^dff$")
_OF_LAYERS = re.compile("layer")


def small_copy(model: Model, longest: int) -> Model:
    """`longest`: tokens of the longest sequence that will be served; borders beyond it stay.
    Raises ModelError where the family has no such copy."""
    try:
        config = small_config(model.module.config, longest)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=attention.NAME
            )
            _unsettle(module)
    except LOAD_ERRORS as error:
        reason = " ".join(str(error).split())
        kind = model.config.model_type
        raise refusal(kind, CHECK, f"a model of two layers can't be made: {reason}") from error
    module = module.to(model.device).eval().requires_grad_(False)
    border = longrope_border_tokens(config)
    return Model(
        module=module,
        config=config,
        device=model.device,
        dtype=torch.float32,
        longrope=None if border is None else LongRope(module, border),
    )


def small_config(config: PretrainedConfig, longest: int) -> Any:
    """Of `config`, which stays as it is."""
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
    """The parameters of rotary embeddings, which may lie one level deeper for kinds of layers."""
    return {
        name: _small_rope(value, longest)
        if isinstance(value, dict)
        else _small_count(name, value, longest)
        if _is_count(value) and _BORDERS.search(name)
        else value
        for name, value in parameters.items()
    }


def _keep_layers(config: Any) -> None:
    """The first layer of each kind; twice as many where layers share the KV of earlier ones."""
    count = config.num_hidden_layers
    kinds: Sequence[str] = getattr(config, "layer_types", None) or ["full_attention"] * count
    firsts = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    if getattr(config, "num_kv_shared_layers", 0):
        config.num_kv_shared_layers = len(firsts)
        firsts *= 2
    kept = (firsts * _LAYERS)[: max(_LAYERS, len(firsts))]
    for name, value in list(vars(config).items()):
        if isinstance(value, list | tuple) and len(value) == count:
            setattr(config, name, type(value)(value[layer] for layer in kept))
    config.num_hidden_layers = len(kept)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _unsettle(module: torch.nn.Module) -> None:
    """Gives what starts at constants (norms, biases, sinks) values that matter."""
    for tensor in module.parameters():
        if tensor.ndim == 1:
            tensor.data += 0.2 * torch.randn_like(tensor)
