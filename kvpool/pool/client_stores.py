"""A worker's offers to its pool node: what waits, what is asked, what is being gathered. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvpool.pool.client_events import (
    BlocksStored,
    ClientCommand,
    OfferBlocks,
    OfferedBlock,
    OfferSettled,
    SendPool,
    StoreBlocks,
)
from kvpool.pool.messages import (
    ChainBlock,
    StoreAbandoned,
    Stored,
    StoreGranted,
    StoreWanted,
)


@dataclass(slots=True)
class _Store:
    blocks: list[tuple[int, OfferedBlock]]  # (offer, block)
    asked_s: float
    gathering: bool = False


@dataclass(slots=True, kw_only=True)
class ClientStores:
    """Commands go to `outbox`."""

    outbox: list[ClientCommand]
    max_waiting_blocks: int
    batch_blocks: int
    max_stores: int
    stored_blocks: int = 0
    dropped_blocks: int = 0
    _waiting: deque[tuple[int, OfferedBlock]] = field(init=False, default_factory=deque)
    _unsettled: dict[int, int] = field(init=False, default_factory=dict)  # offer |-> blocks
    _open: dict[int, _Store] = field(init=False, default_factory=dict)
    _late: set[int] = field(init=False, default_factory=set)  # given up, not yet answered

    @property
    def idle(self) -> bool:
        return not self._unsettled

    def offer(self, offer: OfferBlocks, *, connected: bool) -> None:
        """What finds no room is dropped."""
        assert offer.offer not in self._unsettled, f"offer {offer.offer} is open"
        room = self.max_waiting_blocks - len(self._waiting) if connected else 0
        taken = offer.blocks[: max(0, room)]
        self.dropped_blocks += len(offer.blocks) - len(taken)
        if not taken:
            self.outbox.append(OfferSettled(offer=offer.offer))
            return
        self._unsettled[offer.offer] = len(taken)
        self._waiting.extend((offer.offer, block) for block in taken)

    @property
    def wants_more(self) -> bool:
        return bool(self._waiting) and len(self._open) < self.max_stores

    def ask(self, number: int, now_s: float) -> None:
        """A store of the blocks that have waited longest."""
        count = min(self.batch_blocks, len(self._waiting))
        blocks = [self._waiting.popleft() for _ in range(count)]
        self._open[number] = _Store(blocks=blocks, asked_s=now_s)
        wanted = tuple(ChainBlock(block.hash, block.parent, block.tenant) for _, block in blocks)
        self.outbox.append(SendPool(message=StoreWanted(request_no=number, blocks=wanted)))

    def granted(self, granted: StoreGranted, *, region: str) -> None:
        number = granted.request_no
        store = self._open.get(number)
        if store is None:
            self._refuse(granted)
            return
        wanted = set(granted.indices)
        self._settle(block for i, block in enumerate(store.blocks) if i not in wanted)
        store.blocks = [store.blocks[i] for i in granted.indices]
        if not store.blocks:
            del self._open[number]
            return
        store.gathering = True
        command = StoreBlocks(
            request_no=number,
            region=region,
            sources=tuple(block.place for _, block in store.blocks),
            places=granted.places,
        )
        self.outbox.append(command)

    def _refuse(self, granted: StoreGranted) -> None:
        if granted.request_no in self._late and granted.indices:
            self.outbox.append(SendPool(message=StoreAbandoned(request_no=granted.request_no)))
        self._late.discard(granted.request_no)

    def gathered(self, done: BlocksStored, *, tell: bool) -> None:
        """`tell`: the node that granted the places is still there."""
        self._settle(self._open.pop(done.request_no).blocks)
        message: Stored | StoreAbandoned = StoreAbandoned(request_no=done.request_no)
        if done.error is None:
            self.stored_blocks += len(done.checksums)
            message = Stored(request_no=done.request_no, checksums=done.checksums)
        if tell:
            self.outbox.append(SendPool(message=message))

    def lost(self) -> None:
        """What is being gathered comes to its own end; all else ends now."""
        self._late.clear()
        self._settle(self._waiting)
        self._waiting.clear()
        for number in [n for n, store in self._open.items() if not store.gathering]:
            self._settle(self._open.pop(number).blocks)

    def expire(self, asked_before_s: float) -> None:
        for number, store in list(self._open.items()):
            if not store.gathering and store.asked_s <= asked_before_s:
                self._late.add(number)
                self._settle(self._open.pop(number).blocks)

    def _settle(self, blocks: Iterable[tuple[int, OfferedBlock]]) -> None:
        """These blocks are not read (any more)."""
        for offer, _ in blocks:
            self._unsettled[offer] -= 1
            if not self._unsettled[offer]:
                del self._unsettled[offer]
                self.outbox.append(OfferSettled(offer=offer))

    def validate(self) -> None:
        """Every unsettled block is waiting or in exactly one store."""
        counts: dict[int, int] = {}
        for offer, _ in (*self._waiting, *(b for s in self._open.values() for b in s.blocks)):
            counts[offer] = counts.get(offer, 0) + 1
        assert counts == self._unsettled
        assert len(self._waiting) <= self.max_waiting_blocks
        assert not self._late & self._open.keys()
