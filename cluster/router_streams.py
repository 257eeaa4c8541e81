"""Which router a worker's requests came from, and what each router is told next.

Runs on the worker loop's thread. Losing a router's stream loses what was to be told to it.
"""

from __future__ import annotations

from collections.abc import Callable

from cluster.worker.block_reports import BlockReports
from cluster.worker.events import RouterStream
from kvrelay.messages import Counters, WorkerEvent
from kvrelay.types import RequestKey


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
