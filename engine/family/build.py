"""Builds a checkpoint's model through transformers, and reads its weights."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PretrainedConfig
from transformers.monkey_patching import patch_output_recorders
from transformers.utils.logging import disable_progress_bar

from engine.family import attention
from engine.family.allowed import check_family
from engine.family.read_weights import read_weights
from engine.model import interface
from engine.model.checkpoint import Checkpoint, read_config
from engine.model.families import LongRope, longrope_border_tokens, refusal
from engine.model.model import DTYPES, LOAD_ERRORS, Model
from engine.model.weights import Cuts
from kvrelay.errors import ModelError


def load_model(checkpoint: Checkpoint, *, device: str, dtype: str) -> Model:
    """The whole model. `dtype` is a key of DTYPES or "auto" (the checkpoint's own). Raises
    ModelError."""
    return fill(bare_model(checkpoint.path, device=device, dtype=dtype), checkpoint)


def bare_model(folder: Path, *, device: str, dtype: str) -> Model:
    """The model for `fill`, of the folder's configuration: its parameters are on the meta device.
    Raises ModelError for a family that can't be served, and for a device that is not there."""
    _use_device(torch.device(device))
    config = _load_config(folder)
    check_family(config)
    attention.register()
    disable_progress_bar()  # several workers share one log
    with _load_errors(folder, device):
        return _bare(config, torch.device(device), _resolve_dtype(config, dtype))


def fill(model: Model, checkpoint: Checkpoint, cuts: Cuts = MappingProxyType({})) -> Model:
    """Reads the weights of a bare model, in place, straight to its device. Raises ModelError."""
    module, device = model.module, model.device
    with _load_errors(checkpoint.path, device):
        missing = read_weights(module, checkpoint.weights, device, model.dtype, cuts)
        module.eval().requires_grad_(False)
    _check_complete(checkpoint, missing)
    border = longrope_border_tokens(model.config)
    return replace(model, longrope=None if border is None else LongRope(module, border))


def bare_copy(model: Model, config: PretrainedConfig) -> Model:
    """Another bare model of the family. Raises one of LOAD_ERRORS."""
    return _bare(config, model.device, model.dtype)


def _bare(config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> Model:
    """As `from_pretrained` builds it before it reads weights."""
    family: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    config = copy.deepcopy(config)
    config._attn_implementation = interface.NAME
    config.dtype = dtype
    with ExitStack() as contexts:
        for context in family.get_init_context(dtype, False, False, None):
            contexts.enter_context(context)
        module = family(config)
        patch_output_recorders(module)
    return Model(module=module, config=config, device=device, dtype=dtype)


@contextmanager
def _load_errors(folder: Path, device: object) -> Iterator[None]:
    try:
        yield
    except LOAD_ERRORS as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"{folder} can't be loaded on {device}: {reason}") from error


def _check_complete(checkpoint: Checkpoint, missing: Iterable[str]) -> None:
    """transformers gives missing weights random values."""
    names = sorted(missing)
    if names:
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        raise ModelError(
            f"{checkpoint.path} lacks weights of its {checkpoint.architecture}: "
            f"{', '.join(names[:2])}{more}: download it again"
        )


def _use_device(device: torch.device) -> None:
    """This thread's work without a named GPU runs on this one. Raises ModelError."""
    if device.type != "cuda":
        return
    if torch.version.cuda is None:
        raise ModelError(
            f"no CUDA device here: torch {torch.__version__} is built without CUDA: install torch "
            "with CUDA or use the device cpu"
        )
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise ModelError(
            f"no CUDA device here: {device} was asked for and torch sees {count}: check "
            "nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
    if device.index is not None:
        torch.cuda.set_device(device)


def _load_config(folder: Path) -> PretrainedConfig:
    kind = read_config(folder).get("model_type")
    if isinstance(kind, str) and kind not in CONFIG_MAPPING:
        raise refusal(kind, "architecture", "transformers does not know it")
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (*LOAD_ERRORS, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"{folder}/config.json can't be used: {reason}") from error


def _resolve_dtype(config: PretrainedConfig, dtype: str) -> torch.dtype:
    if dtype != "auto":
        return DTYPES[dtype]
    own = getattr(config, "dtype", None)
    return next((known for known in DTYPES.values() if known == own), torch.float32)
