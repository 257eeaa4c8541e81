"""LongRoPE picks its factors by the longest position of a call (arXiv:2402.13753 §3); a chunk of a
long sequence must have the long factors even where its own positions are short.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from engine.step import SequenceSlice


class LongRope:
    """Makes a model's rotary embedding take the long factors inside `long()`.

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
        """One position beyond the border joins the call; its embedding is cut off again."""
        if not self._is_long:
            return None
        x, positions = (*args, *kwargs.values())[:2]
        beyond = positions.new_full((*positions.shape[:-1], 1), self.border_tokens)
        return (x, torch.cat([positions, beyond], dim=-1)), {}

    def _cut(self, _: torch.nn.Module, __: Any, output: Any) -> Any:
        return tuple(part[..., :-1, :] for part in output) if self._is_long else None
