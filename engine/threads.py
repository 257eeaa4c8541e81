"""How many CPU threads torch uses in the calling thread: each of a worker's threads has its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def use_threads(count: int) -> None:
    torch.get_num_threads()  # else this thread's first operation takes what any thread set last
    torch.set_num_threads(count)


def run_apart(work: Callable[[], T]) -> T:
    """In a thread that ends with it, and so do the OpenMP threads that it started.

    OpenMP threads stay with the thread that called them. Where there are more than cores, in all of
    the process, libgomp's sleep between any two operations instead of spinning.
    """
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(work).result()
