"""What a pool node tells routers of its blocks: first all of them, page by page, then each change.
Pure.

A router is told no more until it has taken the message before. Meanwhile changes wait for it, up to
a bound; a router with more is dropped, and calls again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from kvpool.block_origins import BlockOrigins
from kvpool.hashes import BlockHash
from kvpool.pool.events import DropRouter, RouterCall, TellRouter
from kvpool.pool.messages import PoolTier
from kvpool.tiers.tier_blocks import TierBlocks
from kvrelay.messages import BlockChanges
from kvrelay.types import Incarnation, Tier

PAGE_BLOCKS = 8192
"""Of one tier in one message: 256 KiB of hashes."""
MOST_WAITING = 1 << 18
"""Changes that wait for one router: 28 MB."""


@dataclass(slots=True)
class _Listener:
    """`pages`: what was there when the router called. Changes since then follow the last page."""

    pages: Iterator[BlockChanges]
    is_ready: bool = True
    told: int = 0
    workers: tuple[Incarnation, ...] = ()
    # tier |-> block |-> whether it is there now
    waiting: dict[PoolTier, dict[BlockHash, bool]] = field(
        default_factory=lambda: {tier: {} for tier in PoolTier}
    )

    def next_blocks(self) -> tuple[BlockChanges, ...]:
        page = next(self.pages, None)
        if page is not None:
            return (page,)
        return tuple(_take(tier, changes) for tier, changes in self.waiting.items() if changes)


class Changes:
    def __init__(self, origins: BlockOrigins) -> None:
        self._origins = origins
        self._workers: dict[Incarnation, None] = {}
        self._listeners: dict[RouterCall, _Listener] = {}

    # --- routers --------------------------------------------------------------------------------

    def called(self, router: RouterCall, *, host: TierBlocks, disk: TierBlocks) -> None:
        on_host = _pages(Tier.HOST, tuple(host), host.serves)
        on_disk = _pages(Tier.DISK, tuple(disk), disk.serves)
        self._listeners[router] = _Listener(chain(on_host, on_disk))

    def took(self, router: RouterCall) -> None:
        """The last message to it. One that was dropped may still say so."""
        if router in self._listeners:
            self._listeners[router].is_ready = True

    def hung_up(self, router: RouterCall) -> None:
        self._listeners.pop(router, None)

    # --- workers --------------------------------------------------------------------------------

    def joined(self, worker: Incarnation) -> None:
        """One of this host that looks prompts up here."""
        self._workers[worker] = None

    def left(self, worker: Incarnation) -> None:
        self._workers.pop(worker, None)

    # --- blocks ---------------------------------------------------------------------------------

    def stored(self, tier: PoolTier, hashes: Iterable[BlockHash]) -> None:
        hashes = tuple(hashes)
        self._origins.came(tier, hashes)
        self._note(tier, hashes, there=True)

    def removed(self, tier: PoolTier, hashes: Iterable[BlockHash]) -> None:
        hashes = tuple(hashes)
        self._origins.went(tier, hashes)
        self._note(tier, hashes, there=False)

    def _note(self, tier: PoolTier, hashes: Sequence[BlockHash], *, there: bool) -> None:
        for listener in self._listeners.values():
            listener.waiting[tier].update(dict.fromkeys(hashes, there))

    def flush(self) -> list[TellRouter | DropRouter]:
        """One message for each router that is ready and hasn't heard all; called after an event."""
        commands: list[TellRouter | DropRouter] = []
        for router, listener in list(self._listeners.items()):
            waiting = sum(map(len, listener.waiting.values()))
            if waiting > MOST_WAITING:
                del self._listeners[router]
                reason = f"it reads too slowly: {waiting} changes wait for it"
                commands.append(DropRouter(router=router, reason=reason))
            elif listener.is_ready:
                commands += self._tell(router, listener)
        return commands

    def _tell(self, router: RouterCall, listener: _Listener) -> Iterator[TellRouter]:
        blocks, workers = listener.next_blocks(), tuple(self._workers)
        if listener.told and not blocks and workers == listener.workers:
            return
        yield TellRouter(router=router, sequence=listener.told, workers=workers, blocks=blocks)
        listener.is_ready, listener.workers = False, workers
        listener.told += 1


def _pages(
    tier: Tier, hashes: Sequence[BlockHash], serves: Callable[[BlockHash], bool]
) -> Iterator[BlockChanges]:
    """Of those that are still there when their page comes: a change that waits tells of others."""
    for at in range(0, len(hashes), PAGE_BLOCKS):
        served = tuple(filter(serves, hashes[at : at + PAGE_BLOCKS]))
        if served:
            yield BlockChanges(tier=tier, stored=served)


def _take(tier: PoolTier, changes: dict[BlockHash, bool]) -> BlockChanges:
    """The first of them, no more than a page."""
    some = list(islice(changes.items(), PAGE_BLOCKS))
    for block_hash, _ in some:
        del changes[block_hash]
    return BlockChanges(
        tier=Tier(tier),
        stored=tuple(block_hash for block_hash, there in some if there),
        removed=tuple(block_hash for block_hash, there in some if not there),
    )
