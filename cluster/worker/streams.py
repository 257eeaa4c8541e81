"""Which router a worker's requests came from, and what each router is told next.

Runs on the worker loop's thread. Losing a router's stream loses what was to be told to it.

Prompts that a worker computes before anyone asks, and keeps. Runs on the loop's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from cluster.worker.events import RouterStream
from cluster.worker.reports import BlockReports
from kvpool.core.blocks.tables import BlockTables, Pins
from kvrelay.messages import Counters, Released, ReserveRefused, WorkerEvent
from kvrelay.types import RequestKey, RequestSpec

log = logging.getLogger(__name__)


class RouterStreams:
    """`counters` ride on every batch. A router hears them also when there is news of another's
    requests: it knows of these only by them."""

    def __init__(self, reports: BlockReports, counters: Callable[[], Counters]) -> None:
        self._reports = reports
        self._counters = counters
        self._routes: dict[RequestKey, RouterStream] = {}
        self._outbox: dict[RouterStream, list[WorkerEvent]] = {}
        self._changed = False  # somebody's requests, since all have been told

    def __contains__(self, key: RequestKey) -> bool:
        """Whether something is held of the request, or was a moment ago."""
        return key in self._routes

    @property
    def idle(self) -> bool:
        return not self._routes

    def is_from(self, stream: RouterStream, key: RequestKey) -> bool:
        return self._routes.get(key) is stream

    def begin(self, stream: RouterStream, key: RequestKey) -> None:
        self._routes[key] = stream
        self._changed = True

    def end(self, key: RequestKey) -> None:
        self._routes.pop(key, None)
        self._changed = True

    def join(self, stream: RouterStream) -> None:
        """It hears of all blocks that there are, the others what is new until now."""
        self.flush()
        self._outbox[stream] = []
        stream.send([], self._counters())
        for changes in self._reports.everything():
            stream.send([], self._counters(), [changes])

    def leave(self, stream: RouterStream) -> list[RequestKey]:
        """Its requests, which have no one left to answer to."""
        self._outbox.pop(stream, None)
        return [key for key, owner in self._routes.items() if owner is stream]

    def tell(self, event: WorkerEvent) -> None:
        """To the router that the request came from."""
        stream = self._routes.get(event.key)
        if stream is not None:
            self.answer(stream, event)

    def answer(self, stream: RouterStream, event: WorkerEvent) -> None:
        """To this one, whoever the request is from."""
        if stream in self._outbox:
            self._changed = True
            self._outbox[stream].append(event)

    def tell_all(self) -> None:
        """The counters, with the next flush."""
        self._changed = True

    def tick(self) -> None:
        for stream in self._outbox:
            stream.send([], self._counters())

    def flush(self) -> None:
        """Blocks before the events that made them, each batch of blocks in its own message."""
        blocks = self._reports.take()
        if not (blocks or self._changed):
            return
        self._changed, counters = False, self._counters()
        for stream, events in self._outbox.items():
            for changes in blocks[:-1]:
                stream.send([], counters, [changes])
            stream.send(events, counters, blocks[-1:])
            self._outbox[stream] = []


class Preloads:
    """Each is generated like a request whose tokens nobody waits for, then pinned: once, however
    many routers ask for it, and also when the one that asked first is gone."""

    def __init__(self, tables: BlockTables, longest_tokens: int) -> None:
        """`longest_tokens`: a sequence this long must still fit beside what is kept."""
        self._pins = Pins(tables, longest_tokens)
        self._running: dict[RequestKey, RequestSpec] = {}

    def __contains__(self, key: RequestKey) -> bool:
        """Whether it is on its way."""
        return key in self._running

    def begin(self, spec: RequestSpec) -> bool:
        """False: it is pinned already, or on its way."""
        if spec.key in self._running or spec in self._pins:
            return False
        self._running[spec.key] = spec
        return True

    def ended(self, event: Released | ReserveRefused, now_s: float) -> None:
        spec = self._running.pop(event.key, None)
        if spec is None:
            return
        if isinstance(event, Released) and self._pins.try_pin(spec, now_s):
            log.info("preloaded %d tokens", len(spec.prompt_ids))
        else:
            log.warning("no room to preload a prompt of %d tokens", len(spec.prompt_ids))
