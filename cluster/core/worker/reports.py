"""Which blocks a worker holds, as each router's directory hears it.

A router that attaches hears first of everything that there is, then of every change, in order.

A worker's state in numbers, as routers are told with every batch of events.

The line that a worker logs of its activity, and when it stays silent. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from decode_worker.scheduler import DecodeScheduler
from engine.core.correction import StepPace
from kvpool.core.blocks.device_blocks import DeviceBlocks
from kvpool.core.blocks.news import RunNews
from kvpool.core.blocks.pool import BlockState
from kvpool.core.fetch.prefix_lookup import PrefixLookup
from kvrelay.counters import Activity, Counters, LinkState, TierLoad, activity, speed_text
from kvrelay.gc_pauses import PAUSES, GcPauses
from kvrelay.messages import BlockChanges
from kvrelay.types import PrefixOrigin, Tier
from prefill_worker.scheduler import PrefillScheduler

HASHES_MOST = 8192
"""Of one message: 256 KiB."""


class BlockReports:
    """`device.changes` belongs to it; without them nothing is told."""

    def __init__(self, device: DeviceBlocks) -> None:
        self._device = device
        self._since_s: dict[int, tuple[float, float]] = {}
        """# strand |-> when its first and its latest blocks were told"""

    def everything(self) -> list[BlockChanges]:
        """For a router that attaches, after `take`."""
        if self._device.changes is None:
            return []
        tree = self._device.tree
        return [*_pages(RunNews(tree, untold=tree.strands()))]

    def take(self, now_s: float) -> list[BlockChanges]:
        """What is new since the last call."""
        if not self._device.changes:
            return []
        found = [*_pages(self._device.changes)]
        for changes in found:
            self._date(changes, now_s)
        return found

    def _date(self, changes: BlockChanges, now_s: float) -> None:
        for stored in changes.stored:
            first_s, _ = self._since_s.get(stored.number, (now_s, now_s))
            self._since_s[stored.number] = first_s, now_s
        for cut in changes.cut:
            if self._device.tree.strand(cut.number) is None:
                self._since_s.pop(cut.number, None)

    def ages_s(self, strand: int, now_s: float) -> tuple[float, float]:
        """Since its first and since its latest blocks were named; 0 for what is newer than the last
        `take`."""
        first_s, latest_s = self._since_s.get(strand, (now_s, now_s))
        return now_s - first_s, now_s - latest_s


def _pages(news: RunNews) -> Iterator[BlockChanges]:
    while news:
        cut, stored = news.take(HASHES_MOST)
        if cut or stored:
            yield BlockChanges(tier=Tier.DEVICE, cut=cut, stored=stored)


@dataclass(slots=True)
class Totals:
    """What the loop itself counts; `orphaned_blocks` as of the last tick."""

    steps: int = 0
    busy_s: float = 0.0
    orphaned_blocks: int = 0
    pauses: GcPauses = field(default_factory=lambda: PAUSES)


