"""What libraries that follow block tables take: each slice's blocks, from the first that its window
shows on. Positions only matter relative to the last token, so the rest may be left out. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.backends.step_arrays import Ints, StepArrays
from kvpool.layout import KvLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Visible:
    """One layer group's view of the step, as in `StepArrays`' order of slices."""

    blocks: Ints  # [all blocks]
    counts: Ints  # [slices], blocks
    tokens: Ints  # [slices], from the first visible block's first token on

    def table(self) -> Ints:
        """`[slices, most blocks]`, padded by block 0."""
        padded = np.zeros((len(self.counts), int(self.counts.max())), dtype=np.int32)
        padded[np.arange(padded.shape[1]) < self.counts[:, None]] = self.blocks
        return padded


def visible(layout: KvLayout, group: int, step: StepArrays) -> Visible:
    size, window = layout.block_size, layout.groups[group].window
    first = np.zeros_like(step.starts)
    if window is not None:
        first = np.maximum(0, step.starts - window + 1) // size
    tokens = step.starts + step.counts - first * size
    counts = -(-tokens // size)
    begins = step.groups[group].table_starts + first
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    blocks = step.groups[group].tables[np.repeat(begins, counts) + within]
    return Visible(blocks=blocks, counts=counts, tokens=tokens)


def starts_of(counts: Ints) -> Ints:
    """Where each of some runs begins, and the last one's end."""
    return np.concatenate([[0], np.cumsum(counts)])
