"""A worker's pool side put together: client, link and thread. Driven by the worker's loop.

Every event of the pool goes through `handle`, on the loop's thread; what it returns is for the
schedulers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import assert_never

from cluster.pool_link import PoolLink
from cluster.pool_mover import PoolMover
from kvpool.memory import KvMemory
from kvpool.pool_client import PoolClient
from kvpool.pool_client_events import (
    ClientEvent,
    FetchBlocks,
    OfferSettled,
    PoolNews,
    PrefixFetched,
    PrefixFound,
    PrefixPinned,
    SendPool,
    StoreBlocks,
)
from kvpool.pool_messages import PoolFormat, PoolHello
from kvpool.transport.registry import LOOPBACK_HOST
from kvrelay.types import WIRE_VERSION, Incarnation

PoolAnswer = OfferSettled | PrefixFound | PrefixFetched | PrefixPinned


class PoolSide:
    """`address` is `host_pool_address(cluster)`, or that of another host's node; whether one is
    there now does not matter."""

    def __init__(
        self,
        memory: KvMemory,
        *,
        address: str,
        incarnation: Incarnation,
        fingerprint: str,
        wants_changes: bool,
        post: Callable[[PoolNews], None],
        crashed: Callable[[BaseException], None],
        host: str = LOOPBACK_HOST,
    ) -> None:
        hello = PoolHello(
            wire_version=WIRE_VERSION,
            incarnation=incarnation,
            format=PoolFormat(
                fingerprint=fingerprint,
                physical_format=memory.layout.physical_format(),
                block_bytes=memory.layout.bytes_per_block,
            ),
            wants_changes=wants_changes,
        )
        self.client = PoolClient()
        self._link = PoolLink(address, hello, post, host=host)
        self._mover = PoolMover(memory, self._link, post=post, crashed=crashed)

    def start(self) -> None:
        self._mover.start()
        self._link.start()

    def handle(self, event: ClientEvent) -> list[PoolAnswer]:
        """Never waits."""
        answers: list[PoolAnswer] = []
        for command in self.client.handle(event, time.monotonic()):
            match command:
                case SendPool(message=message):
                    self._link.send(message)
                case StoreBlocks() | FetchBlocks():
                    self._mover.put(command)
                case OfferSettled() | PrefixFound() | PrefixFetched() | PrefixPinned():
                    answers.append(command)
                case _:
                    assert_never(command)
        return answers

    def close(self) -> None:
        self._mover.close()
        self._link.close()
