"""A causal language model, run ragged over an attention state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.device.group import Group
from engine.device.stage import Stage
from engine.model import interface
from engine.model.capture import Forward
from engine.model.families import LongRope
from engine.model.interface import AttentionState, attention_state
from engine.model.packed_linear import packed_bytes, prepare, rounded

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
    config: Any
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
    recording: str | None = None
    """The name of the graph that is its forward pass, of a model that has no code of its own."""
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
