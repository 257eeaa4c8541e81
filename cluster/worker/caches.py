"""What a worker does to have a prompt's KV without computing it, as its settings want it."""

from __future__ import annotations

from cluster.settings import WorkerSettings
from kvpool.block_news import BlockNews
from kvpool.far_fetches import FarFetches
from kvpool.leases import LeaseTable
from kvpool.openings import Openings
from kvpool.pull_grants import PullGrants
from kvpool.pulls import Pulls
from kvpool.staging import Staging
from kvpool.tables import BlockTables
from kvpool.tiers.restore_cost import RestoreCost
from kvpool.tiers.restores import Restores
from kvpool.tiers.write_behind import WriteBehind
from kvrelay.types import Incarnation


def open_caches(settings: WorkerSettings, tables: BlockTables, staging: Staging) -> Openings:
    """Without prefix caching nothing is shared with other workers."""
    openings = Openings(tables=tables)
    cost = RestoreCost(tables.layout.block_size)
    if settings.pool_address is not None:
        tables.cache.reports = True
        openings.restores = Restores(tables=tables, cost=cost)
        openings.write_behind = WriteBehind(tables)
        openings.far = FarFetches(tables=tables, cost=cost)
    if settings.prefix_caching:
        tables.cache.changes = BlockNews()
        openings.pulls = Pulls(tables=tables, cost=cost, read_bytes=staging.payload_bytes)
        leases = LeaseTable[tuple[Incarnation, int]](settings.lease_ttl_s)
        openings.grants = PullGrants(tables=tables, leases=leases)
    return openings
