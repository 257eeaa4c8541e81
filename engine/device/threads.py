"""How many CPU threads torch uses in the calling thread: each of a worker's threads has its own.

Named ranges for NVIDIA's profilers, such as Nsight Systems; they nest, thread by thread.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Protocol, TypeVar

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
    """None where there is no CUDA device to profile."""
    return torch.cuda.nvtx if torch.device(device).type == "cuda" else None
