"""A worker's pool side put together: clients, links and thread. Driven by the worker's loop.

Every event of the pools goes through `handle`, on the loop's thread; what it returns is for the
schedulers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import assert_never

from cluster.pool.endpoints import PoolEndpoints
from cluster.pool.far_pools import FarLink, FarPools
from cluster.pool.link import PoolLink
from cluster.pool.mover import PoolJob, PoolMover
from cluster.pool.news import FromFar, PoolNews
from kvpool.far_fetches import AskFar
from kvpool.memory.kv_memory import KvMemory
from kvpool.pool.client import PoolClient
from kvpool.pool.client_events import (
    BlocksFetched,
    BlocksStored,
    ClientEvent,
    ClientTick,
    FetchBlocks,
    FromNode,
    OfferSettled,
    PoolJoined,
    PoolLost,
    PrefixFetched,
    PrefixFound,
    SendPool,
    StoreBlocks,
)
from kvpool.pool.messages import PoolFormat, PoolHello
from kvpool.transport.endpoints import DEFAULTS, EndpointOptions, scheme_of
from kvpool.transport.fabric import LinkKind
from kvrelay.types import WIRE_VERSION, Incarnation

PoolEvent = ClientEvent | AskFar | FromFar

PoolAnswer = OfferSettled | PrefixFound | PrefixFetched


class PoolSide:
    """`address` is `host_pool_address(cluster)`, or that of another host's node; whether one is
    there now does not matter. Nodes of other hosts are read over `far_transports`, by
    preference."""

    def __init__(
        self,
        memory: KvMemory,
        *,
        address: str,
        incarnation: Incarnation,
        fingerprint: str,
        looks_up: bool,
        post: Callable[[PoolNews], None],
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
        self.client = PoolClient()
        schemes = dict.fromkeys([scheme_of(address), *far_transports])
        self._endpoints = PoolEndpoints([*schemes], incarnation, options, require)
        self._link = PoolLink(self._endpoints, [address], self._hello, post)
        self._mover = PoolMover(memory, self._endpoints, crashed=crashed)
        self._far = FarPools(self._connect)

    def start(self) -> None:
        self._mover.start()
        self._link.start()

    def handle(self, event: PoolEvent) -> list[PoolAnswer]:
        """Never waits."""
        match event:
            case AskFar():
                return [*self._far.ask(event)]
            case FromFar():
                return [*self._far.heard(event)]
            case ClientTick():
                return [*self._far.tick(), *self._own(event)]
            case _:
                return self._own(event)

    def _own(self, event: ClientEvent) -> list[PoolAnswer]:
        """To the node of this host."""
        answers: list[PoolAnswer] = []
        for command in self.client.handle(event, time.monotonic()):
            match command:
                case SendPool(message=message):
                    self._link.send(message)
                case StoreBlocks() | FetchBlocks():
                    self._mover.put(PoolJob(command, self._link, self._post))
                case OfferSettled() | PrefixFound() | PrefixFetched():
                    answers.append(command)
                case _:
                    assert_never(command)
        return answers

    def _connect(self, node: Incarnation, addresses: tuple[str, ...]) -> FarLink:
        def post(news: PoolJoined | PoolLost | FromNode | BlocksStored | BlocksFetched) -> None:
            self._post(FromFar(node, news))

        hello = replace(self._hello, looks_up=False)
        link = PoolLink(self._endpoints, addresses, hello, post, expects=node)
        link.start()
        fetch = partial(_fetch, self._mover, link, post)
        return FarLink(send=link.send, fetch=fetch, close=link.close)

    def close(self) -> None:
        self._mover.close()
        self._far.close()
        self._link.close()
        self._endpoints.close()


def _fetch(
    mover: PoolMover,
    link: PoolLink,
    post: Callable[[BlocksStored | BlocksFetched], None],
    order: FetchBlocks,
) -> None:
    mover.put(PoolJob(order, link, post))
