"""A worker's links to pool nodes, and a thread for each that carries blocks. The loop drives
them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import assert_never

from cluster.worker.pool.link import PoolEndpoints, PoolLink
from cluster.worker.pool.mover import PoolMover
from kvpool.core.fetch.client_events import (
    OWN_NODE,
    CloseNode,
    ConnectNode,
    FetchBlocks,
    NodeEvent,
    NodeOrder,
    SendPool,
    StoreBlocks,
)
from kvpool.core.node.messages import PoolFormat, PoolHello
from kvpool.memory.kv_memory import KvMemory
from kvpool.transport.endpoints import DEFAULTS, EndpointOptions, scheme_of
from kvpool.transport.link_kind import LinkKind
from kvrelay.types import WIRE_VERSION, Incarnation

FAREWELL_S = 2.0
"""`close` waits this long for copies that hang."""


class PoolLinks:
    """`address` is `host_pool_address(cluster)`, or that of another host's node; the node need not
    run yet. Nodes of other hosts are read over `far_transports`, in order of preference."""

    def __init__(
        self,
        memory: KvMemory,
        *,
        address: str,
        incarnation: Incarnation,
        fingerprint: str,
        looks_up: bool,
        post: Callable[[NodeEvent], None],
        crashed: Callable[[BaseException], None],
        far_transports: Sequence[str] = (),
        options: EndpointOptions = DEFAULTS,
        require: Collection[LinkKind] = (),
    ) -> None:
        """Raises ConfigError when no transport can be used."""
        self._hello = PoolHello(
            wire_version=WIRE_VERSION,
            incarnation=incarnation,
            format=PoolFormat(
                fingerprint=fingerprint,
                physical_format=memory.layout.physical_format(),
                block_bytes=memory.layout.bytes_per_block,
            ),
            looks_up=looks_up,
        )
        self._post = post
        schemes = dict.fromkeys([scheme_of(address), *far_transports])
        self._endpoints = PoolEndpoints([*schemes], incarnation, options, require)
        own = PoolLink(self._endpoints, [address], self._hello, post)
        self._memory = memory
        self._crashed = crashed
        self._links = {OWN_NODE: own}
        self._movers = {OWN_NODE: self._mover_of(own)}

    def start(self) -> None:
        self._movers[OWN_NODE].start()
        self._links[OWN_NODE].start()

    def execute(self, order: NodeOrder) -> None:
        """Never waits for a node."""
        match order:
            case SendPool(node=node, message=message):
                if node in self._links:
                    self._links[node].send(message)
            case StoreBlocks(node=node) | FetchBlocks(node=node):
                self._movers[node].put(order)
            case ConnectNode(node=node, addresses=addresses):
                self._connect(node, addresses)
            case CloseNode(node=node):
                self._movers.pop(node).end()
                self._links.pop(node).end()
            case _:
                assert_never(order)

    def _connect(self, node: Incarnation, addresses: tuple[str, ...]) -> None:
        hello = replace(self._hello, looks_up=False)
        link = PoolLink(self._endpoints, addresses, hello, self._post, node)
        self._links[node], self._movers[node] = link, self._mover_of(link)
        self._movers[node].start()
        link.start()

    def _mover_of(self, link: PoolLink) -> PoolMover:
        return PoolMover(
            self._memory, self._endpoints, link, post=self._post, crashed=self._crashed
        )

    def close(self) -> None:
        until_s = time.monotonic() + FAREWELL_S
        for mover in self._movers.values():
            mover.drop()
        for mover in self._movers.values():
            mover.join(until_s)
        for link in self._links.values():
            link.close()
        self._endpoints.close()
