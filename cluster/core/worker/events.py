"""What a worker's core hears besides its schedulers' own events, and what it orders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from engine.core.step import KvMove, RunStep, StepDone
from kvpool.core.fetch.client_events import NodeEvent, NodeOrder
from kvpool.core.transfer.commands import (
    DropLink,
    FromPeer,
    LayersWritten,
    LinkMeasured,
    PeerLost,
    PieceFetched,
    SendPeer,
    SlabReplaced,
    SlabScattered,
    SlabWritten,
)
from kvpool.core.transfer.messages import BlocksDigested
from kvpool.core.transfer.pull import BlocksPulled, PullBlocks
from kvrelay.counters import Counters
from kvrelay.messages import BlockChanges, ToWorker, WorkerEvent
from kvrelay.types import Incarnation


class RouterStream(Protocol):
    """One router's open stream; `send` is thread safe and never blocks."""

    def send(
        self,
        events: Sequence[WorkerEvent],
        counters: Counters,
        blocks: Sequence[BlockChanges] = (),
    ) -> None: ...


class FromRouter(NamedTuple):
    stream: RouterStream
    message: ToWorker


class RouterJoined(NamedTuple):
    stream: RouterStream


class RouterLost(NamedTuple):
    stream: RouterStream


CoreEvent = (
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
    | StepDone
    | NodeEvent
)


class SendToRouter(NamedTuple):
    """Send this over the router's stream."""

    stream: RouterStream
    events: Sequence[WorkerEvent]
    counters: Counters
    blocks: Sequence[BlockChanges]


class DropPeer(NamedTuple):
    """Close the connection to the peer; PeerLost follows, even if there is none."""

    peer: Incarnation
    reason: str


MoveJob = KvMove | PullBlocks
"""What a worker's transfer threads do; the outcome of each job comes back as an event."""

WorkerCommand = RunStep | SendPeer | DropPeer | DropLink | MoveJob | NodeOrder | SendToRouter
