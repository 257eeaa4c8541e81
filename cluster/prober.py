"""Measures each link of a worker once it stands, on a thread of its own, one at a time.

The side that was connected to goes first and then tells the other. A link of the same kind (same
transport, same host) is not measured again in this process.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvpool.handoff import LinkProbed, Ping, Pong
from kvpool.link_cost import LinkCost, Sample, fit
from kvpool.peer_wire import encode
from kvpool.transport import probe
from kvpool.transport.base import Connection, RegionName
from kvpool.transport.endpoints import Endpoints, scheme_of
from kvrelay.errors import PeerError
from kvrelay.types import Incarnation

log = logging.getLogger(__name__)

ANSWER_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One connected peer. `opened` here, or by the peer."""

    peer: Incarnation
    name: str
    connection: Connection
    probe_region: str
    opened: bool

    @property
    def transport(self) -> str:
        return scheme_of(self.connection.peer_address)

    @property
    def kind(self) -> str:
        """All links of a kind cost the same: of shm, and of each transport to one host."""
        scheme, _, rest = self.connection.peer_address.partition(":")
        host = rest.rpartition("/")[0].rpartition(":")[0]
        return scheme if scheme in ("shm", "loopback", "cuda_ipc") else f"{scheme}:{host}"


class Prober:
    """`copies` are the timed gathers and scatters of this worker's own pool; without any, links
    are not measured. `measured` is called on the prober's thread."""

    def __init__(
        self,
        endpoints: Endpoints,
        copies: tuple[Sample, ...],
        measured: Callable[[Link, LinkCost], None],
    ) -> None:
        self._copies = copies
        self._measured = measured
        self._region = endpoints.register(probe.PROBE_BYTES)
        self._known: dict[str, LinkCost] = {}  # kind of link |-> its cost
        self._waiting: queue.SimpleQueue[Link | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._current: Connection | None = None
        self._answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvrelay-prober", daemon=True)
        self._thread.start()

    @property
    def region(self) -> str:
        """The name of the memory that peers may write to."""
        return self._region.name

    def connected(self, link: Link) -> None:
        if not link.opened:
            self._waiting.put(link)

    def received(self, link: Link, message: Ping | Pong | LinkProbed) -> None:
        match message:
            case Ping():
                link.connection.notify(encode(Pong()))
            case Pong():
                self._answer(link.connection, True)
            case LinkProbed() if link.opened:
                self._waiting.put(link)

    def lost(self, connection: Connection) -> None:
        self._answer(connection, False)

    def close(self) -> None:
        """Once the endpoints are closed, so that nothing is waited for."""
        self._waiting.put(None)
        self._answers.put(False)
        self._thread.join()

    def _run(self) -> None:
        while (link := self._waiting.get()) is not None:
            try:
                self._probe(link)
            except PeerError as error:
                log.info("the link to %s was not measured: %s", link.name, error)

    def _probe(self, link: Link) -> None:
        try:
            if self._copies and link.kind not in self._known:
                self._known[link.kind] = self._measure(link)
        finally:
            if not link.opened:
                link.connection.notify(encode(LinkProbed()))
        if self._copies:
            self._measured(link, self._known[link.kind])

    def _measure(self, link: Link) -> LinkCost:
        connection, region = link.connection, RegionName(link.probe_region)
        with self._lock:
            self._current, self._answers = connection, queue.SimpleQueue()
        own = self._region.memory_on(link.transport)
        samples = probe.measure(connection, region, own, lambda: self._ping(connection))
        mapped = connection.window(region) is not None
        return fit(link.transport, [*samples, *self._copies], mapped=mapped)

    def _ping(self, connection: Connection) -> None:
        connection.notify(encode(Ping()))
        try:
            answered = self._answers.get(timeout=ANSWER_S)
        except queue.Empty:
            raise PeerError(f"no answer to a message in {ANSWER_S:g} s") from None
        if not answered:
            raise PeerError("the connection was lost")

    def _answer(self, connection: Connection, good: bool) -> None:
        with self._lock:
            if connection is self._current:
                self._answers.put(good)
