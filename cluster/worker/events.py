"""What reaches a worker's loop from its other threads, through one queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.worker.pool.news import FromFar
from engine.core.step import StepDone
from kvpool.core.fetch.client_events import (
    BlocksFetched,
    BlocksStored,
    FromNode,
    PoolJoined,
    PoolLost,
)
from kvpool.core.transfer.commands import (
    FromPeer,
    LayersWritten,
    LinkMeasured,
    PeerLost,
    PieceFetched,
    SlabReplaced,
    SlabScattered,
    SlabWritten,
)
from kvpool.core.transfer.messages import BlocksDigested
from kvpool.core.transfer.pull import BlocksPulled
from kvrelay.messages import BlockChanges, Counters, ToWorker, WorkerEvent


class RouterStream(Protocol):
    """One router's open stream; `send` is thread safe and never blocks."""

    def send(
        self,
        events: Sequence[WorkerEvent],
        counters: Counters,
        blocks: Sequence[BlockChanges] = (),
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class FromRouter:
    stream: RouterStream
    message: ToWorker


@dataclass(frozen=True, slots=True)
class RouterJoined:
    stream: RouterStream


@dataclass(frozen=True, slots=True)
class RouterLost:
    stream: RouterStream


@dataclass(frozen=True, slots=True)
class Stepped:
    """The device has run a step and is free."""

    done: StepDone


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


Incoming = (
    FromRouter
    | RouterJoined
    | RouterLost
    | FromPeer
    | PeerLost
    | LinkMeasured
    | SlabWritten
    | BlocksDigested
    | SlabScattered
    | SlabReplaced
    | PieceFetched
    | BlocksPulled
    | LayersWritten
    | PoolJoined
    | PoolLost
    | FromNode
    | BlocksStored
    | BlocksFetched
    | FromFar
    | Stepped
    | RunOnLoop
    | Crashed
    | Close
)
