"""The host tier's blocks with their checksums, their tenants and ages, and the updates for routers.
Pure.

Labels come with the blocks (kvpool.core.layout.hashes); blocks that an earlier process left on disk
have none.

A router first gets all blocks, page by page, then each change. It gets the next message only when
it has taken the one before. Meanwhile changes wait for it, up to a bound. A router that exceeds the
bound is dropped, and connects again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from kvpool.core.layout.hashes import BlockHash, TenantBlocks, most_of
from kvpool.core.node.events import DropRouter, RouterCall, TellRouter
from kvpool.core.node.messages import ChainBlock, PoolTier
from kvpool.core.node.tier_blocks import PoolPlace, TierBlocks
from kvrelay.messages import BlockChanges
from kvrelay.types import Incarnation, Tier

Since = dict[BlockHash, float]
"""In the order of time."""


@dataclass(slots=True)
class BlockOrigins:
    """`now_s`: the time of the current event. A block on its way between tiers is in no tier. So
    labels outlive their blocks, up to as many again plus `spare`."""

    now_s: float = 0.0
    spare: int = 4096
    _labels: dict[BlockHash, str] = field(default_factory=dict)
    # tier |-> label |-> its blocks, since when they are there
    _held: dict[PoolTier, dict[str, Since]] = field(
        default_factory=lambda: {tier: {} for tier in PoolTier}
    )

    def labelled(self, blocks: Iterable[ChainBlock]) -> None:
        """These blocks are about to come. A block without a tenant in one tier has none in the
        other."""
        self._forget_some()
        for block in blocks:
            if block.tenant and not self._is_nobodys(block.hash):
                self._labels[block.hash] = block.tenant

    def came(self, tier: PoolTier, hashes: Iterable[BlockHash]) -> None:
        for block_hash in hashes:
            of_label = self._held[tier].setdefault(self._labels.get(block_hash, ""), {})
            of_label[block_hash] = self.now_s

    def went(self, tier: PoolTier, hashes: Iterable[BlockHash]) -> None:
        for block_hash in hashes:
            label = self._labels.get(block_hash, "")
            of_label = self._held[tier].get(label, {})
            of_label.pop(block_hash, None)
            if not of_label:
                self._held[tier].pop(label, None)

    def _forget_some(self) -> None:
        tiers = [since_s for of_tier in self._held.values() for since_s in of_tier.values()]
        if len(self._labels) <= 2 * sum(map(len, tiers)) + self.spare:
            return
        held = set().union(*tiers)
        self._labels = {name: label for name, label in self._labels.items() if name in held}

    def _is_nobodys(self, block_hash: BlockHash) -> bool:
        return any(block_hash in held.get("", ()) for held in self._held.values())

    def cached(self, tier: PoolTier, now_s: float) -> list[TenantBlocks]:
        """By label, those with the most blocks."""
        return most_of(self._of(tier, now_s))

    def _of(self, tier: PoolTier, now_s: float) -> Iterator[TenantBlocks]:
        for label, since_s in self._held[tier].items():
            oldest_s, newest_s = next(iter(since_s.values())), next(reversed(since_s.values()))
            yield TenantBlocks(
                tenant=label,
                blocks=len(since_s),
                oldest_s=now_s - oldest_s,
                newest_s=now_s - newest_s,
            )

    def validate(self) -> None:
        """Every block is listed under its label."""
        for of_tier in self._held.values():
            for label, since_s in of_tier.items():
                assert since_s, f"{label!r} has no blocks"
                assert all(self._labels.get(name, "") == label for name in since_s), label


PAGE_BLOCKS = 8192
"""Blocks of one tier in one message: 256 KiB of hashes."""
MOST_WAITING = 1 << 18
"""Changes that may wait for one router: 28 MB."""


@dataclass(slots=True)
class _Listener:
    """`pages`: the blocks at the time of the call. Later changes follow the last page."""

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
        """One message for each router that is ready and lacks changes; called after an event."""
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
    """Leaves out blocks that are gone when their page comes: a waiting change reports them."""
    for at in range(0, len(hashes), PAGE_BLOCKS):
        served = tuple(filter(serves, hashes[at : at + PAGE_BLOCKS]))
        if served:
            yield BlockChanges(tier=tier, stored=served)


def _take(tier: PoolTier, changes: dict[BlockHash, bool]) -> BlockChanges:
    """Takes the first changes, at most one page."""
    some = list(islice(changes.items(), PAGE_BLOCKS))
    for block_hash, _ in some:
        del changes[block_hash]
    return BlockChanges(
        tier=Tier(tier),
        stored=tuple(block_hash for block_hash, there in some if there),
        removed=tuple(block_hash for block_hash, there in some if not there),
    )


class CheckedBlocks:
    """`checksums[block]` is the xxh3_64 that its bytes must have."""

    def __init__(self, tier: TierBlocks, changes: Changes) -> None:
        self.tier = tier
        self.checksums: dict[BlockHash, int] = {}
        self._changes = changes

    def room(self, count: int, *, below: Iterable[BlockHash | None]) -> tuple[PoolPlace, ...]:
        """Up to `count` reserved places."""
        room = self.tier.reserve(count, below=below)
        for block_hash in room.evicted:
            del self.checksums[block_hash]
        self._changes.removed(PoolTier.HOST, room.evicted)
        return room.places

    def adopt(
        self,
        parent: BlockHash | None,
        run: Sequence[tuple[BlockHash, PoolPlace]],
        checksums: Mapping[BlockHash, int],
    ) -> list[BlockHash]:
        """A chain below `parent` is readable from now on. Returns its new hashes."""
        new = self.tier.adopt(parent, run)
        self.checksums.update((block_hash, checksums[block_hash]) for block_hash in new)
        self._changes.stored(PoolTier.HOST, new)
        return new

    def spoil(self, damaged: Iterable[BlockHash]) -> None:
        gone = [block_hash for block_hash in damaged if self.tier.spoil(block_hash)]
        self._changes.removed(PoolTier.HOST, gone)

    def validate(self) -> None:
        self.tier.validate()
        assert self.checksums.keys() == set(self.tier)
