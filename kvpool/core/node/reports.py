"""The blocks of a pool node by tier and state, with holders and ages. Pure.

Host places are free, granted (a worker writes to them), fenced, loading (from disk) or cached; disk
slots are free, writing or cached. The states of a tier add up to its size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvpool.core.layout.hashes import TenantBlocks
from kvpool.core.node.disk_tier import DiskTier
from kvpool.core.node.messages import PoolTier
from kvpool.core.node.open_requests import Fetches, Stores
from kvpool.core.node.tier_blocks import TierBlocks
from kvrelay.types import Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStates:
    """# state |-> blocks, `total` together"""

    tier: PoolTier
    total: int
    states: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldForWorker:
    """Host blocks that a worker writes (granted), may still write (fenced), reads, or wants from
    disk (loading)."""

    worker: Incarnation
    state: str
    blocks: int
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUsage:
    """Reads the parts of a HostTier; changes nothing."""

    host: TierBlocks
    disk: DiskTier
    stores: Stores
    fetches: Fetches

    def counts(self) -> dict[str, int]:
        """# state |-> host places, which add up; then blocks on disk, and blocks that wait for
        it"""
        host, fenced, loading = self.host, self.stores.fenced, len(self.disk.host_places())
        return {
            "free": host.free,
            "granted": len(host.reserved) - fenced - loading,
            "fenced": fenced,
            "loading": loading,
            "cached": host.cached,
            "disk_cached": self.disk.blocks.cached,
            "disk_waiting": self.disk.waiting,
        }

    def tiers(self) -> tuple[TierStates, ...]:
        """The disk tier only if there is one."""
        counts = self.counts()
        names = ("free", "granted", "fenced", "loading", "cached")
        host = tuple((name, counts[name]) for name in names)
        found = [TierStates(tier=PoolTier.HOST, total=self.host.count, states=host)]
        if self.disk.blocks.count:
            found.append(disk_states(self.disk.blocks))
        return tuple(found)

    def held(self, now_s: float) -> Iterator[HeldForWorker]:
        for (worker, _), store in self.stores.items():
            yield HeldForWorker(
                worker=worker,
                state="fenced" if store.fenced else "granted",
                blocks=len(store.places),
                age_s=now_s - store.since_s,
            )
        for (worker, _), fetch in self.fetches.items():
            yield HeldForWorker(
                worker=worker,
                state="loading" if fetch.loads else "read",
                blocks=fetch.blocks,
                age_s=now_s - fetch.since_s,
            )

    def orphaned(self) -> int:
        """Places and slots that are taken, and blocks that are kept, without a holder: always 0."""
        written = [*self.stores.places(), *self.disk.host_places()]
        lost = len(self.host.reserved) - len(written)
        lost += len(self.disk.blocks.reserved) - self.disk.writing
        kept = sum(run.blocks for run in self.fetches.runs())
        return lost + self.host.held - kept + self.disk.blocks.held

    def cached(self, tier: PoolTier, now_s: float) -> list[TenantBlocks]:
        """By tenant, those with the most blocks."""
        blocks = self.host if tier is PoolTier.HOST else self.disk.blocks
        return blocks.ages.cached(now_s)


def disk_states(slots: TierBlocks) -> TierStates:
    states = ("free", slots.free), ("writing", len(slots.reserved)), ("cached", slots.cached)
    return TierStates(tier=PoolTier.DISK, total=slots.count, states=states)
