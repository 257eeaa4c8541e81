"""Loads a checkpoint through transformers and runs it ragged over an attention state."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PretrainedConfig
from transformers.monkey_patching import patch_output_recorders
from transformers.utils.logging import disable_progress_bar

from engine.device.group import Group
from engine.device.stage import Stage
from engine.model import interface
from engine.model.capture import Forward
from engine.model.checkpoint import Checkpoint
from engine.model.families import LongRope, check_family, longrope_border_tokens
from engine.model.interface import AttentionState, attention_state
from engine.model.packed_linear import packed_bytes, prepare, rounded
from engine.model.weights import Cuts, read_weights
from kvrelay.errors import ModelError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LOAD_ERRORS = (
    OSError,
    ValueError,
    RuntimeError,
    ImportError,
    LookupError,
    AttributeError,
    TypeError,
)
"""Errors of transformers for a checkpoint that it can't read, or for a missing package."""


@dataclass(frozen=True, slots=True)
class Model:
    """A causal language model with kvrelay's attention. Frozen, in evaluation mode."""

    module: Any
    config: PretrainedConfig
    device: torch.device
    dtype: torch.dtype
    longrope: LongRope | None = None
    flat: Forward | None = None
    """The forward pass as a graph, if there is one."""
    own_tokens: int = 0
    """Steps of up to this many tokens use no product of oneDNN."""
    in_fp8: bool = False
    """Its linear layers multiply in FP8, which loses precision."""
    group: Group | None = None
    """The ranks that share each layer, of which this one holds a part; None: layers are whole."""
    stage: Stage | None = None
    """The layers that are here, of a model whose others are in other processes; None: all are."""

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def layers(self) -> range:
        """Those that are here."""
        return range(self.config.num_hidden_layers) if self.stage is None else self.stage.layers

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def weight_bytes(self) -> int:
        tensors = [*self.module.parameters(), *self.module.buffers()]
        return sum(tensor.nbytes for tensor in tensors) + packed_bytes(self.module)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_rows: torch.Tensor,
        state: AttentionState,
    ) -> torch.Tensor:
        """One ragged call. `token_ids`, `positions` `[1, tokens]`; logits `[rows, vocab]`."""
        with attention_state(state):
            return self.whole(token_ids, positions, logit_rows)

    def prepare(self, tokens: int, rows: int) -> None:
        """The one-time work of the first step with this many tokens and rows of logits."""
        if tokens <= self.own_tokens:
            return
        prepare(getattr(self.module, self.module.base_model_prefix), rounded(tokens))
        head = self.module.get_output_embeddings()
        if head is not None:
            prepare(head, rounded(rows))

    def whole(
        self, token_ids: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor
    ) -> torch.Tensor:
        """Must run in an `attention_state`."""
        if self.flat is not None:
            return self.flat(token_ids, positions, logit_rows)
        output = self.module(
            input_ids=token_ids,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=logit_rows,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    @torch.inference_mode()
    def eager_logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """transformers' own eager forward of whole sequences: `[batch, tokens, vocab]`."""
        self.module.set_attn_implementation("eager")
        try:
            logits: torch.Tensor = self.module(input_ids=token_ids, use_cache=False).logits
        finally:
            self.module.set_attn_implementation(interface.NAME)
        return logits


def load_model(checkpoint: Checkpoint, *, device: str, dtype: str) -> Model:
    """The whole model. `dtype` is a key of DTYPES or "auto" (the checkpoint's own). Raises
    ModelError."""
    return fill(bare_model(checkpoint, device=device, dtype=dtype), checkpoint)


def bare_model(checkpoint: Checkpoint, *, device: str, dtype: str) -> Model:
    """The model for `fill`: its parameters are on the meta device. Raises ModelError for a family
    that can't be served, and for a device that is not there."""
    _use_device(torch.device(device))
    config = _load_config(checkpoint)
    check_family(config)
    interface.register()
    disable_progress_bar()  # several workers share one log
    with _load_errors(checkpoint, device):
        return _bare(config, torch.device(device), _resolve_dtype(config, dtype))


def fill(model: Model, checkpoint: Checkpoint, cuts: Cuts = MappingProxyType({})) -> Model:
    """Reads the weights of a bare model, in place, straight to its device. Raises ModelError."""
    module, device = model.module, model.device
    with _load_errors(checkpoint, device):
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
def _load_errors(checkpoint: Checkpoint, device: object) -> Iterator[None]:
    try:
        yield
    except LOAD_ERRORS as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"{checkpoint.path} can't be loaded on {device}: {reason}") from error


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


def _load_config(checkpoint: Checkpoint) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(checkpoint.path, trust_remote_code=False)
    except (*LOAD_ERRORS, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"{checkpoint.path}/config.json can't be used: {reason}") from error


def _resolve_dtype(config: PretrainedConfig, dtype: str) -> torch.dtype:
    if dtype != "auto":
        return DTYPES[dtype]
    own = getattr(config, "dtype", None)
    return next((known for known in DTYPES.values() if known == own), torch.float32)
