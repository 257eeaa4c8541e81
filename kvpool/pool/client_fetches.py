"""A worker's fetches from its pool node: which are asked and which are being read. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpool.hashes import BlockHash
from kvpool.pool.client_events import (
    BlocksFetched,
    ClientCommand,
    FetchBlocks,
    PrefixFetched,
    SendPool,
    WantPrefix,
)
from kvpool.pool.messages import FetchDone, Fetched, FetchWanted
from kvrelay.types import RequestKey


@dataclass(slots=True)
class _Fetch:
    """`void`: what is read is of no use, because it isn't wanted or isn't held any more."""

    wanted: WantPrefix
    asked_s: float
    reading: bool = False
    void: bool = False


@dataclass(slots=True, kw_only=True)
class ClientFetches:
    """Commands go to `outbox`."""

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
        message = FetchWanted(request_no=number, hashes=wanted.hashes, skip=wanted.skip)
        self.outbox.append(SendPool(message=message))

    def fetched(self, fetched: Fetched, *, region: str) -> None:
        number = fetched.request_no
        fetch = self._open.get(number)
        if fetch is None:
            if number in self._late and fetched.places:
                self.outbox.append(SendPool(message=FetchDone(request_no=number)))
            self._late.discard(number)
            return
        if not fetched.places:
            self._end(number, 0)
            return
        fetch.reading = True
        command = FetchBlocks(
            request_no=number,
            region=region,
            places=fetched.places,
            checksums=fetched.checksums,
            targets=fetch.wanted.targets[: len(fetched.places)],
        )
        self.outbox.append(command)

    def scattered(self, done: BlocksFetched, now_s: float, *, lease_ttl_s: float | None) -> None:
        """`lease_ttl_s` None: the node that held the places is gone.

        After the lease's end a place may have been another's while it was read.
        """
        fetch = self._open[done.request_no]
        late = lease_ttl_s is None or now_s - fetch.asked_s >= lease_ttl_s
        damaged = _after(fetch.wanted, done.sound_blocks) if done.damaged and not late else ()
        self.damaged_blocks += len(damaged)
        fetch.void |= late
        if lease_ttl_s is not None:
            message = FetchDone(request_no=done.request_no, damaged=damaged)
            self.outbox.append(SendPool(message=message))
        self._end(done.request_no, done.sound_blocks)

    def drop(self, key: RequestKey) -> None:
        for number, fetch in list(self._open.items()):
            if fetch.wanted.key == key:
                fetch.void = True
                if not fetch.reading:
                    self._late.add(number)
                    self._end(number, 0)

    def lost(self) -> None:
        """What is being read comes to its own end, for nothing; all else ends now."""
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
    """The block behind the first `blocks` that were fetched."""
    return wanted.hashes[wanted.skip + blocks : wanted.skip + blocks + 1]
