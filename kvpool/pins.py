"""Prefixes that are never evicted from a worker's device tier. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.hashes import BlockHash
from kvpool.holder import Holder
from kvpool.tables import BlockTables
from kvrelay.types import RequestKey, RequestSpec

_SIDE = "pinned"


@dataclass(frozen=True, slots=True)
class Pins:
    """A sequence of `longest_tokens` always finds room beside them."""

    tables: BlockTables
    longest_tokens: int

    def __contains__(self, spec: RequestSpec) -> bool:
        return self._holder(self._hashes(spec)) in self.tables

    def try_pin(self, spec: RequestSpec, now_s: float) -> bool:
        """Hold the full blocks of its prompt for good; False unless all of them are cached and
        the longest sequence still fits."""
        hashes = self._hashes(spec)
        holder = self._holder(hashes)
        tokens = len(hashes) * self.tables.layout.block_size
        if holder in self.tables:
            return True
        found = self.tables.try_open(holder, tokens, hashes=hashes, now_s=now_s)
        if found == tokens and self._leave_room():
            return True
        self.tables.release(holder)
        return False

    def _leave_room(self) -> bool:
        pinned = [held.tables for held in self.tables.held() if held.holder.side == _SIDE]
        layout = self.tables.layout
        most = max(
            len({block for tables in pinned for block in tables[group]})
            for group in range(len(layout.groups))
        )
        return self.tables.blocks - most >= layout.blocks_for(self.longest_tokens)

    def _hashes(self, spec: RequestSpec) -> tuple[BlockHash, ...]:
        names = self.tables.chain(spec.tenant, len(spec.prompt_ids))
        names.extend(spec.prompt_ids, len(spec.prompt_ids))
        return tuple(names.full(len(spec.prompt_ids)))

    @staticmethod
    def _holder(hashes: tuple[BlockHash, ...]) -> Holder:
        return Holder(_SIDE, RequestKey(hashes[-1].hex()[:16] if hashes else "empty", 0))
