"""Cached blocks that peers are reading just now: held as they are until they have. Pure.

A hold ends with PullRead, with the peer's connection, or with its lease: late readers are told that
what they read is of no use.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.holder import Holder
from kvpool.leases import LeaseTable
from kvpool.piece import piece_blocks
from kvpool.pull import (
    PullGranted,
    PullRead,
    PullSettled,
    PullWanted,
    pull_blocks_most,
    pulled_writes,
)
from kvpool.tables import BlockTables
from kvrelay.types import Incarnation, RequestKey

Reader = tuple[Incarnation, int]
"""peer, its number of the pull"""


@dataclass(slots=True, kw_only=True)
class PullGrants:
    tables: BlockTables
    leases: LeaseTable[Reader]

    def wanted(self, peer: Incarnation, wanted: PullWanted, now_s: float) -> PullGranted:
        """Nothing is granted that isn't behind what the peer has."""
        reader = (peer, wanted.pull)
        nothing = PullGranted(pull=wanted.pull)
        if reader in self.leases:
            return nothing
        hashes = wanted.hashes[: pull_blocks_most(self.tables.layout)]
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
