"""The numbers of the training run."""

import math
from dataclasses import dataclass

from engine.bundled.model import CONTEXT_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The training run. Every step reads `tokens_per_step` tokens, in short or in long windows."""

    seed: int = 1813
    vocab_size: int = 3072
    steps: int = 2100
    warmup_steps: int = 60
    tokens_per_step: int = 4096
    short_tokens: int = 256
    long_every: int = 8  # one step in so many reads windows of the full context
    matrix_lr: float = 6e-3
    other_lr: float = 6e-3
    final_lr_fraction: float = 0.02
    weight_decay: float = 0.05
    hold_out_every: int = 40  # one document in so many
    save_every: int = 150

    def window_tokens(self, step: int) -> int:
        """The length of the windows of this step."""
        return CONTEXT_TOKENS if step % self.long_every == 0 else self.short_tokens

    def lr_fraction(self, step: int) -> float:
        """Linear warm-up, then a cosine down to `final_lr_fraction`."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / (self.steps - self.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * done))
        return self.final_lr_fraction + (1 - self.final_lr_fraction) * cosine
