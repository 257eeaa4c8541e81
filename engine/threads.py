"""How many CPU threads torch uses in the calling thread. Each of a worker's threads says its own."""

from __future__ import annotations

import torch


def use_threads(count: int) -> None:
    torch.set_num_threads(count)
