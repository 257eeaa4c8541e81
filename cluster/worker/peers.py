"""A worker's links to other workers: connects, says hello, refuses what doesn't match.

The loop's thread never waits here: messages to a peer are sent, and the peer is dialled, on a
thread of the peer's own. Callbacks come on transport threads and only queue.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType

from cluster.core.worker.events import DropPeer
from cluster.worker.lanes import Lanes
from cluster.worker.prober import Link, Prober
from kvpool.core.layout.codec import Codec
from kvpool.core.transfer.commands import DropLink, FromPeer, LinkMeasured, PeerLost, SendPeer
from kvpool.core.transfer.link_cost import LinkCost, Sample
from kvpool.core.transfer.messages import (
    LinkProbed,
    LinkStalled,
    PeerHello,
    PeerMessage,
    Ping,
    Pong,
    SlabLent,
)
from kvpool.memory.kv_memory import KvMemory
from kvpool.transport.endpoints import DEFAULTS, EndpointOptions, Endpoints, scheme_of
from kvpool.transport.link_kind import LinkKind
from kvpool.transport.peer.base import Callbacks, Connection
from kvpool.transport.peer.endpoint import ThreadGroup
from kvpool.wire.peer import decode, encode
from kvrelay.counters import LinkState
from kvrelay.errors import ConfigError, FailureReason, PeerError
from kvrelay.types import Incarnation

log = logging.getLogger(__name__)

_NO_COPIES: Mapping[str, tuple[Sample, ...]] = MappingProxyType({})
MOST_WAITING = 4096
"""Messages to one peer. With more the peer is taken for lost."""
STALLED_S = 300.0
"""For this long a transport over which a copy stalled is the last to be tried with that peer."""


def _raise(error: BaseException) -> None:
    raise error


class PeerLinks:
    """# incarnation of a peer |-> the connection to it, once both have said hello

    Each pair uses the first transport of the opener's preference that both have and that connects.
    """

    def __init__(
        self,
        transports: Sequence[str],
        hello: PeerHello,
        post: Callable[[FromPeer | PeerLost | LinkMeasured], None],
        *,
        options: EndpointOptions = DEFAULTS,
        require: Collection[LinkKind] = (),
        copies: Mapping[str, tuple[Sample, ...]] = _NO_COPIES,
        memory: KvMemory | None = None,
        crashed: Callable[[BaseException], None] = _raise,
    ) -> None:
        """Peers may read `memory`, the KV pool, where the link can share it; `copies`: see Prober.
        `crashed` hears of bugs. Raises ConfigError when no transport can be used."""
        self._post = post
        self._outboxes = Lanes("kvrelay-outbox", self._deliver, crashed, most=MOST_WAITING)
        self._farewells = ThreadGroup()
        self._parting: set[Connection] = set()  # what still comes over these is ignored
        self._lock = threading.Lock()
        self._by_peer: dict[Incarnation, Connection] = {}
        self._peer_of: dict[Connection, Incarnation] = {}
        self._links: dict[Connection, Link] = {}  # those whose peer has said hello
        self._costs: dict[Connection, LinkCost] = {}
        self._stalled: dict[tuple[Incarnation, str], float] = {}  # peer, transport |-> last time
        callbacks = Callbacks(
            on_connect=lambda connection: None, on_message=self._received, on_lost=self._lost
        )
        self.endpoints = Endpoints(
            transports, hello.incarnation, callbacks, options=options, require=require
        )
        self._prober = Prober(self.endpoints, copies, hello.kv.slab_bytes, self._measured)
        kv = replace(hello.kv, region=self._shared(memory))
        self._hello = replace(hello, kv=kv, probe_region=self._prober.region)
        self._codecs = {Codec.NONE, *hello.kv.offer.codecs}

    def _shared(self, memory: KvMemory | None) -> str:
        """The region over the whole pool; empty where no link can have it."""
        try:
            return "" if memory is None else self.endpoints.adopt(memory.flat).name
        except ConfigError as error:
            log.info("KV is not read directly: %s", error)
            return ""

    @property
    def incarnation(self) -> Incarnation:
        """This worker's own."""
        return self._hello.incarnation

    def states(self) -> tuple[LinkState, ...]:
        """The links that were opened here."""
        with self._lock:
            opened = [link for link in self._links.values() if link.opened]
            return tuple(self._state(link) for link in opened)

    def connection(self, peer: Incarnation) -> Connection:
        """Raises PeerError when there is none."""
        with self._lock:
            found = self._by_peer.get(peer)
        if found is None:
            raise PeerError(f"no connection to worker {peer}")
        return found

    def scheme(self, peer: Incarnation) -> str | None:
        """Of the transport that connects us; None when nothing does (any more)."""
        with self._lock:
            found = self._by_peer.get(peer)
        return scheme_of(found.peer_address) if found is not None else None

    def line(self, peer: Incarnation) -> str:
        """Of copies: those over one connection are made one after another."""
        with self._lock:
            return f"{peer} {id(self._by_peer.get(peer)):x}"

    def send(self, command: SendPeer) -> None:
        """In order for each peer; connects first if need be. Never waits. A peer that can't be
        reached, or takes no more messages, is reported as lost; an answer to one that is not
        connected (any more) goes nowhere, and it has been told or will ask."""
        if not self._outboxes.put(command.peer, command):
            self._part(command.peer, f"it has not taken {MOST_WAITING} messages")

    def drop(self, command: DropLink) -> None:
        """Never waits. Nothing happens when the connection is lost already: its copies are about to
        end."""
        with self._lock:
            connection = self._by_peer.get(command.peer)
        if connection is not None:
            self._stall(connection, command.reason)
            self._close_apart(connection, stalled=True)

    def part(self, command: DropPeer) -> None:
        """Never waits. The next message connects anew."""
        self._part(command.peer, command.reason)

    def notify(self, peer: Incarnation, message: PeerMessage) -> None:
        """Raises PeerError."""
        self._say(self.connection(peer), message)

    def close(self) -> None:
        self.endpoints.close()
        self._outboxes.close()
        self._farewells.join()
        self._prober.close()

    def _deliver(self, command: SendPeer) -> None:
        """Runs on the peer's own thread."""
        try:
            connection = self._connected(command)
        except PeerError as error:
            self._part(command.peer, str(error))
            return
        if connection is None:
            return
        try:
            self._say(connection, command.message)
        except PeerError as error:
            self._forget(connection, str(error))
            self._close_apart(connection)

    def _say(self, connection: Connection, message: PeerMessage) -> None:
        """Regions go by the names that they have on this connection's transport."""
        scheme = scheme_of(connection.peer_address)
        match message:
            case SlabLent(region=region):
                if (name := self.endpoints.name_over(scheme, region)) is None:
                    raise PeerError(f"the slab {region} can't be reached over {scheme}")
                message = replace(message, region=name)
            case PeerHello():
                message = self._hello_over(scheme)
        connection.notify(encode(message))

    def _hello_over(self, scheme: str) -> PeerHello:
        hello = self._hello
        kv = replace(hello.kv, region=self.endpoints.name_over(scheme, hello.kv.region) or "")
        probe = self.endpoints.name_over(scheme, hello.probe_region) or ""
        return replace(hello, kv=kv, probe_region=probe)

    def _connected(self, command: SendPeer) -> Connection | None:
        with self._lock:
            known = self._by_peer.get(command.peer)
        if known is not None or not command.addresses:
            return known
        connection = self.endpoints.connect(command.addresses, self._last_resorts(command.peer))
        self._admit(connection, command.peer)
        self._say(connection, self._hello)
        return connection

    def _stall(self, connection: Connection, reason: str) -> None:
        """No copy goes over it any more; its transport is the last to be tried for the next one."""
        scheme = scheme_of(connection.peer_address)
        with self._lock:
            peer = self._peer_of.get(connection)
            if peer is not None:
                self._stalled[peer, scheme] = time.monotonic()
        log.warning("the link to %s over %s stalls: %s", peer, scheme, reason)
        self._forget(connection, reason, FailureReason.TRANSFER_TIMEOUT)

    def _last_resorts(self, peer: Incarnation) -> list[str]:
        """Transports over which a copy with this peer stalled, the longest ago first."""
        with self._lock:
            old_s = time.monotonic() - STALLED_S
            self._stalled = {link: s for link, s in self._stalled.items() if s > old_s}
            stalled = sorted(
                (s, scheme) for (who, scheme), s in self._stalled.items() if who == peer
            )
        return [scheme for _, scheme in stalled]

    def _part(self, peer: Incarnation, reason: str) -> None:
        """What waits for the peer is dropped, and the next message connects anew. Never waits."""
        with self._lock:
            connection = self._by_peer.get(peer)
            if connection is None:
                self._outboxes.clear(peer)
                self._post(PeerLost(peer=peer, reason=reason))
                return
        self._forget(connection, reason)
        self._close_apart(connection)

    def _close_apart(self, connection: Connection, *, stalled: bool = False) -> None:
        """Tells the peer, so both sides start over; if it `stalled`, the peer takes another
        transport too. Copies over it may take long to end."""

        def close() -> None:
            if stalled:
                with suppress(PeerError):
                    connection.notify(encode(LinkStalled()))
            connection.close()
            self._parting.discard(connection)

        self._parting.add(connection)
        self._farewells.start(f"kvrelay-farewell {connection.peer_address}", close)

    def _admit(self, connection: Connection, peer: Incarnation) -> None:
        with self._lock:
            self._by_peer[peer] = connection
            self._peer_of[connection] = peer

    def _received(self, connection: Connection, payload: bytes) -> None:
        if connection in self._parting:
            return
        try:
            message = decode(payload)
            if isinstance(message, PeerHello):
                self._greeted(connection, message)
            else:
                self._take(connection, message)
        except PeerError as error:
            self._drop(connection, str(error))

    def _take(self, connection: Connection, message: PeerMessage) -> None:
        with self._lock:
            peer, link = self._peer_of.get(connection), self._links.get(connection)
        if peer is None or link is None:
            raise PeerError("a peer spoke before its hello, or after it was refused")
        match message:
            case Ping() | Pong() | LinkProbed():
                self._prober.received(link, message)
            case LinkStalled():
                self._stall(connection, f"{link.name} has waited too long for a copy")
                connection.close()
            case SlabLent(codec=codec) if codec not in self._codecs:
                raise PeerError(f"{link.name} asks for codec {codec}, which is not allowed here")
            case _:
                self._post(FromPeer(peer=peer, message=message))

    def _greeted(self, connection: Connection, theirs: PeerHello) -> None:
        with self._lock:
            expected = self._peer_of.get(connection)
        if expected is None:  # they connected to us; our hello goes before any other message
            self._say(connection, self._hello)
            self._admit(connection, theirs.incarnation)
        elif expected != theirs.incarnation:
            raise PeerError(f"worker {expected} is gone; {theirs.incarnation} is in its place")
        try:
            self._check(theirs)
        except PeerError as error:
            if expected is not None:
                raise
            self._shun(connection, str(error))
            return
        link = Link(
            peer=theirs.incarnation,
            name=theirs.name,
            connection=connection,
            probe_region=theirs.probe_region,
            opened=expected is not None,
        )
        with self._lock:
            if connection in self._peer_of:  # else it was given up meanwhile
                self._links[connection] = link
                self._post(FromPeer(peer=theirs.incarnation, message=theirs))
                self._prober.connected(link)

    def _check(self, theirs: PeerHello) -> None:
        ours, who = self._hello, f"worker {theirs.name or theirs.incarnation}"
        for name in ("wire_version", "fingerprint"):
            mine, other = getattr(ours, name), getattr(theirs, name)
            if mine != other:
                raise PeerError(
                    f"{who} has {name} {other}, this one {mine}: both must run the same kvrelay "
                    "and model"
                )
        may_differ = ours.kv.mixed_precision and theirs.kv.mixed_precision
        if ours.kv.dtype != theirs.kv.dtype and not may_differ:
            raise PeerError(
                f"{who} has KV in {theirs.kv.dtype}, this one in {ours.kv.dtype}: give both the "
                "same dtype, or set transfer.allow_mixed_precision: true on both to have it "
                "converted"
            )

    def _shun(self, connection: Connection, reason: str) -> None:
        """It comes to the same by our hello, and closes: closed from here its next message would
        fail, and it would tell that instead of the reason."""
        log.error("refused a peer: %s", reason)
        self._forget(connection, reason)

    def _measured(self, link: Link, cost: LinkCost) -> None:
        with self._lock:
            if link.connection not in self._links:
                return
            is_new = link.connection not in self._costs
            self._costs[link.connection] = cost
        ends = (self._hello.name, link.name) if link.opened else (link.name, self._hello.name)
        speed, latency_us = cost.bytes_per_s / 1e9, cost.latency_s * 1e6
        text = "%s -> %s over %s: %.1f GB/s, %.0f us"
        level = logging.INFO if link.opened and is_new else logging.DEBUG
        log.log(level, text, *ends, self._label(link), speed, latency_us)
        self._post(LinkMeasured(peer=link.peer, cost=cost, name=link.name))

    def _label(self, link: Link) -> str:
        return self.endpoints.label(link.connection.peer_address)

    def _state(self, link: Link) -> LinkState:
        cost = self._costs.get(link.connection)
        transport = self._label(link)
        if cost is None:
            return LinkState(peer=link.peer, transport=transport)
        return LinkState(
            peer=link.peer,
            transport=transport,
            bytes_per_s=cost.bytes_per_s,
            latency_s=cost.latency_s,
        )

    def _drop(self, connection: Connection, reason: str) -> None:
        log.error("refused a peer: %s", reason)
        connection.close()
        self._forget(connection, reason)

    def _lost(self, connection: Connection) -> None:
        self._forget(connection, f"the connection to worker {connection.peer_address} was lost")

    def _forget(
        self,
        connection: Connection,
        reason: str,
        failure: FailureReason = FailureReason.PEER_LOST,
    ) -> None:
        with self._lock:
            self._prober.lost(connection)
            self._links.pop(connection, None)
            self._costs.pop(connection, None)
            peer = self._peer_of.pop(connection, None)
            if peer is None or self._by_peer.get(peer) is not connection:
                return
            del self._by_peer[peer]
            self._outboxes.clear(peer)
            # Before any hello of its next connection.
            self._post(PeerLost(peer=peer, reason=reason, failure=failure))
