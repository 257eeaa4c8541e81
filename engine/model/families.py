"""What a family's configuration says that decides how it is run.

LongRoPE picks its factors by the longest position of a call (arXiv:2402.13753 §3). A chunk of a
long sequence must have the long factors even if its own positions are short.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from engine.core.step import SequenceSlice
from kvrelay.errors import ModelError

EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Names that configurations have for the number of experts."""


def refusal(kind: str, check: str, reason: str) -> ModelError:
    """Names the check by which a family would give wrong tokens."""
    return ModelError(f"the {kind} family can't be served ({check} check): {reason}")


def longrope_border_tokens(config: Any) -> int | None:
    """Sequences longer than this use other RoPE factors (LongRoPE, arXiv:2402.13753 §3); None: the
    model has no LongRoPE."""
    borders = [
        int(rope["original_max_position_embeddings"])
        for rope in ropes(config)
        if rope.get("rope_type") == "longrope"
    ]
    return min(borders, default=None)


def has_experts(config: Any) -> bool:
    """Each token picks some of several feed-forward networks."""
    return any((getattr(config, name, None) or 0) > 1 for name in EXPERT_COUNTS)


def ropes(config: Any) -> Iterator[Mapping[str, Any]]:
    """The RoPE parameters, of all layers or of each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        yield parameters
    else:
        yield from (value for value in parameters.values() if isinstance(value, Mapping))


class LongRope:
    """Makes a model's rotary embedding use the long factors inside `long()`.

    `border_tokens`: sequences longer than this use the long factors.
    """

    def __init__(self, module: torch.nn.Module, border_tokens: int) -> None:
        self.border_tokens = border_tokens
        self._is_long = False
        for part in module.modules():
            if type(part).__name__.endswith("RotaryEmbedding"):
                part.register_forward_pre_hook(self._lengthen, with_kwargs=True)
                part.register_forward_hook(self._cut)

    def needs_long(self, piece: SequenceSlice) -> bool:
        length = max(piece.prompt_tokens, piece.start + len(piece.token_ids))
        return length > self.border_tokens

    @contextmanager
    def long(self, is_long: bool) -> Iterator[None]:
        self._is_long = is_long
        try:
            yield
        finally:
            self._is_long = False

    def _lengthen(self, _: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Adds one position beyond the border to the call, and cuts its embedding off again."""
        if not self._is_long:
            return None
        x, positions = (*args, *kwargs.values())[:2]
        beyond = positions.new_full((*positions.shape[:-1], 1), self.border_tokens)
        return (x, torch.cat([positions, beyond], dim=-1)), {}

    def _cut(self, _: torch.nn.Module, __: Any, output: Any) -> Any:
        return tuple(part[..., :-1, :] for part in output) if self._is_long else None
