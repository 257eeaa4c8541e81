"""Fetches prefixes from another worker's cache into this worker's blocks. Pure.

    begin --PullWanted--> asked --PullGranted--> reading --PullRead--> read --PullSettled-.
                            |                                                             v
                            `------ nothing there, peer lost or late --------------> Restored

Every `begin` ends in one Restored, with the KV that is there then, however the peer behaves. Until
then the sequence's blocks belong to the pull: it always waits for a running read.

On the other side, blocks that a peer reads are held unchanged. The hold ends with PullRead, with
the peer's connection, or with its lease. Late readers learn that their bytes are useless.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto

from kvpool.core.blocks.holding import Holder
from kvpool.core.blocks.leases import LeaseTable
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.fetch.cost import RestoreCost
from kvpool.core.fetch.pool_fetch import Restored
from kvpool.core.layout.hashes import BlockHashes
from kvpool.core.transfer.commands import FromPeer, PeerLost, SendPeer
from kvpool.core.transfer.messages import PeerHello
from kvpool.core.transfer.piece import piece_blocks, source_side
from kvpool.core.transfer.pool_map import KvFacts
from kvpool.core.transfer.pull import (
    BlocksPulled,
    PullBlocks,
    PullGranted,
    PullMessage,
    PullRead,
    PullSettled,
    PullWanted,
    pull_blocks_most,
    pulled_writes,
)
from kvrelay.errors import PeerError
from kvrelay.messages import PrefixSource
from kvrelay.types import Incarnation, PrefixOrigin, RequestKey

log = logging.getLogger(__name__)


PullEvent = FromPeer | PeerLost | BlocksPulled


class _State(Enum):
    ASKED = auto()
    READING = auto()
    READ = auto()


@dataclass(slots=True, kw_only=True)
class _Pull:
    """`here` are the chain's blocks that the worker has itself, `blocks` those granted."""

    holder: Holder
    source: PrefixSource
    hashes: BlockHashes
    here: int
    since_s: float
    granted_s: float = 0.0
    state: _State = _State.ASKED
    blocks: int = 0
    reads: deque[PullBlocks] = field(default_factory=deque)
    void: bool = False


