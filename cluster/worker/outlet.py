"""Carries out what a worker's schedulers order: tells routers and peers, has KV moved."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from cluster.router_streams import RouterStreams
from cluster.worker.preloads import Preloads
from engine.step import Command, Emit, Move, RunStep
from kvpool.handoff_events import SendPeer
from kvpool.pull import PullBlocks
from kvrelay.messages import LinkState, Released, RequestFailed, ReserveRefused, WorkerEvent

log = logging.getLogger(__name__)

_LAST = (Released, ReserveRefused)
"""Of a request at this worker."""

MoveJob = Move | PullBlocks


class Links(Protocol):
    """To peers."""

    def send(self, command: SendPeer) -> None: ...

    def states(self) -> tuple[LinkState, ...]: ...


class Moves(Protocol):
    """Moves KV, in order; the outcome of each job comes back."""

    def put(self, job: MoveJob) -> None: ...


class Outlet:
    """`attach` comes before anything is ordered."""

    def __init__(
        self, streams: RouterStreams, preloads: Preloads, clock: Callable[[], float]
    ) -> None:
        self._streams = streams
        self._preloads = preloads
        self._now = clock

    def attach(self, links: Links, mover: Moves) -> None:
        self._links = links
        self._mover = mover

    def execute(self, commands: Iterable[Command | PullBlocks]) -> None:
        for command in commands:
            match command:
                case Emit(events=events):
                    self._emit(events)
                case SendPeer():
                    self._links.send(command)
                case RunStep():
                    raise AssertionError("a step that was not offered")
                case _:
                    self._mover.put(command)

    def _emit(self, events: Iterable[WorkerEvent]) -> None:
        for event in events:
            self._streams.tell(event)
            if isinstance(event, RequestFailed):
                request_id = {"request_id": event.key.request_id}
                log.warning(
                    "a request failed: %s: %s", event.reason, event.message, extra=request_id
                )
            if isinstance(event, _LAST):
                self._streams.end(event.key)
                self._preloads.ended(event, self._now())
