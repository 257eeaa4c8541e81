"""Fetches prefixes from another worker's cache into this worker's blocks, and lets peers do the
same. Pure.

A pull is read page by page (kvpool/core/transfer/pull.py). It is used only if the peer has held all
of it until the last page was read.

On the other side, blocks that a peer reads are held unchanged. The hold ends with the peer's last
PullRead, with its connection, or with its lease. Late readers learn that their bytes are useless.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field

from kvpool.core.blocks.holding import Holder
from kvpool.core.blocks.leases import LeaseTable
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.fetch.cost import Rate, RestoreCost
from kvpool.core.fetch.fetches import Fetch, FetchState, PrefixFetches, Restored
from kvpool.core.layout.hashes import BlockHashes
from kvpool.core.transfer.commands import FromPeer, PeerLost, SendPeer
from kvpool.core.transfer.messages import PeerHello
from kvpool.core.transfer.piece import piece_blocks, source_side
from kvpool.core.transfer.pool_map import KvFacts
from kvpool.core.transfer.pull import (
    HASHES_MOST,
    BlocksPulled,
    PullBlocks,
    PullGranted,
    PullRead,
    PullSettled,
    PullWanted,
    page_blocks_most,
    pulled_writes,
)
from kvrelay.errors import PeerError
from kvrelay.messages import PrefixSource
from kvrelay.types import Incarnation, PrefixOrigin, RequestKey

log = logging.getLogger(__name__)

PullEvent = FromPeer | PeerLost | BlocksPulled


@dataclass(slots=True, kw_only=True)
class PeerSource:
    """`outbox` holds commands to be executed, in order. A peer may take `patience_s` for an answer.
    One read has at most `read_bytes`, so that other transfers get their turn in between. A message
    has at most `page_names` hashes."""

    tables: BlockTables
    cost: RestoreCost
    read_bytes: int
    patience_s: float = 5.0
    page_names: int = HASHES_MOST
    tokens: int = 0
    whole_blocks: bool = False
    outbox: list[SendPeer | PullBlocks] = field(default_factory=list)
    _facts: dict[Incarnation, KvFacts] = field(default_factory=dict)

    def way(self, hint: PrefixSource) -> Rate:
        return self.cost.peer

    def declined(self, blocks: int) -> None:
        """Not counted: no pool had these blocks."""

    def ask(self, fetch: Fetch, now_s: float) -> bool:
        """Its blocks are taken when the peer has granted some."""
        assert fetch.hint is not None
        addresses = fetch.hint.addresses
        for start in range(0, fetch.end, self.page_names):
            end = min(fetch.end, start + self.page_names)
            wanted = PullWanted(
                pull=fetch.number,
                hashes=tuple(fetch.hashes[start:end]),
                skip=fetch.here,
                more=end < fetch.end,
            )
            self.outbox.append(SendPeer(peer=fetch.peer, addresses=addresses, message=wanted))
            addresses = ()
        fetch.page_end = fetch.here
        return True

    def fetched(self, fetch: Fetch, blocks: int, now_s: float) -> PrefixOrigin:
        self.cost.pulled(blocks, now_s - fetch.began_s)
        self.tokens += blocks * self.tables.layout.block_size
        return PrefixOrigin.PEER

    # --- events ---------------------------------------------------------------------------------

    def handle(self, event: PullEvent, fetches: PrefixFetches, now_s: float) -> list[Restored]:
        """Ends the fetches that are over with it."""
        match event:
            case FromPeer(peer=peer, message=PeerHello(kv=kv)):
                self._facts[peer] = kv
            case FromPeer(peer=peer, message=PullGranted() as granted):
                return self._granted(peer, granted, fetches, now_s)
            case FromPeer(peer=peer, message=PullSettled() as settled):
                return self._settled(peer, settled, fetches, now_s)
            case BlocksPulled():
                return self._copied(event, fetches, now_s)
            case PeerLost(peer=peer):
                self._facts.pop(peer, None)
                return fetches.lost(peer, now_s)
            case FromPeer():
                pass
        return []

    def _granted(
        self, peer: Incarnation, granted: PullGranted, fetches: PrefixFetches, now_s: float
    ) -> list[Restored]:
        fetch = fetches.find(granted.pull, peer)
        if fetch is None or fetch.state is FetchState.COPYING:
            self._tell_read(peer, granted.pull, over=True)  # too late
            return []
        if not granted.blocks:
            return [fetches.end(fetch, 0, now_s)]
        try:
            fetch.copies = self._plan(fetch, peer, granted, now_s)
        except PeerError as error:
            log.debug("%s is computed: %s", fetch.holder, error)
            self._tell_read(peer, granted.pull, over=True)
            return [fetches.end(fetch, 0, now_s)]
        if fetch.state is FetchState.ASKED:
            fetch.began_s = now_s
        fetch.end, fetch.page_end = granted.blocks, granted.end
        fetch.enter(FetchState.COPYING, now_s)
        return self._copy_on(fetch, now_s)

    def _plan(
        self, fetch: Fetch, peer: Incarnation, granted: PullGranted, now_s: float
    ) -> deque[PullBlocks]:
        """The reads of a page. Raises PeerError when it can't be read."""
        facts, layout = self._facts.get(peer), self.tables.layout
        if facts is None or not facts.region:
            raise PeerError("the link can't read the peer's blocks")
        if (facts.block_size, facts.dtype) != (layout.block_size, layout.dtype):
            raise PeerError("the peer's blocks are of another format")
        self._check_page(fetch, granted)
        page, blocks = range(fetch.page_end, granted.end), granted.blocks
        whole = pulled_writes(layout, page, blocks)
        source = source_side(
            [section for write in whole for section in write.sections],
            granted.held,
            groups=len(layout.groups),
            block_size=facts.block_size,
            blocks=facts.blocks,
        )
        if not self.tables.try_grow(fetch.holder, blocks * layout.block_size, now_s=now_s):
            raise PeerError("no blocks are left for them")
        tables = self.tables.tables(fetch.holder)
        return deque(
            PullBlocks(
                peer=peer, pull=granted.pull, write=write, kv=facts, source=source, tables=tables
            )
            for write in pulled_writes(layout, page, blocks, self.read_bytes)
        )

    @staticmethod
    def _check_page(fetch: Fetch, granted: PullGranted) -> None:
        is_first = fetch.state is FetchState.ASKED
        if not fetch.here < granted.blocks <= fetch.end:
            raise PeerError(f"{granted.blocks} blocks of {fetch.end} are granted")
        if not is_first and granted.blocks != fetch.end:
            raise PeerError(f"{granted.blocks} blocks are granted, after {fetch.end}")
        if not fetch.page_end < granted.end <= granted.blocks:
            raise PeerError(f"a page ends at {granted.end}, after {fetch.page_end}")

    def _copied(self, done: BlocksPulled, fetches: PrefixFetches, now_s: float) -> list[Restored]:
        fetch = fetches.get(done.pull)
        if fetch.dropped or done.error is not None:
            self._tell_read(fetch.peer, done.pull, over=True)
            return [fetches.end(fetch, 0, now_s)]
        return self._copy_on(fetch, now_s)

    def _copy_on(self, fetch: Fetch, now_s: float) -> list[Restored]:
        """The page's next read, or the question whether the page was held."""
        if fetch.copies:
            self.outbox.append(fetch.copies.popleft())
            return []
        self._tell_read(fetch.peer, fetch.number, over=fetch.page_end == fetch.end)
        fetch.enter(FetchState.CHECKING, now_s)
        return []

    def _settled(
        self, peer: Incarnation, settled: PullSettled, fetches: PrefixFetches, now_s: float
    ) -> list[Restored]:
        fetch = fetches.find(settled.pull, peer)
        if fetch is None or fetch.state is not FetchState.CHECKING:
            return []
        is_whole = settled.held and fetch.page_end == fetch.end
        return [fetches.end(fetch, fetch.end - fetch.here if is_whole else 0, now_s)]

    def _tell_read(self, peer: Incarnation, number: int, *, over: bool) -> None:
        self.outbox.append(SendPeer(peer=peer, message=PullRead(pull=number, over=over)))

    def take_outbox(self) -> list[SendPeer | PullBlocks]:
        taken, self.outbox = self.outbox, []
        return taken


