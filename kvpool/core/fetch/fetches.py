"""Prefixes that a worker fetches from elsewhere: one state machine for all sources. Pure.

    begin --> SOUGHT --> ASKED --> COPYING -------------> DONE
                 |         |         | ^ `--> CHECKING ----^
                 |         |         | `--------' |
                 `---------+---------+------------+-----> GONE

SOUGHT: this host's pool was asked which blocks it has; then the source is chosen. ASKED: the source
was asked for blocks, or will be when there is a link to it. COPYING: blocks of this worker are
being written. CHECKING: a page is copied, and the peer is asked whether it held the page until
then. A pool node is not asked: its grants have checksums and a lease.

A fetch owns its holder's blocks until it ends. It ends once: in one Restored, with the KV that is
there then, or in a `drop` that returns False. Blocks are never freed under a running copy. When its
peer is lost, the holder gets others, and those of the copy stay held until it has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from kvpool.core.blocks.holding import Holder
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.fetch.client_events import OWN_NODE
from kvpool.core.fetch.cost import Rate, RestoreCost
from kvpool.core.layout.hashes import BlockHashes
from kvpool.core.transfer.pull import PullBlocks
from kvrelay.messages import PrefixSource
from kvrelay.types import Incarnation, PrefixOrigin, RequestKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The KV of the first `tokens` tokens is in the holder's blocks. `origin`: the source of the
    last fetch, if there was one."""

    holder: Holder
    tokens: int
    origin: PrefixOrigin

    @classmethod
    def found_here(cls, holder: Holder, tokens: int) -> Restored:
        """Nothing was fetched."""
        origin = PrefixOrigin.DEVICE if tokens else PrefixOrigin.COMPUTED
        return cls(holder=holder, tokens=tokens, origin=origin)


class FetchState(Enum):
    SOUGHT = auto()
    ASKED = auto()
    COPYING = auto()
    CHECKING = auto()
    DONE = auto()
    GONE = auto()


LEFT = "left"
"""The side of holders of blocks into which a useless copy still runs."""

_NEXT = {
    FetchState.SOUGHT: {FetchState.ASKED, FetchState.GONE},
    FetchState.ASKED: {FetchState.COPYING, FetchState.GONE},
    FetchState.COPYING: {FetchState.CHECKING, FetchState.DONE, FetchState.GONE},
    FetchState.CHECKING: {FetchState.COPYING, FetchState.DONE, FetchState.GONE},
}


@dataclass(slots=True, kw_only=True, eq=False)
class Fetch:
    """Of the chain `hashes` the first `here` blocks are on this worker; `end` is the end of those
    that are fetched, and `host` of them are in the memory of this host's pool. `hint` is what a
    router says of another source. `peer` is the pool node or worker that is asked. `copies` are
    what is still to be copied of a page, which ends at `page_end`. `began_s`: when its source began
    to work. `dropped`: what is being copied is of no use."""

    number: int
    holder: Holder
    hashes: BlockHashes
    here: int
    hint: PrefixSource | None
    since_s: float
    state: FetchState = FetchState.SOUGHT
    source: FetchSource | None = None
    peer: Incarnation = OWN_NODE
    end: int = 0
    host: int = 0
    page_end: int = 0
    copies: deque[PullBlocks] = field(default_factory=deque)
    began_s: float = 0.0
    dropped: bool = False

    def enter(self, state: FetchState, now_s: float) -> None:
        assert state in _NEXT[self.state], f"{self.state} -> {state}"
        self.state, self.since_s = state, now_s

    def is_late(self, now_s: float) -> bool:
        """A running copy is waited for, however long it takes."""
        if self.source is None or self.state is FetchState.COPYING:
            return False
        return now_s - self.since_s >= self.source.patience_s


class FetchSource(Protocol):
    """A kind of place to fetch prefixes from. It may take `patience_s` for an answer.
    `whole_blocks`: it has all layer groups of a block, also those that have left a window."""

    patience_s: float
    whole_blocks: bool

    def ask(self, fetch: Fetch, now_s: float) -> bool:
        """For the blocks `[here, end)`. False: `peer` can't be asked now, or this worker has no
        blocks left for them."""

    def fetched(self, fetch: Fetch, blocks: int, now_s: float) -> PrefixOrigin:
        """Counts them, and notes the time they took."""


