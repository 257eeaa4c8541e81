"""Blocks for the prompts that are handed over to this decode worker. Pure.

`push`: leased with the reservation. `pull`: leased when the prompt's first piece is announced, in
order, so one that is large is not passed by. `pool`: none, they are taken like those of a preempted
request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from decode_worker.reservation import Reservation
from kvpool.handoff import HandoffMode
from kvpool.hashes import BlockHash
from kvpool.tables import BlockTables


@dataclass(slots=True, kw_only=True)
class Room:
    tables: BlockTables
    mode: HandoffMode
    awaiting_blocks: deque[Reservation] = field(default_factory=deque)

    def try_reserve(self, reservation: Reservation, now_s: float) -> bool:
        """False and nothing changed when blocks have run out, or could never suffice."""
        if self.mode is not HandoffMode.PUSH:
            return reservation.prompt_tokens < self.tables.total_tokens
        hashes = reservation.names.full(reservation.prompt_tokens)
        return self._try_take(reservation, hashes, now_s)

    def want(self, reservation: Reservation) -> bool:
        """Whether it holds its blocks; if not, it waits for them from now on."""
        if reservation.holder in self.tables:
            return True
        if not any(reservation is waiting for waiting in self.awaiting_blocks):
            self.awaiting_blocks.append(reservation)
        return False

    def lacks(self, reservation: Reservation) -> bool:
        """Whether it can't go on without blocks."""
        return self.mode is not HandoffMode.POOL and reservation.holder not in self.tables

    def take(self, now_s: float) -> Iterator[Reservation]:
        """Those that get their blocks now. All their KV is on its way already, so nothing that is
        cached here is taken for it."""
        while self.awaiting_blocks and self._try_take(self.awaiting_blocks[0], (), now_s):
            yield self.awaiting_blocks.popleft()

    def _try_take(
        self, reservation: Reservation, hashes: Sequence[BlockHash], now_s: float
    ) -> bool:
        """Leases blocks for the prompt and token 0."""
        held_tokens = self.tables.try_open(
            reservation.holder,
            reservation.prompt_tokens + 1,
            hashes=hashes,
            seen_from=reservation.prompt_tokens,
            now_s=now_s,
            leased=True,
        )
        if held_tokens is None:
            return False
        reservation.held_tokens = held_tokens
        return True

    def forget(self, reservation: Reservation) -> None:
        """It waits no more."""
        kept = (waiting for waiting in self.awaiting_blocks if waiting is not reservation)
        self.awaiting_blocks = deque(kept)
