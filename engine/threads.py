"""How many CPU threads torch uses in the calling thread: each of a worker's threads has its own."""

from __future__ import annotations

import torch


def use_threads(count: int) -> None:
    torch.set_num_threads(count)
