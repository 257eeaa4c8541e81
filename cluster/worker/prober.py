"""Measures each link of a worker once it stands, on a thread of its own, one at a time.

The side that was connected to goes first and then tells the other. Links of a kind (same
transport, same host, same kind of memory there) are measured by one of them. That one measurement
may have met a busy machine, so there are later ones, further and further apart; what failed is
tried again as well.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf

from kvpool.core.transfer.link_cost import LinkCost, Sample, fit
from kvpool.core.transfer.messages import LinkProbed, Ping, Pong
from kvpool.transport import probe
from kvpool.transport.endpoints import Endpoints, lies_on_device, scheme_of
from kvpool.transport.peer.base import Connection, RegionName
from kvpool.wire.peer import encode
from kvrelay.errors import PeerError
from kvrelay.types import Incarnation

log = logging.getLogger(__name__)

ANSWER_S = 2.0
AGAIN_S = (30.0, 300.0)
"""Between two measurements of a kind, the last for ever: a third of a second each."""


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
        """All links of a kind cost the same: of shm, of cuda_ipc to one GPU, and of each other
        transport to the host memory of one host and to that of its GPUs."""
        address = self.connection.peer_address
        place = _place(address)
        host = place if self.transport == "cuda_ipc" else place.rpartition(":")[0]
        gpu = "/gpu" if lies_on_device(address) else ""
        return f"{self.transport}:{host}{gpu}" if host else self.transport

    def is_apart(self, own_address: str) -> bool:
        """Of cuda_ipc, and to another GPU than that of the own end."""
        peer = self.connection.peer_address
        return self.transport == "cuda_ipc" and _place(peer) != _place(own_address)


def _place(address: str) -> str:
    """What stands between transport and worker: host and port, and whether slabs lie on a GPU; of
    cuda_ipc the GPU; empty for shm and loopback."""
    return address.partition(":")[2].rpartition("/")[0]


@dataclass(slots=True)
class _Known:
    """`times` it was measured, the last time at `at_s`."""

    cost: LinkCost
    at_s: float
    times: int = 1

    @property
    def lasts_s(self) -> float:
        return AGAIN_S[min(self.times, len(AGAIN_S)) - 1]

    @property
    def until_s(self) -> float:
        return self.at_s + self.lasts_s

    def renew(self, cost: LinkCost, now_s: float) -> None:
        self.cost, self.at_s, self.times = self.cost.renewed(cost), now_s, self.times + 1


class Prober:
    """`copies` are the timed gathers and scatters of this worker's own pool, by the device type of
    the slabs; without any, links are not measured. `measured` is called on the prober's thread."""

    def __init__(
        self,
        endpoints: Endpoints,
        copies: Mapping[str, tuple[Sample, ...]],
        slab_bytes: int,
        measured: Callable[[Link, LinkCost], None],
    ) -> None:
        self._copies = copies
        self._own = {scheme_of(address): address for address in endpoints.addresses}
        self._slab_bytes = slab_bytes
        self._measured = measured
        self._region = endpoints.register(probe.PROBE_BYTES)
        self._known: dict[str, _Known] = {}  # by kind of link
        self._live: set[Connection] = set()
        self._links: dict[Connection, Link] = {}  # those that were measured
        self._failed: dict[Connection, tuple[float, Link]] = {}  # |-> when it is tried again
        self._failures: Counter[Connection] = Counter()
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
        with self._lock:
            self._live.add(link.connection)
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
        with self._lock:
            self._live.discard(connection)
            self._links.pop(connection, None)
            self._failed.pop(connection, None)
            del self._failures[connection]
        self._answer(connection, False)

    def close(self) -> None:
        """Once the endpoints are closed, so that nothing is waited for."""
        self._waiting.put(None)
        self._answers.put(False)
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                link = self._waiting.get(timeout=self._rest_s())
            except queue.Empty:
                self._try(self._next()[1])
                continue
            if link is None:
                return
            self._try(link)

    def _try(self, link: Link | None) -> None:
        if link is None:
            return
        with self._lock:
            self._failed.pop(link.connection, None)
        try:
            self._probe(link)
        except PeerError as error:
            log.info("the link to %s was not measured: %s", link.name, error)
            self._try_later(link)

    def _try_later(self, link: Link) -> None:
        """Unless it is gone."""
        with self._lock:
            self._links.pop(link.connection, None)
            if link.connection in self._live:
                times = self._failures[link.connection]
                self._failures[link.connection] += 1
                rest_s = AGAIN_S[min(times, len(AGAIN_S) - 1)]
                self._failed[link.connection] = time.monotonic() + rest_s, link

    def _rest_s(self) -> float | None:
        """None: nothing is left to measure."""
        due_s = self._next()[0]
        return None if due_s == inf else max(0.0, due_s - time.monotonic())

    def _next(self) -> tuple[float, Link | None]:
        """Whose turn comes next, and when: of a kind, by the side that was connected to, or of
        those that failed."""
        with self._lock:
            again = [(self._known[one.kind].until_s, one) for one in self._links.values()]
            turns = [*[turn for turn in again if not turn[1].opened], *self._failed.values()]
        return min(turns, key=lambda turn: turn[0], default=(inf, None))

    def _probe(self, link: Link) -> None:
        renewed = False
        try:
            if self._copies and self._is_due(link.kind):
                self._learn(link)
                renewed = True
        finally:
            if not link.opened:
                link.connection.notify(encode(LinkProbed()))
        if not self._copies:
            return
        with self._lock:
            if link.connection not in self._live:
                return
            self._links.pop(link.connection, None)
            self._links[link.connection] = link  # last: the others of its kind have their turn
            links = [one for one in self._links.values() if one.kind == link.kind]
        for one in links if renewed else [link]:
            self._measured(one, self._known[one.kind].cost)

    def _is_due(self, kind: str) -> bool:
        """The two sides' clocks began a moment apart."""
        known = self._known.get(kind)
        return known is None or time.monotonic() - known.at_s >= 0.75 * known.lasts_s

    def _learn(self, link: Link) -> None:
        cost, known = self._measure(link), self._known.get(link.kind)
        if known is None:
            self._known[link.kind] = _Known(cost, time.monotonic())
        else:
            known.renew(cost, time.monotonic())

    def _measure(self, link: Link) -> LinkCost:
        connection, region = link.connection, RegionName(link.probe_region)
        with self._lock:
            self._current, self._answers = connection, queue.SimpleQueue()
        own = self._region.memory_on(link.transport)
        samples = probe.measure(
            connection, region, own, self._slab_bytes, lambda: self._ping(connection)
        )
        mapped = connection.window(region) is not None
        copies = self._copies[own.device.type]
        return fit(
            link.transport,
            [*samples, *copies],
            mapped=mapped,
            at_once=mapped and own.is_cuda,
            apart=link.is_apart(self._own[link.transport]),
        )

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
