"""Opens sequences with all of their KV that can be had: cached here, or in the pool. Pure.

A sequence whose prefix is on its way from the pool holds its blocks and waits, until Restored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvpool.hashes import BlockHash
from kvpool.pool_client_events import DropPrefix, PrefixFetched, PrefixFound, SeekPrefix, WantPrefix
from kvpool.restores import Restored, Restores
from kvpool.tables import BlockTables, Holder
from kvpool.write_behind import WriteBehind

PoolQuestion = SeekPrefix | WantPrefix | DropPrefix


@dataclass(slots=True, kw_only=True)
class Openings:
    """`restores` and `write_behind` None: there is no pool. Questions for it wait in an outbox."""

    tables: BlockTables
    restores: Restores | None = None
    write_behind: WriteBehind | None = None
    _outbox: list[PoolQuestion] = field(default_factory=list)

    def try_open(
        self,
        holder: Holder,
        tokens: int,
        *,
        hashes: Sequence[BlockHash],
        ahead_tokens: int,
        now_s: float,
    ) -> int | None:
        """Like `BlockTables.try_open`; then `waits` may be true."""
        found = self.tables.try_open(
            holder, tokens, hashes=hashes, ahead_tokens=ahead_tokens, now_s=now_s
        )
        if found is not None and self.restores is not None:
            self._ask(self.restores.begin(holder, hashes, found))
        return found

    def waits(self, holder: Holder) -> bool:
        """Its prefix is being fetched: nothing of it may run, or be freed."""
        return self.restores is not None and holder in self.restores

    def drop(self, holder: Holder) -> bool:
        """The sequence is over. True: its blocks must stay until Restored."""
        if self.restores is None or holder not in self.restores:
            return False
        self._ask(self.restores.drop(holder))
        return True

    def is_stored(self, hashes: Iterable[BlockHash]) -> bool:
        """The pool has taken these, or won't."""
        return self.write_behind is None or self.write_behind.has_settled(hashes)

    def computed(self, tokens: int, seconds: float) -> None:
        """How long a prefill took, to compare fetching with."""
        if self.restores is not None:
            self.restores.cost.computed(tokens, seconds)

    def answer(self, event: PrefixFound | PrefixFetched, now_s: float) -> Restored | None:
        """What the pool said, for the scheduler that waits."""
        assert self.restores is not None
        if isinstance(event, PrefixFetched):
            return self.restores.fetched(event, now_s)
        found = self.restores.found(event, now_s)
        if isinstance(found, WantPrefix):
            self._ask(found)
            return None
        return found

    def take_outbox(self) -> list[PoolQuestion]:
        taken, self._outbox = self._outbox, []
        return taken

    def _ask(self, question: PoolQuestion | None) -> None:
        if question is not None:
            self._outbox.append(question)