class HintedSource(FetchSource, Protocol):
    """A kind of source that routers name."""

    def way(self, hint: PrefixSource) -> Rate: ...

    def declined(self, blocks: int) -> None:
        """It seems to have them, but something else is faster."""


class SoughtSource(FetchSource, Protocol):
    """One that is asked first which blocks it has."""

    def seek(self, fetch: Fetch) -> bool:
        """False: it can't be asked now."""

    def choose(self, host_blocks: int, disk_blocks: int) -> int:
        """How many of these to fetch."""


@dataclass(slots=True, kw_only=True)
class PrefixFetches:
    """This host's pool is asked before any source that routers name."""

    tables: BlockTables
    cost: RestoreCost
    own_pool: SoughtSource | None = None
    remote_pools: HintedSource | None = None
    peers: HintedSource | None = None
    _numbers: int = 0
    _open: dict[int, Fetch] = field(default_factory=dict)
    _by_key: dict[RequestKey, Fetch] = field(default_factory=dict)

    def __contains__(self, holder: Holder) -> bool:
        fetch = self._by_key.get(holder.key)
        return fetch is not None and fetch.holder == holder

    def __iter__(self) -> Iterator[Fetch]:
        return iter(self._open.values())

    def begin(
        self,
        holder: Holder,
        hashes: BlockHashes,
        here: int,
        hint: PrefixSource | None,
        now_s: float,
    ) -> bool:
        """False: there is nothing to wait for."""
        if len(hashes) <= here or holder.key in self._by_key:
            return False
        self._numbers += 1
        fetch = Fetch(
            number=self._numbers, holder=holder, hashes=hashes, here=here, hint=hint, since_s=now_s
        )
        if self.own_pool is not None and self.own_pool.seek(fetch):
            fetch.source = self.own_pool
        elif not self._try_hint(fetch, 0, 0, now_s):
            return False
        self._open[fetch.number] = self._by_key[holder.key] = fetch
        return True

    def found(
        self, number: int, host_blocks: int, disk_blocks: int, now_s: float
    ) -> list[Restored]:
        """This host's pool has these blocks of the chain; the source is chosen."""
        fetch = self._open.get(number)
        if fetch is None or fetch.state is not FetchState.SOUGHT:
            return []
        assert self.own_pool is not None
        host = max(0, host_blocks - fetch.here)
        disk = max(0, host_blocks + disk_blocks - fetch.here) - host
        if self._try_hint(fetch, host, disk, now_s):
            return []
        more = self.own_pool.choose(host, disk)
        fetch.host = min(host, more)
        if more and self._try_ask(fetch, self.own_pool, OWN_NODE, fetch.here + more, now_s):
            return []
        return [self.end(fetch, 0, now_s)]

    def _try_hint(self, fetch: Fetch, host: int, disk: int, now_s: float) -> bool:
        """True if the rest is fetched from the named source: because it has more than this host's
        pool (`host` and `disk` blocks), or because it is faster."""
        hint = fetch.hint
        if hint is None:
            return False
        source = self.remote_pools if hint.is_pool_node else self.peers
        end = min(len(fetch.hashes), hint.blocks)
        more = end - fetch.here
        if source is None or more <= 0:
            return False
        way = source.way(hint)
        is_best = self.cost.prefers(way, more, host, disk)
        if is_best or self.cost.tries_again(way, more):
            return self._try_ask(fetch, source, hint.peer, end, now_s)
        source.declined(more)
        return False

    def _try_ask(
        self, fetch: Fetch, source: FetchSource, peer: Incarnation, end: int, now_s: float
    ) -> bool:
        fetch.peer, fetch.end = peer, end
        if not source.ask(fetch, now_s):
            return False
        fetch.source, fetch.began_s = source, now_s
        fetch.enter(FetchState.ASKED, now_s)
        return True

    def drop(self, holder: Holder) -> bool:
        """The request is over. True: its blocks stay held until Restored comes."""
        fetch = self._by_key.get(holder.key)
        if fetch is None or fetch.holder != holder:
            return False
        if fetch.state is FetchState.COPYING:
            fetch.dropped = True
            return True
        self._leave(fetch, FetchState.GONE, fetch.since_s)
        return False

    def end(self, fetch: Fetch, blocks: int, now_s: float) -> Restored:
        """With `blocks` behind those that were here."""
        self._leave(fetch, FetchState.DONE if blocks else FetchState.GONE, now_s)
        size, end = self.tables.layout.block_size, fetch.here + blocks
        if not blocks:
            return Restored.found_here(fetch.holder, end * size)
        assert fetch.source is not None
        origin = fetch.source.fetched(fetch, blocks, now_s)
        if fetch.source.whole_blocks:
            self.tables.fill(fetch.holder, fetch.hashes[:end])
        else:
            self.tables.trim(fetch.holder, end * size)
            self.tables.fill(fetch.holder, fetch.hashes[:end], edges_full=True)
        return Restored(holder=fetch.holder, tokens=end * size, origin=origin)

    def _leave(self, fetch: Fetch, state: FetchState, now_s: float) -> None:
        fetch.enter(state, now_s)
        del self._open[fetch.number]
        del self._by_key[fetch.holder.key]

    # --- for sources ----------------------------------------------------------------------------

    def get(self, number: int) -> Fetch:
        return self._open[number]

    def find(self, number: int, peer: Incarnation) -> Fetch | None:
        """The open fetch of this number, if it is from this peer."""
        fetch = self._open.get(number)
        return fetch if fetch is not None and fetch.peer == peer else None

    def all_from(self, peer: Incarnation) -> list[Fetch]:
        return [fetch for fetch in self if fetch.peer == peer]

    def lost(self, peer: Incarnation, now_s: float) -> list[Restored]:
        """All fetches from this peer end now; a running copy may go on for long."""
        fetches = self.all_from(peer)
        copying = [one for one in fetches if one.state is FetchState.COPYING and not one.dropped]
        left = [restored for fetch in copying for restored in self._leave_copy(fetch)]
        return left + self._give_up([one for one in fetches if not one.dropped], now_s)

    def _leave_copy(self, fetch: Fetch) -> list[Restored]:
        """Without blocks for both, the holder waits for the copy's end."""
        holder, fetch.dropped = fetch.holder, True
        left = Holder(LEFT, RequestKey(holder.key.request_id, -fetch.number))
        if not self.tables.try_replace(holder, left, fetch.here):
            return []
        fetch.holder = left
        self._by_key[left.key] = self._by_key.pop(holder.key)
        return [Restored.found_here(holder, fetch.here * self.tables.layout.block_size)]

    def waits_no_longer(self, peer: Incarnation, now_s: float) -> list[Restored]:
        """This peer does not answer. Running copies continue."""
        asked = [one for one in self.all_from(peer) if one.state is not FetchState.COPYING]
        return self._give_up(asked, now_s)

    def expire(self, now_s: float) -> list[Restored]:
        """Stops waiting for sources that take too long to answer."""
        late = [fetch for fetch in self._open.values() if fetch.is_late(now_s)]
        return self._give_up(late, now_s) if late else []

    def _give_up(self, fetches: list[Fetch], now_s: float) -> list[Restored]:
        ended: list[Restored] = []
        for fetch in fetches:
            if fetch.state is FetchState.SOUGHT:
                ended += self.found(fetch.number, 0, 0, now_s)
            else:
                ended.append(self.end(fetch, 0, now_s))
        return ended

    def validate(self) -> None:
        """A sequence that waits for a prefix holds its blocks."""
        assert len(self._open) == len(self._by_key)
        for number, fetch in self._open.items():
            assert fetch.number == number and self._by_key[fetch.holder.key] is fetch
            assert fetch.holder in self.tables
            assert fetch.state in _NEXT, "it has ended"
            assert fetch.source is not None
            assert not fetch.dropped or fetch.state is FetchState.COPYING
