"""What a pool node tells routers of its blocks. Pure.

A router first gets all strands, page by page, then each change. It gets the next message only when
it has taken the one before. Meanwhile changes wait for it, up to a bound. A router that exceeds the
bound is dropped, and connects again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvpool.core.blocks.news import RunNews
from kvpool.core.node.events import DropRouter, RouterCall, TellRouter
from kvpool.core.node.tier_blocks import TierBlocks
from kvrelay.messages import BlockChanges
from kvrelay.types import Incarnation, Tier

PAGE_BLOCKS = 8192
"""Blocks of one tier in one message: 256 KiB of hashes."""
MOST_WAITING = 1 << 18
"""Strands with changes that may wait for one router, beside those of its greeting."""


@dataclass(slots=True)
class _Listener:
    """`most`: so many strands may wait."""

    news: dict[Tier, RunNews]
    most: int
    is_ready: bool = True
    told: int = 0
    workers: tuple[Incarnation, ...] = ()

    @property
    def waiting(self) -> int:
        return sum(news.waiting for news in self.news.values())

    def take(self) -> Iterator[BlockChanges]:
        for tier, news in self.news.items():
            cut, stored = news.take(PAGE_BLOCKS)
            if cut or stored:
                yield BlockChanges(tier=tier, cut=cut, stored=stored)


@dataclass(frozen=True, slots=True)
class _TierNews:
    """Tells all routers of one tier."""

    tier: Tier
    listeners: Mapping[RouterCall, _Listener]

    def stored(self, strand: int) -> None:
        for listener in self.listeners.values():
            listener.news[self.tier].stored(strand)

    def cut(self, strand: int, end: int) -> None:
        for listener in self.listeners.values():
            listener.news[self.tier].cut(strand, end)


class Changes:
    def __init__(self, *, host: TierBlocks, disk: TierBlocks) -> None:
        self._tiers = {Tier.HOST: host, Tier.DISK: disk}
        self._workers: dict[Incarnation, None] = {}
        self._listeners: dict[RouterCall, _Listener] = {}
        for tier, blocks in self._tiers.items():
            blocks.news = _TierNews(tier, self._listeners)

    # --- routers --------------------------------------------------------------------------------

    def called(self, router: RouterCall) -> None:
        news = {
            tier: RunNews(blocks, untold=blocks.strands()) for tier, blocks in self._tiers.items()
        }
        listener = _Listener(news, MOST_WAITING)
        listener.most += listener.waiting
        self._listeners[router] = listener

    def took(self, router: RouterCall) -> None:
        """The router has taken its last message. A dropped router may still report that."""
        if router in self._listeners:
            self._listeners[router].is_ready = True

    def hung_up(self, router: RouterCall) -> None:
        self._listeners.pop(router, None)

    # --- workers --------------------------------------------------------------------------------

    def joined(self, worker: Incarnation) -> None:
        """A worker of this host that looks prompts up here."""
        self._workers[worker] = None

    def left(self, worker: Incarnation) -> None:
        self._workers.pop(worker, None)

    # --- telling --------------------------------------------------------------------------------

    def flush(self) -> list[TellRouter | DropRouter]:
        """One message for each router that is ready and lacks changes; called after an event."""
        commands: list[TellRouter | DropRouter] = []
        for router, listener in list(self._listeners.items()):
            waiting = listener.waiting
            if waiting > listener.most:
                del self._listeners[router]
                reason = f"it reads too slowly: changes of {waiting} strands wait for it"
                commands.append(DropRouter(router=router, reason=reason))
            elif listener.is_ready:
                commands += self._tell(router, listener)
        return commands

    def _tell(self, router: RouterCall, listener: _Listener) -> Iterator[TellRouter]:
        blocks, workers = tuple(listener.take()), tuple(self._workers)
        if listener.told and not blocks and workers == listener.workers:
            return
        yield TellRouter(router=router, sequence=listener.told, workers=workers, blocks=blocks)
        listener.is_ready, listener.workers = False, workers
        listener.told += 1
