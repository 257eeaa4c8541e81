"""What reaches a worker's loop from its other threads, through one queue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cluster.core.worker.events import CoreEvent


@dataclass(frozen=True, slots=True)
class RunOnLoop:
    """Run this on the loop's thread, between two events."""

    function: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Crashed:
    """A thread beside the loop has died of a bug: so does the worker."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Close:
    pass


Incoming = CoreEvent | RunOnLoop | Crashed | Close
