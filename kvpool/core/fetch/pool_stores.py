"""What a worker stores in the pool node of its host. Pure.

Stores are write-behind: a bounded number of blocks waits, more are dropped, and serving never waits
for them. Offered blocks must keep their content until OfferSettled. OfferConfirmed follows when the
node has taken what it wants. Both come exactly once, also when the node is lost or was never there.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

from kvpool.core.fetch.client_events import (
    BlocksStored,
    ClientCommand,
    OfferBlocks,
    OfferConfirmed,
    OfferedBlock,
    OfferSettled,
    SendPool,
    StoreBlocks,
)
from kvpool.core.node.messages import (
    ChainBlock,
    StoreAbandoned,
    StoreConfirmed,
    Stored,
    StoreGranted,
    StoreWanted,
    ToPool,
)

_Offered = tuple[int, OfferedBlock]
"""(offer, block)"""


@dataclass(slots=True)
class _Store:
    blocks: list[_Offered]
    since_s: float
    gathering: bool = False


@dataclass(kw_only=True)
class PoolStores:
    """`max_waiting_blocks` bounds the blocks that offers may hold. The worker waits `patience_s`
    for an answer of the node, then continues without it. `region`: that of the node; None: there is
    none. `is_mute`: it does not answer. Commands go to `outbox`."""

    max_waiting_blocks: int = 512
    batch_blocks: int = 64
    max_stores: int = 2
    patience_s: float = 5.0
    outbox: list[ClientCommand] = field(init=False, default_factory=list)
    region: str | None = field(init=False, default=None)
    is_mute: bool = field(init=False, default=False)
    stored_blocks: int = field(init=False, default=0)
    dropped_blocks: int = field(init=False, default=0)
    _numbers: int = field(init=False, default=0)
    _waiting: deque[_Offered] = field(init=False, default_factory=deque)
    _unsettled: dict[int, int] = field(init=False, default_factory=dict)  # offer |-> blocks
    _unconfirmed: dict[int, int] = field(init=False, default_factory=dict)  # offer |-> blocks
    _open: dict[int, _Store] = field(init=False, default_factory=dict)
    _told: dict[int, _Store] = field(init=False, default_factory=dict)
    _late: set[int] = field(init=False, default_factory=set)  # given up, not yet answered

    @property
    def connected(self) -> bool:
        return self.region is not None

    @property
    def idle(self) -> bool:
        """It holds none of the worker's blocks."""
        return not self._unsettled

    def offer(self, offer: OfferBlocks, now_s: float) -> None:
        """Blocks without room are dropped."""
        assert offer.offer not in self._unconfirmed, f"offer {offer.offer} is open"
        takes = self.connected and not self.is_mute
        room = self.max_waiting_blocks - len(self._waiting) if takes else 0
        taken = offer.blocks[: max(0, room)]
        self.dropped_blocks += len(offer.blocks) - len(taken)
        if not taken:
            self.outbox.append(OfferSettled(offer=offer.offer))
            self.outbox.append(OfferConfirmed(offer=offer.offer))
            return
        self._unsettled[offer.offer] = self._unconfirmed[offer.offer] = len(taken)
        self._waiting.extend((offer.offer, block) for block in taken)
        self._ask(now_s)

    def _ask(self, now_s: float) -> None:
        """Asks to store the blocks that have waited longest."""
        while self.connected and self._waiting and len(self._open) < self.max_stores:
            count = min(self.batch_blocks, len(self._waiting))
            blocks = [self._waiting.popleft() for _ in range(count)]
            self._numbers += 1
            self._open[self._numbers] = _Store(blocks=blocks, since_s=now_s)
            wanted = tuple([ChainBlock(one.hash, one.parent, one.tenant) for _, one in blocks])
            self._send(StoreWanted(request_no=self._numbers, blocks=wanted))

    # --- from the node --------------------------------------------------------------------------

    def granted(self, granted: StoreGranted, now_s: float) -> None:
        number = granted.request_no
        store = self._open.get(number)
        if store is None:
            self._refuse(granted)
            return
        wanted = set(granted.indices)
        self._end([block for i, block in enumerate(store.blocks) if i not in wanted])
        store.blocks = [store.blocks[i] for i in granted.indices]
        if store.blocks:
            self._gather(store, granted)
        else:
            del self._open[number]
            self._ask(now_s)

    def _refuse(self, granted: StoreGranted) -> None:
        if granted.request_no in self._late and granted.indices:
            self._send(StoreAbandoned(request_no=granted.request_no))
        self._late.discard(granted.request_no)

    def _gather(self, store: _Store, granted: StoreGranted) -> None:
        assert self.region is not None
        store.gathering = True
        command = StoreBlocks(
            request_no=granted.request_no,
            region=self.region,
            sources=tuple(block.place for _, block in store.blocks),
            places=granted.places,
        )
        self.outbox.append(command)

    def gathered(self, done: BlocksStored, now_s: float) -> None:
        number, is_there = done.request_no, self.region == done.region
        store = self._open.pop(number)
        self._settle(store.blocks)
        if is_there and done.error is None:
            store.since_s = now_s
            self._told[number] = store
            self._send(Stored(request_no=number, checksums=done.checksums))
            if self.is_mute:
                self._give_up([number])
        else:
            self._confirm(store.blocks)
            if is_there:
                self._send(StoreAbandoned(request_no=number))
        self._ask(now_s)

    def confirmed(self, confirmed: StoreConfirmed) -> None:
        store = self._told.pop(confirmed.request_no, None)
        if store is not None:
            self.stored_blocks += len(store.blocks) * confirmed.readable
            self._confirm(store.blocks)

    def lost(self) -> None:
        """Blocks that are being gathered continue to the end; all other stores end now."""
        self.region = None
        self._end_all()
        self._late.clear()

    def is_late(self, now_s: float) -> bool:
        """The node takes too long for an answer."""
        asked_before_s = now_s - self.patience_s
        asked = [store for store in self._open.values() if not store.gathering]
        return any(store.since_s <= asked_before_s for store in (*asked, *self._told.values()))

    def fall_mute(self) -> None:
        """The node does not answer. Blocks that are being gathered continue to the end; nothing
        more is offered before `speaks`."""
        self.is_mute = True
        self._end_all()

    def speaks(self) -> None:
        self.is_mute = False

    def _end_all(self) -> None:
        """All but the blocks that are being gathered."""
        self._end(self._waiting)
        self._waiting.clear()
        for number in [n for n, store in self._open.items() if not store.gathering]:
            self._late.add(number)
            self._end(self._open.pop(number).blocks)
        self._give_up(self._told)

    def _give_up(self, told: Iterable[int]) -> None:
        for number in list(told):
            self._confirm(self._told.pop(number).blocks)

    def _send(self, message: ToPool) -> None:
        self.outbox.append(SendPool(message=message))

    def _end(self, blocks: Collection[_Offered]) -> None:
        """The node does not get these blocks."""
        self._settle(blocks)
        self._confirm(blocks)

    def _settle(self, blocks: Collection[_Offered]) -> None:
        """These blocks are no longer read."""
        for offer in _count_down(self._unsettled, blocks):
            self.outbox.append(OfferSettled(offer=offer))

    def _confirm(self, blocks: Collection[_Offered]) -> None:
        for offer in _count_down(self._unconfirmed, blocks):
            self.outbox.append(OfferConfirmed(offer=offer))

    def validate(self) -> None:
        """Every unsettled block is waiting or in exactly one store."""
        assert _per_offer(self._waiting, self._open) == self._unsettled
        assert _per_offer(self._waiting, self._open | self._told) == self._unconfirmed
        assert len(self._waiting) <= self.max_waiting_blocks
        assert not self._late & self._open.keys()
        assert not self._open.keys() & self._told.keys()


def _count_down(open_blocks: dict[int, int], blocks: Collection[_Offered]) -> Iterator[int]:
    """Takes these blocks away. Yields the offers that have none left."""
    for offer, count in Counter(offer for offer, _ in blocks).items():
        open_blocks[offer] -= count
        if not open_blocks[offer]:
            del open_blocks[offer]
            yield offer


def _per_offer(waiting: Iterable[_Offered], stores: Mapping[int, _Store]) -> dict[int, int]:
    blocks = chain(waiting, *(store.blocks for store in stores.values()))
    return dict(Counter(offer for offer, _ in blocks))
