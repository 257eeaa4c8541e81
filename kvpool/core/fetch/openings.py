"""Opens sequences with all KV that is available: on this worker, in a pool, or at a peer. Pure.

A sequence whose prefix is being fetched holds its blocks and waits for Restored.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvpool.core.blocks.holding import Holder
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.fetch.client_events import (
    PoolQuestion,
    PrefixFetched,
    PrefixFound,
    WantPrefix,
)
from kvpool.core.fetch.peer_pull import PullEvent, PullGrants, Pulls
from kvpool.core.fetch.pool_fetch import RemoteFetches, Restored, Restores
from kvpool.core.fetch.write_behind import WriteBehind
from kvpool.core.layout.hashes import BlockHash, BlockHashes, FullNames
from kvpool.core.transfer.commands import SendPeer
from kvpool.core.transfer.pull import PullBlocks
from kvrelay.messages import PrefixSource
from kvrelay.types import PrefixOrigin, RequestKey

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Offer:
    """The blocks that a peer or remote pool seems to have for a sequence that asks its host's pool
    first."""

    holder: Holder
    hashes: BlockHashes
    source: PrefixSource


@dataclass(slots=True, kw_only=True)
class Openings:
    """Without a pool `restores` and `write_behind` are None. Without pools of other hosts `remote`
    is None. `pulls` and `grants` are None if peers neither give nor get prefixes. Lookups for the
    pools wait in an outbox. `origins` counts where prefixes came from."""

    tables: BlockTables
    restores: Restores | None = None
    write_behind: WriteBehind | None = None
    remote: RemoteFetches | None = None
    pulls: Pulls | None = None
    grants: PullGrants | None = None
    origins: dict[PrefixOrigin, int] = field(default_factory=lambda: dict.fromkeys(PrefixOrigin, 0))
    _offers: dict[RequestKey, _Offer] = field(default_factory=dict)
    _outbox: list[PoolQuestion] = field(default_factory=list)

    def try_open(
        self,
        holder: Holder,
        tokens: int,
        *,
        hashes: FullNames,
        ahead_tokens: int,
        now_s: float,
        source: PrefixSource | None = None,
    ) -> int | None:
        """Like `BlockTables.try_open`; afterwards `waits` may be true. `source` may have more
        blocks."""
        found = self.tables.try_open(
            holder, tokens, hashes=hashes, ahead_tokens=ahead_tokens, now_s=now_s
        )
        if found is None:
            return None
        is_alone = self.restores is None and source is None
        if is_alone or not self._seek(holder, hashes.hashes(), found, source, now_s):
            self._opened(Restored.found_here(holder, found))
        return found

    def _seek(
        self,
        holder: Holder,
        hashes: BlockHashes,
        found: int,
        source: PrefixSource | None,
        now_s: float,
    ) -> bool:
        """True if there is something to wait for. The pool is asked first."""
        asked = self.restores.begin(holder, hashes, found) if self.restores is not None else None
        self._ask(asked)
        if source is None:
            return asked is not None
        offer = _Offer(holder, hashes, source)
        if asked is not None:
            self._offers[holder.key] = offer
            return True
        return self._try_source(offer, found // self.tables.layout.block_size, now_s)

    def _try_source(
        self, offer: _Offer, here: int, now_s: float, host: int = 0, disk: int = 0
    ) -> bool:
        """True if the rest is fetched from the source: because it has more than the host's pool
        (`host` and `disk` blocks), or because it is faster."""
        source = offer.source
        way = self.remote if source.is_pool_node else self.pulls
        if way is None or not way.prefers(offer.hashes, source, here, host, disk):
            return False
        if isinstance(way, Pulls):
            way.begin(offer.holder, offer.hashes, here, source, now_s)
            return True
        asked = way.try_begin(offer.holder, offer.hashes, here, source, now_s)
        self._ask(asked)
        return asked is not None

    def waits(self, holder: Holder) -> bool:
        """Its prefix is being fetched: none of it may run or be freed."""
        ways = (self.restores, self.remote, self.pulls)
        return any(way is not None and holder in way for way in ways)

    def drop(self, holder: Holder) -> bool:
        """The sequence is over. True: its blocks must stay until Restored."""
        self._offers.pop(holder.key, None)
        if self.pulls is not None and holder in self.pulls:
            return self.pulls.drop(holder)
        if self.remote is not None and holder in self.remote:
            self._ask(self.remote.drop(holder))
            return True
        if self.restores is None or holder not in self.restores:
            return False
        self._ask(self.restores.drop(holder))
        return True

    def is_stored(self, hashes: Iterable[BlockHash]) -> bool:
        """The pool has taken these blocks, or won't take them."""
        return self.write_behind is None or self.write_behind.has_settled(hashes)

    def computed(self, tokens: int, seconds: float) -> None:
        """The time of a prefill, to compare fetching with."""
        waiting = self.restores or self.pulls
        if waiting is not None:
            waiting.cost.computed(tokens, seconds)

    @property
    def declined_tokens(self) -> int:
        """Tokens that were in a pool, but were faster computed or fetched elsewhere."""
        restored = self.restores.declined_tokens if self.restores is not None else 0
        return restored + (self.remote.declined_tokens if self.remote is not None else 0)

    def answer(self, event: PrefixFound | PrefixFetched, now_s: float) -> Restored | None:
        """Handles the pool's answer for the scheduler that waits."""
        assert self.restores is not None
        if isinstance(event, PrefixFetched):
            remote = self.remote.fetched(event, now_s) if self.remote is not None else None
            return self._opened(remote or self.restores.fetched(event, now_s))
        if self._found_elsewhere(event, now_s):
            return None
        found = self.restores.found(event, now_s)
        if isinstance(found, WantPrefix):
            self._ask(found)
            return None
        return self._opened(found)

    def _found_elsewhere(self, event: PrefixFound, now_s: float) -> bool:
        """The blocks of the host's pool are not fetched."""
        offer = self._offers.pop(event.key, None)
        if offer is None or self.restores is None:
            return False
        here = self.restores.here(event.key)
        host = max(0, event.host_blocks - here)
        disk = max(0, event.host_blocks + event.disk_blocks - here) - host
        if not self._try_source(offer, here, now_s, host, disk):
            return False
        self.restores.leave(event.key)
        return True

    def pulled(self, event: PullEvent, now_s: float) -> list[Restored]:
        """Handles a peer's message about a pull, for the schedulers that wait."""
        if self.pulls is None:
            return []
        return [*filter(self._opened, self.pulls.handle(event, now_s))]

    def expire(self, now_s: float) -> list[Restored]:
        return [] if self.pulls is None else [*filter(self._opened, self.pulls.expire(now_s))]

    def _opened(self, restored: Restored | None) -> Restored | None:
        """All KV that could be fetched is now in the holder's blocks."""
        if restored is not None:
            self.origins[restored.origin] += 1
            log.debug("%s: %d tokens, %s", restored.holder, restored.tokens, restored.origin)
        return restored

    def take_outbox(self) -> list[PoolQuestion]:
        taken, self._outbox = self._outbox, []
        return taken

    def take_pulls(self) -> list[SendPeer | PullBlocks]:
        """The pulls to execute, in order."""
        return [] if self.pulls is None else self.pulls.take_outbox()

    def _ask(self, question: PoolQuestion | None) -> None:
        if question is not None:
            self._outbox.append(question)
