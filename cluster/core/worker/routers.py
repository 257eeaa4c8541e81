"""Which router each request came from, and what each router hears next.

A router that leaves loses what it had not heard yet.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from cluster.core.worker.events import RouterStream, SendToRouter
from cluster.core.worker.reports import BlockReports
from kvpool.core.blocks.tables import BlockTables, Pins
from kvrelay.counters import Counters
from kvrelay.messages import Released, ReserveRefused, WorkerEvent
from kvrelay.types import RequestKey, RequestSpec

log = logging.getLogger(__name__)


class RouterQueues:
    """Events wait here until the end of a turn. The counters go with every batch. A router hears
    of another router's requests only by the counters. `changed`: requests came or went, or there
    are events."""

    def __init__(self, reports: BlockReports) -> None:
        self._reports = reports
        self._routes: dict[RequestKey, RouterStream] = {}
        self._queues: dict[RouterStream, list[WorkerEvent]] = {}
        self._joined: set[RouterStream] = set()
        self._leaving: set[RouterStream] = set()
        self.changed = False
        self.count = 0  # of routers that are attached and stay

    def __contains__(self, key: RequestKey) -> bool:
        """Whether the worker holds something for this request."""
        return key in self._routes

    @property
    def idle(self) -> bool:
        return not self._routes

    def is_from(self, stream: RouterStream, key: RequestKey) -> bool:
        return self._routes.get(key) is stream

    def begin(self, stream: RouterStream, key: RequestKey) -> None:
        self._routes[key] = stream
        self.changed = True

    def end(self, key: RequestKey) -> None:
        self._routes.pop(key, None)
        self.changed = True

    def join(self, stream: RouterStream) -> None:
        """Its first batch tells it of all blocks that this worker holds."""
        self._queues[stream] = []
        self._joined.add(stream)
        self._recount()

    def will_leave(self, stream: RouterStream) -> None:
        """All hear of it: a router may ask whether another one stays."""
        self._leaving.add(stream)
        self._recount()

    def _recount(self) -> None:
        self.count = len(self._queues.keys() - self._leaving)
        self.changed = True

    def leave(self, stream: RouterStream) -> list[RequestKey]:
        """Its requests, which no one waits for any more."""
        self._queues.pop(stream, None)
        self._joined.discard(stream)
        self._leaving.discard(stream)
        self._recount()
        return [key for key, owner in self._routes.items() if owner is stream]

    def add(self, events: Iterable[WorkerEvent]) -> None:
        """Each goes to the router that its request came from."""
        routes, queues = self._routes, self._queues
        for event in events:
            stream = routes.get(event.key)
            if stream in queues:
                self.changed = True
                queues[stream].append(event)

    def answer(self, stream: RouterStream, event: WorkerEvent) -> None:
        """Goes to this router, whoever the request came from."""
        if stream in self._queues:
            self.changed = True
            self._queues[stream].append(event)

    def report_all(self) -> None:
        """The next `flush` sends the counters, even if there is nothing else."""
        self.changed = True

    def heartbeats(self, counters: Counters) -> list[SendToRouter]:
        return [SendToRouter(stream, (), counters, ()) for stream in self._queues]

    def flush(self, counters: Counters, now_s: float) -> list[SendToRouter]:
        """Blocks go before the events that made them. Each batch of blocks is a message."""
        blocks = self._reports.take(now_s)
        self.changed = False
        batches: list[SendToRouter] = []
        for stream, events in self._queues.items():
            if stream in self._joined:
                batches += self._first(stream, events, counters)
                continue
            batches += [SendToRouter(stream, (), counters, (one,)) for one in blocks[:-1]]
            batches.append(SendToRouter(stream, events, counters, blocks[-1:]))
        self._joined.clear()
        self._queues = {stream: [] for stream in self._queues}
        return batches

    def _first(
        self, stream: RouterStream, events: list[WorkerEvent], counters: Counters
    ) -> list[SendToRouter]:
        blocks = ((), *((one,) for one in self._reports.everything()))
        batches = [SendToRouter(stream, (), counters, one) for one in blocks]
        return [*batches, SendToRouter(stream, events, counters, ())] if events else batches


class Preloads:
    """Prompts that routers want computed and kept before anyone asks for them. Each is generated
    once, like a request whose tokens nobody waits for, and then pinned. It goes on when the router
    that asked first is gone, but not when the worker drains."""

    def __init__(self, tables: BlockTables, longest_tokens: int) -> None:
        """A sequence of `longest_tokens` must still fit beside what is kept."""
        self._pins = Pins(tables, longest_tokens)
        self.running: dict[RequestKey, RequestSpec] = {}

    def __contains__(self, key: RequestKey) -> bool:
        """Whether it is being computed."""
        return key in self.running

    def begin(self, spec: RequestSpec) -> bool:
        """False: it is pinned already, or being computed."""
        if spec.key in self.running or spec in self._pins:
            return False
        self.running[spec.key] = spec
        return True

    def give_up(self) -> list[RequestKey]:
        """Those that are being computed are to be aborted, and not kept."""
        keys = [*self.running]
        self.running.clear()
        return keys

    def ended(self, event: Released | ReserveRefused, now_s: float) -> None:
        spec = self.running.pop(event.key, None)
        if spec is None:
            return
        if isinstance(event, Released) and self._pins.try_pin(spec, now_s):
            log.info("preloaded %d tokens", len(spec.prompt_ids))
        else:
            log.warning("no room to preload a prompt of %d tokens", len(spec.prompt_ids))