_NAMES_MOST = 2**20
"""Blocks of the longest chain that a peer may ask for."""

Reader = tuple[Incarnation, int]
"""Peer, and its number of the pull."""


@dataclass(slots=True)
class _Grant:
    """The chain's first `blocks` are held; the peer knows the places up to `end`."""

    blocks: int
    end: int


@dataclass(slots=True, kw_only=True)
class PullGrants:
    """A page has at most `page_blocks`, and no more than fit into a message."""

    tables: BlockTables
    leases: LeaseTable[Reader]
    page_blocks: int = _NAMES_MOST
    _named: dict[Reader, bytearray] = field(default_factory=dict)  # until the last names are here
    _grants: dict[Reader, _Grant] = field(default_factory=dict)

    def wanted(self, peer: Incarnation, wanted: PullWanted, now_s: float) -> PullGranted | None:
        """None: more names follow. Nothing is granted unless it follows the blocks that the peer
        has."""
        reader = (peer, wanted.pull)
        names = self._named.pop(reader, bytearray())
        names += b"".join(wanted.hashes)
        if wanted.more and len(names) < _NAMES_MOST * 32:
            self._named[reader] = names
            return None
        if reader in self.leases or not self._try_hold(reader, names, wanted.skip, now_s):
            return PullGranted(pull=wanted.pull)
        self.leases.grant(reader, now_s)
        return self._next_page(reader)

    def _try_hold(self, reader: Reader, names: bytearray, skip: int, now_s: float) -> bool:
        holder = _holder(reader)
        blocks = self.tables.keep_prefix(holder, BlockHashes(bytes(names)), now_s=now_s)
        if blocks <= skip:
            self.tables.release(holder)
            return False
        self._grants[reader] = _Grant(blocks=blocks, end=skip)
        return True

    def _next_page(self, reader: Reader) -> PullGranted:
        grant, layout = self._grants[reader], self.tables.layout
        most = min(self.page_blocks, page_blocks_most(layout))
        page = range(grant.end, min(grant.blocks, grant.end + most))
        grant.end = page.stop
        sections = [
            section
            for write in pulled_writes(layout, page, grant.blocks)
            for section in write.sections
        ]
        held = piece_blocks(sections, self.tables.tables(_holder(reader)), layout.block_size)
        return PullGranted(pull=reader[1], blocks=grant.blocks, end=grant.end, held=held)

    def read(self, peer: Incarnation, read: PullRead, now_s: float) -> PullSettled | PullGranted:
        reader = (peer, read.pull)
        held = self.leases.renew(reader, now_s)
        if held and not read.over and self._grants[reader].end < self._grants[reader].blocks:
            return self._next_page(reader)
        self.leases.end(reader)
        self._release(reader)
        return PullSettled(pull=read.pull, held=held)

    def lost(self, peer: Incarnation) -> None:
        for reader in [reader for reader in self._named if reader[0] == peer]:
            del self._named[reader]
        for reader in self.leases:
            if reader[0] == peer:
                self.leases.end(reader)
                self._release(reader)

    def expire(self, now_s: float) -> None:
        for reader in self.leases.expire(now_s):
            self._release(reader)

    def _release(self, reader: Reader) -> None:
        self._grants.pop(reader, None)
        self.tables.release(_holder(reader))

    def validate(self) -> None:
        held = {h.holder for h in self.tables.held() if h.holder.side == "pulled"}
        assert held == {_holder(reader) for reader in self.leases}, held
        assert self._grants.keys() == {*self.leases}


def _holder(reader: Reader) -> Holder:
    return Holder("pulled", RequestKey(*reader))
