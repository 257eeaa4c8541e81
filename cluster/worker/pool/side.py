"""A worker's side of the pool: clients, links and thread. The worker's loop drives it.

Every event of the pools goes through `handle`, on the loop's thread; its return value is for the
schedulers.

RemotePools links to pool nodes of other hosts that routers name. It runs on the loop's thread, and
links connect on their own threads. A node that can't be reached, or refuses, is not asked again for
a while.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import assert_never

from cluster.core.worker.events import PoolAnswer
from cluster.worker.pool.link import PoolEndpoints, PoolLink
from cluster.worker.pool.mover import PoolJob, PoolMover
from cluster.worker.pool.news import FromRemote, PoolNews
from kvpool.core.fetch.client import PoolClient
from kvpool.core.fetch.client_events import (
    BlocksFetched,
    BlocksStored,
    ClientEvent,
    ClientTick,
    DropPrefix,
    FetchBlocks,
    FromNode,
    OfferSettled,
    PoolJoined,
    PoolLost,
    PrefixFetched,
    PrefixFound,
    SendPool,
    StoreBlocks,
    WantPrefix,
)
from kvpool.core.fetch.pool_fetch import AskRemote
from kvpool.core.node.messages import PoolFormat, PoolHello, ToPool
from kvpool.memory.kv_memory import KvMemory
from kvpool.transport.endpoints import DEFAULTS, EndpointOptions, scheme_of
from kvpool.transport.link_kind import LinkKind
from kvrelay.types import WIRE_VERSION, Incarnation

log = logging.getLogger(__name__)


PATIENCE_S = 5.0
LEFT_ALONE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePoolLink:
    """The addresses of a remote pool node; its events come as FromRemote."""

    send: Callable[[ToPool], None]
    fetch: Callable[[FetchBlocks], None]
    close: Callable[[], None]


@dataclass(slots=True)
class _Remote:
    """`waiting`: requests made before the link was up, with the time at which each is given up."""

    link: RemotePoolLink
    client: PoolClient = field(default_factory=PoolClient)
    waiting: dict[WantPrefix, float] = field(default_factory=dict)
    is_lost: bool = False


class RemotePools:
    """`connect` starts a link to a node at one of these addresses."""

    def __init__(self, connect: Callable[[Incarnation, tuple[str, ...]], RemotePoolLink]) -> None:
        self._connect = connect
        self._nodes: dict[Incarnation, _Remote] = {}
        self._left_alone: dict[Incarnation, float] = {}

    def ask(self, asked: AskRemote) -> list[PrefixFetched]:
        match asked.question:
            case WantPrefix() as wanted:
                return self._want(asked, wanted)
            case DropPrefix() as dropped:
                return self._drop(asked.node, dropped)

    def heard(self, event: FromRemote) -> list[PrefixFetched]:
        remote = self._nodes.get(event.node)
        if remote is None:
            return []
        answers = self._tell(remote, event.news)
        if isinstance(event.news, PoolJoined):
            waiting, remote.waiting = remote.waiting, {}
            answers += [one for wanted in waiting for one in self._tell(remote, wanted)]
        elif isinstance(event.news, PoolLost):
            answers += self._lost(event.node, remote, event.news.reason)
        if remote.is_lost and remote.client.idle:
            del self._nodes[event.node]
        return answers

    def tick(self) -> list[PrefixFetched]:
        answers = []
        now_s = time.monotonic()
        for remote in self._nodes.values():
            answers += self._tell(remote, ClientTick())
            for wanted in [w for w, until_s in remote.waiting.items() if until_s <= now_s]:
                del remote.waiting[wanted]
                answers.append(_nothing(wanted))
        return answers

    def close(self) -> None:
        for remote in self._nodes.values():
            remote.link.close()

    def _want(self, asked: AskRemote, wanted: WantPrefix) -> list[PrefixFetched]:
        now_s = time.monotonic()
        if self._left_alone.get(asked.node, 0.0) > now_s:
            return [_nothing(wanted)]
        remote = self._nodes.get(asked.node)
        if remote is None:
            remote = self._nodes[asked.node] = _Remote(self._connect(asked.node, asked.addresses))
        if remote.client.connected or remote.is_lost:
            return self._tell(remote, wanted)
        remote.waiting[wanted] = now_s + PATIENCE_S
        return []

    def _drop(self, node: Incarnation, dropped: DropPrefix) -> list[PrefixFetched]:
        remote = self._nodes.get(node)
        if remote is None:
            return []
        for wanted in [wanted for wanted in remote.waiting if wanted.key == dropped.key]:
            del remote.waiting[wanted]
            return [_nothing(wanted)]
        return self._tell(remote, dropped)

    def _lost(self, node: Incarnation, remote: _Remote, reason: str) -> list[PrefixFetched]:
        log.warning("pool node %s is not asked for %g s: %s", node, LEFT_ALONE_S, reason)
        remote.is_lost = True
        remote.link.close()
        self._left_alone[node] = time.monotonic() + LEFT_ALONE_S
        waiting, remote.waiting = remote.waiting, {}
        return [_nothing(wanted) for wanted in waiting]

    def _tell(self, remote: _Remote, event: ClientEvent) -> list[PrefixFetched]:
        answers: list[PrefixFetched] = []
        for command in remote.client.handle(event, time.monotonic()):
            match command:
                case SendPool(message=message):
                    remote.link.send(message)
                case FetchBlocks():
                    remote.link.fetch(command)
                case PrefixFetched():
                    answers.append(command)
                case _:
                    raise AssertionError(f"{command} was not asked for")
        return answers


def _nothing(wanted: WantPrefix) -> PrefixFetched:
    return PrefixFetched(key=wanted.key, blocks=0)


PoolLinkEvent = ClientEvent | AskRemote | FromRemote


class PoolSide:
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
        self._far = RemotePools(self._connect)

    def start(self) -> None:
        self._mover.start()
        self._link.start()

    def handle(self, event: PoolLinkEvent) -> list[PoolAnswer]:
        """Never waits."""
        match event:
            case AskRemote():
                return [*self._far.ask(event)]
            case FromRemote():
                return [*self._far.heard(event)]
            case ClientTick():
                return [*self._far.tick(), *self._own(event)]
            case _:
                return self._own(event)

    def _own(self, event: ClientEvent) -> list[PoolAnswer]:
        """Commands for the node of this host."""
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

    def _connect(self, node: Incarnation, addresses: tuple[str, ...]) -> RemotePoolLink:
        def post(news: PoolJoined | PoolLost | FromNode | BlocksStored | BlocksFetched) -> None:
            self._post(FromRemote(node, news))

        hello = replace(self._hello, looks_up=False)
        link = PoolLink(self._endpoints, addresses, hello, post, expects=node)
        link.start()
        fetch = partial(_fetch, self._mover, link, post)
        return RemotePoolLink(send=link.send, fetch=fetch, close=link.close)

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
