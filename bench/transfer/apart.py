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


def usable() -> list[str]:
    """The transports whose ends can be opened here."""
    return [scheme for scheme in schemes() if apart(opens, scheme)]


def opens(scheme: str) -> bool:
    try:
        End(scheme, Shape(layers=1, tokens=16), seed=1).endpoint.close()
    except (ConfigError, OSError, RuntimeError) as error:
        print(f"{scheme}: not measured: {error}", file=sys.stderr)
        return False
    return True