def count(
    lookup: PrefixLookup,
    prefill: PrefillScheduler,
    decode: DecodeScheduler,
    totals: Totals,
    pace: StepPace,
    links: tuple[LinkState, ...],
    draining: bool,
    routers: int,
) -> Counters:
    """Where both schedulers count, the sum: decode workers compute prompts too."""
    origins = lookup.origins
    tables, pool, reservations = lookup.tables, lookup.pool, decode.reservations
    blocks, running_set = tables.counts(), decode.batch.running_set
    queue, handoffs = prefill.queue, prefill.handoffs
    return Counters(
        free_blocks=blocks[BlockState.FREE],
        leased_blocks=blocks[BlockState.LEASED],
        active_blocks=blocks[BlockState.ACTIVE],
        cached_blocks=blocks[BlockState.CACHED],
        orphaned_blocks=totals.orphaned_blocks,
        prefix_queried_tokens=tables.queried_tokens,
        prefix_hit_tokens=tables.hit_tokens,
        pool_queried_tokens=pool.own.sought_tokens if pool else 0,
        pool_host_tokens=pool.own.host_tokens if pool else 0,
        pool_disk_tokens=pool.own.disk_tokens if pool else 0,
        pool_declined_tokens=pool.declined_tokens if pool else 0,
        pool_remote_tokens=pool.remote.tokens if pool else 0,
        peer_tokens=lookup.peers.tokens if lookup.peers else 0,
        prefixes_device=origins[PrefixOrigin.DEVICE],
        prefixes_host=origins[PrefixOrigin.HOST],
        prefixes_disk=origins[PrefixOrigin.DISK],
        prefixes_peer=origins[PrefixOrigin.PEER],
        prefixes_remote=origins[PrefixOrigin.REMOTE],
        prefixes_computed=origins[PrefixOrigin.COMPUTED],
        running=running_set.choices + reservations.choices + prefill.jobs.handing_over,
        waiting=len(running_set.awaiting_prefill) + len(queue.awaiting_prefill),
        prefill_waiting_tokens=queue.tokens + running_set.waiting_tokens,
        decode_sequences=len(running_set.running),
        decode_kv_tokens=sum([sequence.computed for sequence in running_set.running]),
        reserved_sequences=reservations.choices,
        prefill_correction=pace.prefill.factor,
        decode_correction=pace.decode.factor,
        steps=totals.steps,
        prompt_tokens=prefill.prompt_tokens + decode.prompt_tokens,
        generated_tokens=decode.generated_tokens,
        preemptions=running_set.preemptions,
        transfers=handoffs.transfers + reservations.transfers,
        transfer_bytes=handoffs.transfer_bytes + reservations.transfer_bytes,
        transfer_s=handoffs.transfer_s + reservations.transfer_s,
        busy_s=totals.busy_s,
        canaries_passed=reservations.canaries_passed,
        canaries_mismatched=reservations.canaries_mismatched,
        links=links,
        tiers=tier_loads(prefill, decode),
        draining=draining,
        routers=routers,
        gc_pauses=totals.pauses.count,
        gc_pause_s=totals.pauses.total_s,
        gc_longest_pause_s=totals.pauses.longest_s,
    )


def tier_loads(prefill: PrefillScheduler, decode: DecodeScheduler) -> tuple[TierLoad, ...]:
    """In the order of the configuration."""
    shares = decode.batch.shares
    tiers = shares.qos.tiers
    if len(tiers) == 1:
        return ()
    running, waiting = decode.admission.held(), Counter[str]()
    for sequence in decode.batch.running_set.awaiting_prefill:
        waiting[shares.tier_of(sequence.spec)] += len(sequence.choices)
    for job in prefill.queue.awaiting_prefill.values():
        waiting[shares.tier_of(job.message.spec)] += 1
    return tuple(
        TierLoad(tier=tier.name, running=running[tier.name], waiting=waiting[tier.name])
        for tier in tiers
    )


PERIOD_S = 10.0
IDLE_LINE = "idle: the next line comes with the next request"


@dataclass(slots=True)
class ActivityLog:
    """One line for each reading; while the worker is idle only the first one."""

    total_blocks: int
    _last: tuple[float, Counters] | None = None
    _told_idle: bool = False

    def line(self, counters: Counters, now_s: float) -> str | None:
        """None: there is nothing to say. The first reading only begins the first period."""
        last, self._last = self._last, (now_s, counters)
        if last is None:
            return None
        found = activity(last[1], counters, now_s - last[0], self.total_blocks)
        silent, self._told_idle = found.idle and self._told_idle, found.idle
        if silent:
            return None
        return IDLE_LINE if found.idle else described(found)


def described(found: Activity) -> str:
    hits = "-" if found.hit_rate is None else f"{found.hit_rate:.0%}"
    return (
        f"tokens/s: {found.prompt_tokens_per_s:.1f} in, {found.generated_tokens_per_s:.1f} out; "
        f"requests: {found.running} running, {found.waiting} waiting; "
        f"KV: {found.kv_used:.0%} used, {hits} prefix hits, "
        f"{speed_text(found.transfer_bytes_per_s)} moved"
    )
