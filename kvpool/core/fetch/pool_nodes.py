"""The pool nodes that a worker uses: that of its host, and those of other hosts that routers name.
Pure.

A node of another host is linked to when it is first asked. Fetches wait for the link, within
limits. A node that is lost, refuses or can't be reached is left alone for a while. One that leaves
a question unanswered is mute: it is pinged, and asked nothing before it answers.

A fetched block is used if it has its checksum, and the node held it until it was copied. After the
end of the lease its place may have had other content while it was read.
"""

from __future__ import annotations

import logging

from kvpool.core.blocks.holding import places
from kvpool.core.fetch.client_events import (
    OWN_NODE,
    BlocksFetched,
    BlocksStored,
    ClientCommand,
    CloseNode,
    ConnectNode,
    FetchBlocks,
    FromNode,
    NodeEvent,
    PoolJoined,
    PoolLost,
    SendPool,
)
from kvpool.core.fetch.fetches import Fetch, FetchState, PrefixFetches, Restored
from kvpool.core.fetch.pool_stores import PoolStores
from kvpool.core.node.messages import (
    FetchDone,
    Fetched,
    FetchWanted,
    FromPool,
    LookedUp,
    LookupWanted,
    PoolWelcome,
    StoreConfirmed,
    StoreGranted,
    ToPool,
)
from kvrelay.messages import PrefixSource
from kvrelay.types import Incarnation

log = logging.getLogger(__name__)

LEFT_ALONE_S = 30.0
PING = 0
"""The number of a question about nothing; those of fetches begin at 1."""


