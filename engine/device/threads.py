"""The number of CPU threads that torch uses in the calling thread: each thread of a worker has its
own.

Also named ranges for NVIDIA's profilers, such as Nsight Systems; they nest, thread by thread.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


def use_threads(count: int) -> None:
    torch.get_num_threads()  # else the first operation here takes the number of another thread
    torch.set_num_threads(count)


def run_apart(work: Callable[[], T]) -> T:
    """Runs in a new thread, which ends with it, and so do the OpenMP threads that it started.

    OpenMP threads stay with the thread that called them. If a process has more of them than cores,
    libgomp's threads sleep between any two operations instead of spinning.
    """
    outcome: Future[T] = Future()
    thread = Thread(target=_settle, args=(work, outcome), name="kvrelay-apart", daemon=True)
    thread.start()
    thread.join()
    return outcome.result()


def _settle(work: Callable[[], T], outcome: Future[T]) -> None:
    try:
        outcome.set_result(work())
    except BaseException as error:
        outcome.set_exception(error)


class Nvtx(Protocol):
    def range_push(self, msg: str) -> object: ...

    def range_pop(self) -> object: ...

    def mark(self, msg: str) -> object: ...


def nvtx(device: str) -> Nvtx | None:
    """None without a CUDA device to profile."""
    return torch.cuda.nvtx if torch.device(device).type == "cuda" else None