@dataclass(slots=True, kw_only=True)
class Pulls:
    """`outbox` holds commands to be executed, in order. A peer may take `patience_s` for an answer.
    One read has at most `read_bytes`, so that other transfers get their turn in between."""

    tables: BlockTables
    cost: RestoreCost
    read_bytes: int
    patience_s: float = 5.0
    tokens: int = 0
    outbox: list[SendPeer | PullBlocks] = field(default_factory=list)
    _numbers: int = 0
    _open: dict[int, _Pull] = field(default_factory=dict)
    _facts: dict[Incarnation, KvFacts] = field(default_factory=dict)

    def __contains__(self, holder: Holder) -> bool:
        return any(pull.holder == holder for pull in self._open.values())

    def prefers(
        self,
        hashes: BlockHashes,
        source: PrefixSource,
        here: int,
        host_blocks: int = 0,
        disk_blocks: int = 0,
    ) -> bool:
        """Of the chain `hashes` the first `here` blocks are on this worker; the pool's tiers have
        the ones behind them."""
        more = self._most(hashes, source) - here
        if more <= 0:
            return False
        way = self.cost.peer
        is_best = self.cost.prefers(way, more, host_blocks, disk_blocks)
        return is_best or self.cost.tries_again(way, more)

    def _most(self, hashes: BlockHashes, source: PrefixSource) -> int:
        return min(len(hashes), source.blocks, pull_blocks_most(self.tables.layout))

    def begin(
        self,
        holder: Holder,
        hashes: BlockHashes,
        here: int,
        source: PrefixSource,
        now_s: float,
    ) -> None:
        """After `prefers`."""
        most = self._most(hashes, source)
        assert here < most, f"{here} of {most} blocks are here"
        self._numbers += 1
        wanted = PullWanted(pull=self._numbers, hashes=tuple(hashes[:most]), skip=here)
        self._open[wanted.pull] = _Pull(
            holder=holder, source=source, hashes=hashes[:most], here=here, since_s=now_s
        )
        send = SendPeer(peer=source.peer, addresses=source.addresses, message=wanted)
        self.outbox.append(send)

    def drop(self, holder: Holder) -> bool:
        """The request is over. True: its blocks are being written until Restored comes."""
        for number, pull in list(self._open.items()):
            if pull.holder == holder:
                if pull.state is _State.READING:
                    pull.void = True
                    return True
                del self._open[number]
        return False

    def handle(self, event: PullEvent, now_s: float) -> list[Restored]:
        match event:
            case FromPeer(peer=peer, message=PeerHello(kv=kv)):
                self._facts[peer] = kv
            case FromPeer(peer=peer, message=PullGranted() as granted):
                return self._granted(peer, granted, now_s)
            case FromPeer(message=PullSettled() as settled):
                return self._settled(settled, now_s)
            case PeerLost(peer=peer):
                return self._lost(peer)
            case BlocksPulled():
                return self._read(event, now_s)
            case FromPeer():
                pass
        return []

    def expire(self, now_s: float) -> list[Restored]:
        """Stops waiting for a peer that takes too long to answer."""
        late = [
            number
            for number, pull in self._open.items()
            if pull.state is not _State.READING and now_s - pull.since_s >= self.patience_s
        ]
        return [self._end(number, 0) for number in late]

    def _granted(self, peer: Incarnation, granted: PullGranted, now_s: float) -> list[Restored]:
        number = granted.pull
        pull = self._open.get(number)
        if pull is None or pull.state is not _State.ASKED:
            self._say(peer, PullRead(pull=number))  # too late
            return []
        if not granted.blocks:
            return [self._end(number, 0)]
        try:
            pull.reads = self._plan(pull, peer, granted, now_s)
        except PeerError as error:
            log.debug("%s is computed: %s", pull.holder, error)
            self._say(peer, PullRead(pull=number))
            return [self._end(number, 0)]
        pull.state, pull.blocks, pull.granted_s = _State.READING, granted.blocks, now_s
        self.outbox.append(pull.reads.popleft())
        return []

    def _plan(
        self, pull: _Pull, peer: Incarnation, granted: PullGranted, now_s: float
    ) -> deque[PullBlocks]:
        """Raises PeerError when it can't be done."""
        facts, layout = self._facts.get(peer), self.tables.layout
        if facts is None or not facts.region:
            raise PeerError("the link can't read the peer's blocks")
        if (facts.block_size, facts.dtype) != (layout.block_size, layout.dtype):
            raise PeerError("the peer's blocks are of another format")
        if not pull.here < granted.blocks <= len(pull.hashes):
            raise PeerError(f"{granted.blocks} blocks of {len(pull.hashes)} are granted")
        (whole,) = pulled_writes(layout, pull.here, granted.blocks)
        groups = len(layout.groups)
        source = source_side(
            whole.sections,
            granted.held,
            groups=groups,
            block_size=facts.block_size,
            blocks=facts.blocks,
        )
        tokens = granted.blocks * layout.block_size
        if not self.tables.try_grow(pull.holder, tokens, now_s=now_s):
            raise PeerError("no blocks are left for them")
        tables = self.tables.tables(pull.holder)
        return deque(
            PullBlocks(
                peer=peer, pull=granted.pull, write=write, kv=facts, source=source, tables=tables
            )
            for write in pulled_writes(layout, pull.here, granted.blocks, self.read_bytes)
        )

    def _read(self, done: BlocksPulled, now_s: float) -> list[Restored]:
        pull = self._open[done.pull]
        if not pull.void and done.error is None and pull.reads:
            self.outbox.append(pull.reads.popleft())
            return []
        self._say(pull.source.peer, PullRead(pull=done.pull))
        if pull.void or done.error is not None:
            return [self._end(done.pull, 0)]
        pull.state, pull.since_s = _State.READ, now_s
        return []

    def _settled(self, settled: PullSettled, now_s: float) -> list[Restored]:
        pull = self._open.get(settled.pull)
        if pull is None or pull.state is not _State.READ:
            return []
        if not settled.held:
            return [self._end(settled.pull, 0)]
        self.cost.pulled(pull.blocks - pull.here, now_s - pull.granted_s)
        return [self._end(settled.pull, pull.blocks)]

    def _lost(self, peer: Incarnation) -> list[Restored]:
        self._facts.pop(peer, None)
        ended = []
        for number, pull in list(self._open.items()):
            if pull.source.peer == peer and pull.state is _State.READING:
                pull.void = True
            elif pull.source.peer == peer:
                ended.append(self._end(number, 0))
        return ended

    def _end(self, number: int, blocks: int) -> Restored:
        pull, size = self._open.pop(number), self.tables.layout.block_size
        if not blocks:
            return Restored.found_here(pull.holder, pull.here * size)
        self.tokens += (blocks - pull.here) * size
        self.tables.trim(pull.holder, blocks * size)
        self.tables.fill(pull.holder, pull.hashes[:blocks], edges_full=True)
        return Restored(holder=pull.holder, tokens=blocks * size, origin=PrefixOrigin.PEER)

    def _say(self, peer: Incarnation, message: PullMessage) -> None:
        self.outbox.append(SendPeer(peer=peer, message=message))

    def take_outbox(self) -> list[SendPeer | PullBlocks]:
        taken, self.outbox = self.outbox, []
        return taken

    def validate(self) -> None:
        """A sequence that waits for a prefix holds its blocks."""
        assert all(pull.holder in self.tables for pull in self._open.values())


