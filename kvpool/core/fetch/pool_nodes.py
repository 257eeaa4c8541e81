"""The pool nodes that a worker uses: that of its host, and those of other hosts that routers name.
Pure.

A node of another host is linked to when it is first asked. Questions wait for the link, within
limits. A node that is lost, refuses or can't be reached is left alone for a while. Every question
is answered once.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from kvpool.core.fetch.client import PoolClient
from kvpool.core.fetch.client_events import (
    OWN_NODE,
    ClientCommand,
    ClientTick,
    CloseNode,
    ConnectNode,
    DropPrefix,
    NodeEvent,
    PoolJoined,
    PoolLost,
    PoolQuestion,
    PrefixFetched,
    WantPrefix,
)
from kvrelay.types import Incarnation

log = logging.getLogger(__name__)

PATIENCE_S = 5.0
LEFT_ALONE_S = 30.0


@dataclass(slots=True)
class _Remote:
    """`waiting`: questions asked before the link was up, with the time at which each is given
    up."""

    client: PoolClient
    waiting: dict[WantPrefix, float] = field(default_factory=dict)
    is_lost: bool = False


class PoolNodes:
    def __init__(self, own: PoolClient | None = None) -> None:
        """`own` is the client of this host's node; None: one with the usual limits."""
        self.own = PoolClient() if own is None else own
        self._remotes: dict[Incarnation, _Remote] = {}
        self._left_alone: dict[Incarnation, float] = {}

    def ask(self, question: PoolQuestion, now_s: float) -> list[ClientCommand]:
        match question:
            case WantPrefix(node=node) if node != OWN_NODE:
                return self._want(question, now_s)
            case DropPrefix(node=node) if node != OWN_NODE:
                return self._drop(question, now_s)
            case _:
                return self.own.handle(question, now_s)

    def handle(self, event: NodeEvent, now_s: float) -> list[ClientCommand]:
        if event.node == OWN_NODE:
            return self.own.handle(event, now_s)
        remote = self._remotes.get(event.node)
        if remote is None:
            return []
        commands = remote.client.handle(event, now_s)
        if isinstance(event, PoolJoined):
            waiting, remote.waiting = remote.waiting, {}
            for wanted in waiting:
                commands += remote.client.handle(wanted, now_s)
        elif isinstance(event, PoolLost):
            commands += self._lost(event, remote, now_s)
        if remote.is_lost and remote.client.idle:
            del self._remotes[event.node]
        return commands

    def tick(self, now_s: float) -> list[ClientCommand]:
        commands = self.own.handle(ClientTick(), now_s)
        for remote in self._remotes.values():
            commands += remote.client.handle(ClientTick(), now_s)
            for wanted in [w for w, until_s in remote.waiting.items() if until_s <= now_s]:
                del remote.waiting[wanted]
                commands.append(_nothing(wanted))
        return commands

    def _want(self, wanted: WantPrefix, now_s: float) -> list[ClientCommand]:
        node = wanted.node
        if self._left_alone.get(node, now_s) > now_s:
            return [_nothing(wanted)]
        remote = self._remotes.get(node)
        if remote is not None and (remote.client.connected or remote.is_lost):
            return remote.client.handle(wanted, now_s)
        commands: list[ClientCommand] = []
        if remote is None:
            remote = self._remotes[node] = _Remote(PoolClient(node))
            commands.append(ConnectNode(node=node, addresses=wanted.addresses))
        remote.waiting[wanted] = now_s + PATIENCE_S
        return commands

    def _drop(self, dropped: DropPrefix, now_s: float) -> list[ClientCommand]:
        remote = self._remotes.get(dropped.node)
        if remote is None:
            return []
        for wanted in [wanted for wanted in remote.waiting if wanted.key == dropped.key]:
            del remote.waiting[wanted]
            return [_nothing(wanted)]
        return remote.client.handle(dropped, now_s)

    def _lost(self, event: PoolLost, remote: _Remote, now_s: float) -> list[ClientCommand]:
        log.warning(
            "pool node %s is not asked for %g s: %s", event.node, LEFT_ALONE_S, event.reason
        )
        remote.is_lost = True
        self._left_alone[event.node] = now_s + LEFT_ALONE_S
        waiting, remote.waiting = remote.waiting, {}
        return [CloseNode(node=event.node), *map(_nothing, waiting)]

    def validate(self) -> None:
        """Questions wait only for a link that does not stand yet."""
        self.own.validate()
        for remote in self._remotes.values():
            remote.client.validate()
            assert not remote.waiting or not (remote.client.connected or remote.is_lost)


def _nothing(wanted: WantPrefix) -> PrefixFetched:
    return PrefixFetched(key=wanted.key, blocks=0)
