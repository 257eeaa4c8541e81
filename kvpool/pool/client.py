"""A worker's side of its host's pool node: what it stores there and fetches from there. Pure.

Storing is write-behind: at most so much waits, more is dropped, and nothing of serving ever waits
for it. Offered blocks must keep their content until OfferSettled, the targets of a fetch belong to
it until PrefixFetched; both come exactly once, also when the node is lost or was never there.
"""

from __future__ import annotations

from typing import assert_never

from kvpool.pool.client_events import (
    BlocksFetched,
    BlocksStored,
    ClientCommand,
    ClientEvent,
    ClientTick,
    DropPrefix,
    FromNode,
    OfferBlocks,
    PoolJoined,
    PoolLost,
    PrefixFetched,
    PrefixFound,
    SeekPrefix,
    SendPool,
    WantPrefix,
)
from kvpool.pool.client_fetches import ClientFetches
from kvpool.pool.client_stores import ClientStores
from kvpool.pool.messages import (
    Fetched,
    FromPool,
    LookedUp,
    LookupWanted,
    PoolRefused,
    PoolWelcome,
    StoreGranted,
    ToPool,
)


class PoolClient:
    """`max_waiting_blocks` bounds what offers may hold; `patience_s` is how long the node may take
    to answer, before the worker goes on without it."""

    def __init__(
        self,
        *,
        max_waiting_blocks: int = 512,
        batch_blocks: int = 64,
        max_stores: int = 2,
        patience_s: float = 5.0,
    ) -> None:
        self._patience_s = patience_s
        self._welcome: PoolWelcome | None = None
        self._requests = 0
        self._commands: list[ClientCommand] = []
        self._asked: dict[int, tuple[SeekPrefix, float]] = {}
        self.fetches = ClientFetches(outbox=self._commands)
        self.stores = ClientStores(
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
        """Nothing of the worker's is held for the pool."""
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
                self.stores.gathered(event, tell=self._is_at(event.region))
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
            case Fetched():
                self.fetches.fetched(message, region=region)
            case LookedUp(request_no=number):
                self._found(number, message.host_blocks, message.disk_blocks)
            case PoolWelcome() | PoolRefused():
                pass  # for the link
            case _:
                assert_never(message)

    def _send(self, message: ToPool) -> None:
        self._commands.append(SendPool(message=message))

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
        """The node may be hung."""
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
            self._send(LookupWanted(request_no=number, hashes=question.hashes))
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
