"""Which transports there are here, each tried in a process of its own."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from typing import TypeVar

from bench.transfer.end import End
from bench.transfer.shape import Shape
from kvpool.transport.registry import schemes
from kvrelay.errors import ConfigError

T = TypeVar("T")


def apart(function: Callable[..., T], *arguments: object) -> T:
    """In a process of its own: two transports' UCX in one would disturb each other."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def usable(device: str) -> list[str]:
    """The transports whose ends can be opened here for KV on `device`."""
    near = ("cuda_ipc",) if device == "cuda" else ("loopback", "shm")
    possible = [name for name in schemes() if name in (*near, "nixl", "ucx")]
    return [scheme for scheme in possible if apart(opens, scheme, device)]


def opens(scheme: str, device: str) -> bool:
    try:
        End(scheme, Shape(layers=1, tokens=16, device=device), seed=1).endpoint.close()
    except (ConfigError, OSError, RuntimeError) as error:
        print(f"{scheme}: not measured: {error}", file=sys.stderr)
        return False
    return True