Reader = tuple[Incarnation, int]
"""Peer, and its number of the pull."""


@dataclass(slots=True, kw_only=True)
class PullGrants:
    tables: BlockTables
    leases: LeaseTable[Reader]

    def wanted(self, peer: Incarnation, wanted: PullWanted, now_s: float) -> PullGranted:
        """Nothing is granted unless it follows the blocks that the peer has."""
        reader = (peer, wanted.pull)
        nothing = PullGranted(pull=wanted.pull)
        if reader in self.leases:
            return nothing
        hashes = BlockHashes.of(wanted.hashes[: pull_blocks_most(self.tables.layout)])
        holder = _holder(reader)
        blocks = self.tables.keep_prefix(holder, hashes, now_s=now_s)
        if blocks <= wanted.skip:
            self.tables.release(holder)
            return nothing
        self.leases.grant(reader, now_s)
        layout = self.tables.layout
        (write,) = pulled_writes(layout, wanted.skip, blocks)
        held = piece_blocks(write.sections, self.tables.tables(holder), layout.block_size)
        return PullGranted(pull=wanted.pull, blocks=blocks, held=held)

    def read(self, peer: Incarnation, read: PullRead) -> PullSettled:
        reader = (peer, read.pull)
        held = reader in self.leases
        self.leases.end(reader)
        self.tables.release(_holder(reader))
        return PullSettled(pull=read.pull, held=held)

    def lost(self, peer: Incarnation) -> None:
        for reader in self.leases:
            if reader[0] == peer:
                self.leases.end(reader)
                self.tables.release(_holder(reader))

    def expire(self, now_s: float) -> None:
        for reader in self.leases.expire(now_s):
            self.tables.release(_holder(reader))

    def validate(self) -> None:
        held = {h.holder for h in self.tables.held() if h.holder.side == "pulled"}
        assert held == {_holder(reader) for reader in self.leases}, held


def _holder(reader: Reader) -> Holder:
    return Holder("pulled", RequestKey(*reader))