class PoolNodes:
    """`stores` are those in the node of this host; None: with the usual limits. Commands go to
    `outbox`."""

    def __init__(self, stores: PoolStores | None = None) -> None:
        self.stores = PoolStores() if stores is None else stores
        self.outbox: list[ClientCommand] = self.stores.outbox
        self._own_node = OWN_NODE
        self._links: dict[Incarnation, PoolWelcome | None] = {}
        """# node |-> its welcome, None until it has come"""
        self._left_alone: dict[Incarnation, float] = {}
        self._mute: set[Incarnation] = set()

    # --- questions ------------------------------------------------------------------------------

    def seek(self, fetch: Fetch) -> bool:
        """Asks the node of this host which blocks it has. False: there is none, or it is mute."""
        if OWN_NODE not in self._links or OWN_NODE in self._mute:
            return False
        self._send(OWN_NODE, LookupWanted(request_no=fetch.number, hashes=tuple(fetch.hashes)))
        return True

    def try_link(self, source: PrefixSource, now_s: float) -> bool:
        """Links to a node of another host, unless it has a link, is mute or is left alone. False
        for the node of this host: it has been asked. A router may name it before it knows where
        this worker is."""
        node = source.peer
        if node in self._links:
            return node not in self._mute
        if node == self._own_node or self._left_alone.get(node, now_s) > now_s:
            return False
        self._links[node] = None
        self.outbox.append(ConnectNode(node=node, addresses=source.addresses))
        return True

    def may_answer(self, node: Incarnation) -> bool:
        """There is a link, or there will be, and it is not mute."""
        return node in self._links and node not in self._mute

    def want(self, fetch: Fetch) -> None:
        """Now, or as soon as there is a link."""
        if self._links.get(fetch.peer) is not None:
            hashes = tuple(fetch.hashes[: fetch.end])
            message = FetchWanted(request_no=fetch.number, hashes=hashes, skip=fetch.here)
            self._send(fetch.peer, message)

    def _send(self, node: Incarnation, message: ToPool) -> None:
        self.outbox.append(SendPool(node=node, message=message))

    # --- events ---------------------------------------------------------------------------------

    def handle(self, event: NodeEvent, fetches: PrefixFetches, now_s: float) -> list[Restored]:
        """Ends the fetches that are over with it."""
        match event:
            case BlocksFetched():
                return [self._copied(event, fetches, now_s)]
            case BlocksStored():
                self.stores.gathered(event, now_s)
            case PoolJoined():
                self._joined(event, fetches, now_s)
            case PoolLost():
                return self._lost(event, fetches, now_s)
            case FromNode(node=node, message=LookedUp(request_no=number)) if number == PING:
                self._speaks(node)
            case FromNode(node=node, message=Fetched() as granted):
                return self._granted(node, granted, fetches, now_s)
            case FromNode() if event.node == OWN_NODE:
                return self._own(event.message, fetches, now_s)
            case FromNode():
                pass
        return []

    def _own(self, message: FromPool, fetches: PrefixFetches, now_s: float) -> list[Restored]:
        match message:
            case StoreGranted():
                self.stores.granted(message, now_s)
            case StoreConfirmed():
                self.stores.confirmed(message)
            case LookedUp(request_no=number, host_blocks=host, disk_blocks=disk):
                return fetches.found(number, host, disk, now_s)
        return []

    def _joined(self, event: PoolJoined, fetches: PrefixFetches, now_s: float) -> None:
        node, welcome = event.node, event.welcome
        if node == OWN_NODE:
            self._own_node, self.stores.region = welcome.incarnation, welcome.region
        elif node not in self._links:
            return  # it was given up
        self._links[node] = welcome
        self._speaks(node)
        for fetch in fetches.all_from(node):
            if fetch.state is FetchState.ASKED:
                fetch.began_s = fetch.since_s = now_s
                self.want(fetch)

    def _lost(self, event: PoolLost, fetches: PrefixFetches, now_s: float) -> list[Restored]:
        node = event.node
        if node == OWN_NODE:
            self.stores.lost()
        elif node in self._links:
            log.warning("pool node %s is not asked for %g s: %s", node, LEFT_ALONE_S, event.reason)
            self._left_alone[node] = now_s + LEFT_ALONE_S
            self.outbox.append(CloseNode(node=node))
        self._links.pop(node, None)
        self._speaks(node)
        return fetches.lost(node, now_s)

    def expire(self, fetches: PrefixFetches, now_s: float) -> list[Restored]:
        """Nobody waits for a node that has missed an answer."""
        mute = {f.peer for f in fetches if f.peer in self._links and f.is_late(now_s)}
        if self.stores.is_late(now_s):
            mute.add(OWN_NODE)
        for node in mute - self._mute:
            self._fall_mute(node)
        return [one for node in mute for one in fetches.waits_no_longer(node, now_s)]

    def _fall_mute(self, node: Incarnation) -> None:
        whose = f"node {node}" if node else "node of this host"
        log.warning("the pool %s does not answer: nothing is asked before it does", whose)
        self._mute.add(node)
        if node == OWN_NODE:
            self.stores.fall_mute()
        if self._links[node] is not None:
            self._send(node, LookupWanted(request_no=PING, hashes=()))

    def _speaks(self, node: Incarnation) -> None:
        self._mute.discard(node)
        if node == OWN_NODE:
            self.stores.speaks()

    def _granted(
        self, node: Incarnation, granted: Fetched, fetches: PrefixFetches, now_s: float
    ) -> list[Restored]:
        welcome = self._links.get(node)
        if welcome is None:
            return []
        number = granted.request_no
        fetch = fetches.find(number, node)
        if fetch is None or fetch.state is not FetchState.ASKED:
            if granted.places:  # too late
                self._send(node, FetchDone(request_no=number))
            return []
        count = min(len(granted.places), len(granted.checksums), fetch.end - fetch.here)
        if not count:
            return [fetches.end(fetch, 0, now_s)]
        tables = fetches.tables.tables(fetch.holder)
        command = FetchBlocks(
            node=node,
            request_no=number,
            region=welcome.region,
            places=granted.places[:count],
            checksums=granted.checksums[:count],
            targets=places(tables, range(fetch.here, fetch.here + count)),
        )
        self.outbox.append(command)
        fetch.enter(FetchState.COPYING, now_s)
        return []

    def _copied(self, done: BlocksFetched, fetches: PrefixFetches, now_s: float) -> Restored:
        """The node hears of it if it is still there, and so of a block that is damaged."""
        fetch, welcome = fetches.get(done.request_no), self._links.get(done.node)
        is_held = False
        if welcome is not None and welcome.region == done.region:
            is_held = now_s - fetch.began_s < welcome.lease_ttl_s
            end = fetch.here + done.sound_blocks
            damaged = fetch.hashes[end : end + 1] if done.damaged and is_held else ()
            self._send(done.node, FetchDone(request_no=fetch.number, damaged=tuple(damaged)))
        blocks = done.sound_blocks if is_held and not fetch.dropped else 0
        return fetches.end(fetch, blocks, now_s)

    def take_outbox(self) -> list[ClientCommand]:
        taken = self.outbox.copy()
        self.outbox.clear()
        return taken

    def validate(self) -> None:
        self.stores.validate()
        assert self.stores.connected == (OWN_NODE in self._links)
        assert self.stores.is_mute == (OWN_NODE in self._mute)
        assert self._mute <= self._links.keys()
