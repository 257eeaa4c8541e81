"""Pool nodes of other hosts, as a worker reads them: a link for each that it was told of.

Runs on the worker loop's thread; links connect on threads of their own. A node that can't be
reached, or refuses, is left alone for a while.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.pool.news import FromFar
from kvpool.far_fetches import AskFar
from kvpool.pool.client import PoolClient
from kvpool.pool.client_events import (
    ClientEvent,
    ClientTick,
    DropPrefix,
    FetchBlocks,
    PoolJoined,
    PoolLost,
    PrefixFetched,
    SendPool,
    WantPrefix,
)
from kvpool.pool.messages import ToPool
from kvrelay.types import Incarnation

log = logging.getLogger(__name__)

PATIENCE_S = 5.0
LEFT_ALONE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FarLink:
    """Ways to a node; its news come as FromFar."""

    send: Callable[[ToPool], None]
    fetch: Callable[[FetchBlocks], None]
    close: Callable[[], None]


@dataclass(slots=True)
class _Far:
    """`waiting`: asked before the link stood, with the time that each is given up."""

    link: FarLink
    client: PoolClient = field(default_factory=PoolClient)
    waiting: dict[WantPrefix, float] = field(default_factory=dict)
    is_lost: bool = False


class FarPools:
    """`connect` begins a link to a node at one of these addresses."""

    def __init__(self, connect: Callable[[Incarnation, tuple[str, ...]], FarLink]) -> None:
        self._connect = connect
        self._nodes: dict[Incarnation, _Far] = {}
        self._left_alone: dict[Incarnation, float] = {}

    def ask(self, asked: AskFar) -> list[PrefixFetched]:
        match asked.question:
            case WantPrefix() as wanted:
                return self._want(asked, wanted)
            case DropPrefix() as dropped:
                return self._drop(asked.node, dropped)

    def heard(self, event: FromFar) -> list[PrefixFetched]:
        far = self._nodes.get(event.node)
        if far is None:
            return []
        answers = self._tell(far, event.news)
        if isinstance(event.news, PoolJoined):
            waiting, far.waiting = far.waiting, {}
            answers += [one for wanted in waiting for one in self._tell(far, wanted)]
        elif isinstance(event.news, PoolLost):
            answers += self._lost(event.node, far, event.news.reason)
        if far.is_lost and far.client.idle:
            del self._nodes[event.node]
        return answers

    def tick(self) -> list[PrefixFetched]:
        answers = []
        now_s = time.monotonic()
        for far in self._nodes.values():
            answers += self._tell(far, ClientTick())
            for wanted in [w for w, until_s in far.waiting.items() if until_s <= now_s]:
                del far.waiting[wanted]
                answers.append(_nothing(wanted))
        return answers

    def close(self) -> None:
        for far in self._nodes.values():
            far.link.close()

    def _want(self, asked: AskFar, wanted: WantPrefix) -> list[PrefixFetched]:
        now_s = time.monotonic()
        if self._left_alone.get(asked.node, 0.0) > now_s:
            return [_nothing(wanted)]
        far = self._nodes.get(asked.node)
        if far is None:
            far = self._nodes[asked.node] = _Far(self._connect(asked.node, asked.addresses))
        if far.client.connected or far.is_lost:
            return self._tell(far, wanted)
        far.waiting[wanted] = now_s + PATIENCE_S
        return []

    def _drop(self, node: Incarnation, dropped: DropPrefix) -> list[PrefixFetched]:
        far = self._nodes.get(node)
        if far is None:
            return []
        for wanted in [wanted for wanted in far.waiting if wanted.key == dropped.key]:
            del far.waiting[wanted]
            return [_nothing(wanted)]
        return self._tell(far, dropped)

    def _lost(self, node: Incarnation, far: _Far, reason: str) -> list[PrefixFetched]:
        log.warning("pool node %s is left alone for %g s: %s", node, LEFT_ALONE_S, reason)
        far.is_lost = True
        far.link.close()
        self._left_alone[node] = time.monotonic() + LEFT_ALONE_S
        waiting, far.waiting = far.waiting, {}
        return [_nothing(wanted) for wanted in waiting]

    def _tell(self, far: _Far, event: ClientEvent) -> list[PrefixFetched]:
        answers: list[PrefixFetched] = []
        for command in far.client.handle(event, time.monotonic()):
            match command:
                case SendPool(message=message):
                    far.link.send(message)
                case FetchBlocks():
                    far.link.fetch(command)
                case PrefixFetched():
                    answers.append(command)
                case _:
                    raise AssertionError(f"{command} was not asked for")
        return answers


def _nothing(wanted: WantPrefix) -> PrefixFetched:
    return PrefixFetched(key=wanted.key, blocks=0)
