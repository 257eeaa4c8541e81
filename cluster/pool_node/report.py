"""A pool node's report to routers: its blocks by tier and state, with holders and ages."""

from __future__ import annotations

from kvpool.core.node.host_tier import HostTier
from kvpool.core.node.messages import PoolFormat
from kvpool.core.node.reports import HeldForWorker, TierStates, disk_states
from kvpool.core.node.tier_blocks import TierBlocks
from kvpool.wire.pool import cached_blocks
from kvrelay.gc_pauses import PAUSES
from kvrelay.types import Incarnation
from kvrelay.v1 import pool_node_pb2 as pb


def pool_report(
    name: str,
    incarnation: Incarnation,
    format_: PoolFormat | None,
    core: HostTier | None,
    on_disk: TierBlocks | None,
    now_s: float,
) -> pb.PoolReport:
    """Before the first worker comes there is no `core`; then only the blocks `on_disk` are
    reported."""
    report = pb.PoolReport(
        name=name,
        incarnation=incarnation,
        gc_pauses=PAUSES.count,
        gc_pause_s=PAUSES.total_s,
        gc_longest_pause_s=PAUSES.longest_s,
    )
    if format_ is not None:
        report.format, report.block_bytes = str(format_), format_.block_bytes
    if core is not None:
        for tier in core.books.tiers():
            report.tiers.append(_tier(tier))
            cached = core.books.cached(tier.tier, now_s)
            report.tiers[-1].cached.extend(map(cached_blocks, cached))
        report.disk_waiting = core.books.counts()["disk_waiting"]
        report.orphaned_blocks = core.books.orphaned()
        report.held.extend(map(_held, core.books.held(now_s)))
    elif on_disk is not None:
        report.tiers.append(_tier(disk_states(on_disk)))
    return report


def _tier(tier: TierStates) -> pb.TierBlocks:
    states = (pb.StateBlocks(state=state, blocks=blocks) for state, blocks in tier.states)
    return pb.TierBlocks(tier=tier.tier, total_blocks=tier.total, states=states)


def _held(held: HeldForWorker) -> pb.HeldForWorker:
    return pb.HeldForWorker(
        worker=held.worker, state=held.state, blocks=held.blocks, age_s=held.age_s
    )
