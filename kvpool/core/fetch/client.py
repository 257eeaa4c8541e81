"""A worker's side of one pool node: its stores and its fetches. Pure.

Stores are write-behind: a bounded number of blocks waits, more are dropped, and serving never waits
for them. Offered blocks must keep their content until OfferSettled. OfferConfirmed follows when the
node has taken what it wants. The targets of a fetch belong to it until PrefixFetched. All three
come exactly once, also when the node is lost or was never there.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import assert_never

from kvpool.core.fetch.client_events import (
    OWN_NODE,
    BlocksFetched,
    BlocksStored,
    ClientCommand,
    ClientEvent,
    ClientTick,
    DropPrefix,
    FetchBlocks,
    FromNode,
    OfferBlocks,
    OfferConfirmed,
    OfferedBlock,
    OfferSettled,
    PoolJoined,
    PoolLost,
    PrefixFetched,
    PrefixFound,
    SeekPrefix,
    SendPool,
    StoreBlocks,
    WantPrefix,
)
from kvpool.core.layout.hashes import BlockHash
from kvpool.core.node.messages import (
    ChainBlock,
    FetchDone,
    Fetched,
    FetchWanted,
    FromPool,
    LookedUp,
    LookupWanted,
    PoolRefused,
    PoolWelcome,
    StoreAbandoned,
    StoreConfirmed,
    Stored,
    StoreGranted,
    StoreWanted,
    ToPool,
)
from kvrelay.types import Incarnation, RequestKey


@dataclass(slots=True)
class _Fetch:
    """`void`: the result of the read is useless, because it is no longer wanted or no longer
    held."""

    wanted: WantPrefix
    asked_s: float
    reading: bool = False
    void: bool = False


@dataclass(slots=True, kw_only=True)
class ClientFetches:
    """Commands go to `outbox`."""

    node: Incarnation
    outbox: list[ClientCommand]
    fetches: int = 0
    fetched_blocks: int = 0
    damaged_blocks: int = 0
    _open: dict[int, _Fetch] = field(init=False, default_factory=dict)
    _late: set[int] = field(init=False, default_factory=set)  # given up, not yet answered

    @property
    def idle(self) -> bool:
        return not self._open

    def ask(self, number: int, wanted: WantPrefix, now_s: float) -> None:
        self._open[number] = _Fetch(wanted=wanted, asked_s=now_s)
        message = FetchWanted(request_no=number, hashes=tuple(wanted.hashes), skip=wanted.skip)
        self.outbox.append(SendPool(node=self.node, message=message))

    def fetched(self, fetched: Fetched, *, region: str) -> None:
        number = fetched.request_no
        fetch = self._open.get(number)
        if fetch is None:
            if number in self._late and fetched.places:
                self.outbox.append(SendPool(node=self.node, message=FetchDone(request_no=number)))
            self._late.discard(number)
            return
        if not fetched.places:
            self._end(number, 0)
            return
        fetch.reading = True
        command = FetchBlocks(
            node=self.node,
            request_no=number,
            region=region,
            places=fetched.places,
            checksums=fetched.checksums,
            targets=fetch.wanted.targets[: len(fetched.places)],
        )
        self.outbox.append(command)

    def scattered(self, done: BlocksFetched, now_s: float, *, lease_ttl_s: float | None) -> None:
        """`lease_ttl_s` None: the node that held the places is gone.

        After the end of the lease, a place may have had other content while it was read.
        """
        fetch = self._open[done.request_no]
        late = lease_ttl_s is None or now_s - fetch.asked_s >= lease_ttl_s
        damaged = _after(fetch.wanted, done.sound_blocks) if done.damaged and not late else ()
        self.damaged_blocks += len(damaged)
        fetch.void |= late
        if lease_ttl_s is not None:
            message = FetchDone(request_no=done.request_no, damaged=damaged)
            self.outbox.append(SendPool(node=self.node, message=message))
        self._end(done.request_no, done.sound_blocks)

    def drop(self, key: RequestKey) -> None:
        for number, fetch in list(self._open.items()):
            if fetch.wanted.key == key:
                fetch.void = True
                if not fetch.reading:
                    self._late.add(number)
                    self._end(number, 0)

    def lost(self) -> None:
        """Running reads continue to their end, and their results are dropped; all other fetches end
        now."""
        self._late.clear()
        for number, fetch in list(self._open.items()):
            fetch.void = True
            if not fetch.reading:
                self._end(number, 0)

    def expire(self, asked_before_s: float) -> None:
        for number, fetch in list(self._open.items()):
            if not fetch.reading and fetch.asked_s <= asked_before_s:
                self._late.add(number)
                self._end(number, 0)

    def _end(self, number: int, blocks: int) -> None:
        fetch = self._open.pop(number)
        blocks = 0 if fetch.void else blocks
        self.fetches += 1
        self.fetched_blocks += blocks
        self.outbox.append(PrefixFetched(key=fetch.wanted.key, blocks=blocks))

    def validate(self) -> None:
        assert not self._late & self._open.keys()


def _after(wanted: WantPrefix, blocks: int) -> tuple[BlockHash, ...]:
    """The block behind the first `blocks` fetched ones."""
    return tuple(wanted.hashes[wanted.skip + blocks : wanted.skip + blocks + 1])


_Offered = tuple[int, OfferedBlock]
"""(offer, block)"""


@dataclass(slots=True)
class _Store:
    blocks: list[_Offered]
    since_s: float
    gathering: bool = False


@dataclass(slots=True, kw_only=True)
class ClientStores:
    """Commands go to `outbox`."""

    node: Incarnation
    outbox: list[ClientCommand]
    max_waiting_blocks: int
    batch_blocks: int
    max_stores: int
    stored_blocks: int = 0
    dropped_blocks: int = 0
    _waiting: deque[_Offered] = field(init=False, default_factory=deque)
    _unsettled: dict[int, int] = field(init=False, default_factory=dict)  # offer |-> blocks
    _unconfirmed: dict[int, int] = field(init=False, default_factory=dict)  # offer |-> blocks
    _open: dict[int, _Store] = field(init=False, default_factory=dict)
    _told: dict[int, _Store] = field(init=False, default_factory=dict)
    _late: set[int] = field(init=False, default_factory=set)  # given up, not yet answered

    @property
    def idle(self) -> bool:
        return not self._unsettled

    def offer(self, offer: OfferBlocks, *, connected: bool) -> None:
        """Blocks without room are dropped."""
        assert offer.offer not in self._unconfirmed, f"offer {offer.offer} is open"
        room = self.max_waiting_blocks - len(self._waiting) if connected else 0
        taken = offer.blocks[: max(0, room)]
        self.dropped_blocks += len(offer.blocks) - len(taken)
        if not taken:
            self.outbox.append(OfferSettled(offer=offer.offer))
            self.outbox.append(OfferConfirmed(offer=offer.offer))
            return
        self._unsettled[offer.offer] = self._unconfirmed[offer.offer] = len(taken)
        self._waiting.extend((offer.offer, block) for block in taken)

    @property
    def wants_more(self) -> bool:
        return bool(self._waiting) and len(self._open) < self.max_stores

    def ask(self, number: int, now_s: float) -> None:
        """Asks to store the blocks that have waited longest."""
        count = min(self.batch_blocks, len(self._waiting))
        blocks = [self._waiting.popleft() for _ in range(count)]
        self._open[number] = _Store(blocks=blocks, since_s=now_s)
        wanted = tuple(ChainBlock(block.hash, block.parent, block.tenant) for _, block in blocks)
        self._send(StoreWanted(request_no=number, blocks=wanted))

    def granted(self, granted: StoreGranted, *, region: str) -> None:
        number = granted.request_no
        store = self._open.get(number)
        if store is None:
            self._refuse(granted)
            return
        wanted = set(granted.indices)
        self._end([block for i, block in enumerate(store.blocks) if i not in wanted])
        store.blocks = [store.blocks[i] for i in granted.indices]
        if not store.blocks:
            del self._open[number]
            return
        store.gathering = True
        command = StoreBlocks(
            node=self.node,
            request_no=number,
            region=region,
            sources=tuple(block.place for _, block in store.blocks),
            places=granted.places,
        )
        self.outbox.append(command)

    def _refuse(self, granted: StoreGranted) -> None:
        if granted.request_no in self._late and granted.indices:
            self._send(StoreAbandoned(request_no=granted.request_no))
        self._late.discard(granted.request_no)

    def gathered(self, done: BlocksStored, now_s: float, *, is_there: bool) -> None:
        """`is_there`: the node that granted the places."""
        number = done.request_no
        store = self._open.pop(number)
        self._settle(store.blocks)
        if is_there and done.error is None:
            store.since_s = now_s
            self._told[number] = store
            self._send(Stored(request_no=number, checksums=done.checksums))
            return
        self._confirm(store.blocks)
        if is_there:
            self._send(StoreAbandoned(request_no=number))

    def confirmed(self, confirmed: StoreConfirmed) -> None:
        store = self._told.pop(confirmed.request_no, None)
        if store is not None:
            self.stored_blocks += len(store.blocks) * confirmed.readable
            self._confirm(store.blocks)

    def lost(self) -> None:
        """Blocks that are being gathered continue to the end; all other stores end now."""
        self._late.clear()
        self._end(self._waiting)
        self._waiting.clear()
        for number in [n for n, store in self._open.items() if not store.gathering]:
            self._end(self._open.pop(number).blocks)
        self._give_up(self._told)

    def expire(self, asked_before_s: float) -> None:
        """Ends what the node takes too long to answer."""
        for number, store in list(self._open.items()):
            if not store.gathering and store.since_s <= asked_before_s:
                self._late.add(number)
                self._end(self._open.pop(number).blocks)
        self._give_up(n for n, store in self._told.items() if store.since_s <= asked_before_s)

    def _give_up(self, told: Iterable[int]) -> None:
        for number in list(told):
            self._confirm(self._told.pop(number).blocks)

    def _send(self, message: ToPool) -> None:
        self.outbox.append(SendPool(node=self.node, message=message))

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


class PoolClient:
    """`max_waiting_blocks` bounds the blocks that offers may hold. The worker waits `patience_s`
    for an answer of the node, then continues without it."""

    def __init__(
        self,
        node: Incarnation = OWN_NODE,
        *,
        max_waiting_blocks: int = 512,
        batch_blocks: int = 64,
        max_stores: int = 2,
        patience_s: float = 5.0,
    ) -> None:
        self.node = node
        self._patience_s = patience_s
        self._welcome: PoolWelcome | None = None
        self._requests = 0
        self._commands: list[ClientCommand] = []
        self._asked: dict[int, tuple[SeekPrefix, float]] = {}
        self.fetches = ClientFetches(node=node, outbox=self._commands)
        self.stores = ClientStores(
            node=node,
            outbox=self._commands,
            max_waiting_blocks=max_waiting_blocks,
            batch_blocks=batch_blocks,
            max_stores=max_stores,
        )

    @property
    def connected(self) -> bool:
        return self._welcome is not None

    @property
    def idle(self) -> bool:
        """The pool client holds none of the worker's blocks."""
        return self.stores.idle and self.fetches.idle and not self._asked

    def handle(self, event: ClientEvent, now_s: float) -> list[ClientCommand]:
        self._settle(event, now_s)
        while self.connected and self.stores.wants_more:
            self.stores.ask(self._next_request(), now_s)
        commands = self._commands.copy()
        self._commands.clear()
        return commands

    def _settle(self, event: ClientEvent, now_s: float) -> None:
        match event:
            case PoolJoined(welcome=welcome):
                self._welcome = welcome
            case PoolLost():
                self._lost()
            case FromNode(message=message):
                if self._welcome is not None:
                    self._from_node(message, self._welcome.region)
            case OfferBlocks():
                self.stores.offer(event, connected=self.connected)
            case SeekPrefix():
                self._seek(event, now_s)
            case WantPrefix():
                self._want(event, now_s)
            case DropPrefix(key=key):
                self.fetches.drop(key)
            case BlocksStored():
                self.stores.gathered(event, now_s, is_there=self._is_at(event.region))
            case BlocksFetched():
                self.fetches.scattered(event, now_s, lease_ttl_s=self._lease_ttl_s(event.region))
            case ClientTick():
                self._expire(now_s - self._patience_s)
            case _:
                assert_never(event)

    def _from_node(self, message: FromPool, region: str) -> None:
        match message:
            case StoreGranted():
                self.stores.granted(message, region=region)
            case StoreConfirmed():
                self.stores.confirmed(message)
            case Fetched():
                self.fetches.fetched(message, region=region)
            case LookedUp(request_no=number):
                self._found(number, message.host_blocks, message.disk_blocks)
            case PoolWelcome() | PoolRefused():
                pass  # for the link
            case _:
                assert_never(message)

    def _send(self, message: ToPool) -> None:
        self._commands.append(SendPool(node=self.node, message=message))

    def _next_request(self) -> int:
        self._requests += 1
        return self._requests

    def _is_at(self, region: str) -> bool:
        return self._welcome is not None and self._welcome.region == region

    def _lease_ttl_s(self, region: str) -> float | None:
        if self._welcome is None or self._welcome.region != region:
            return None
        return self._welcome.lease_ttl_s

    def _lost(self) -> None:
        self._welcome = None
        self.stores.lost()
        self.fetches.lost()
        for number in list(self._asked):
            self._found(number, 0, 0)

    def _expire(self, asked_before_s: float) -> None:
        """Ends requests without an answer: the node may hang."""
        self.stores.expire(asked_before_s)
        self.fetches.expire(asked_before_s)
        for number, (_, asked_s) in list(self._asked.items()):
            if asked_s <= asked_before_s:
                self._found(number, 0, 0)

    def _want(self, wanted: WantPrefix, now_s: float) -> None:
        assert len(wanted.targets) == len(wanted.hashes) - wanted.skip, "a target for each block"
        if self.connected and wanted.targets:
            self.fetches.ask(self._next_request(), wanted, now_s)
        else:
            self._commands.append(PrefixFetched(key=wanted.key, blocks=0))

    # --- questions ------------------------------------------------------------------------------

    def _seek(self, question: SeekPrefix, now_s: float) -> None:
        number = self._next_request()
        self._asked[number] = question, now_s
        if self.connected:
            self._send(LookupWanted(request_no=number, hashes=tuple(question.hashes)))
        else:
            self._found(number, 0, 0)

    def _found(self, number: int, host_blocks: int, disk_blocks: int) -> None:
        if number not in self._asked:
            return
        question, _ = self._asked.pop(number)
        found = PrefixFound(key=question.key, host_blocks=host_blocks, disk_blocks=disk_blocks)
        self._commands.append(found)

    def validate(self) -> None:
        self.stores.validate()
        self.fetches.validate()
