"""What fuses several operations of a captured graph into one."""

from __future__ import annotations

from typing import Protocol

import torch


class Operations(Protocol):
    """Tensors are `[1, tokens, ...]`, their last dimension dense."""

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, rounds: bool
    ) -> torch.Tensor:
        """`x` `[1, tokens, width]` or `[1, tokens, heads, width]`, `weight` fp32 `[width]`.

        `rounds` what the weight is multiplied with.
        """

    def add_rms_norm(
        self,
        x: torch.Tensor,
        other: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        rounds: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x + other and its norm; both `[1, tokens, width]` and dense."""

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """`x` `[1, heads, tokens, dim]`, the angles `[1, 1, tokens, dim]`."""

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """silu(gate) x up, both `[1, tokens, width]`."""

    def gelu_tanh_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """gelu(gate), by tanh, x up, both `[1, tokens, width]`."""
