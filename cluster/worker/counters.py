"""A worker's state in numbers, as routers are told with every batch of events."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from decode_worker.scheduler import DecodeScheduler
from engine.correction import StepPace
from kvpool.openings import Openings
from kvrelay.gc_pauses import PAUSES, GcPauses
from kvrelay.messages import Counters, LinkState, TierLoad
from kvrelay.types import PrefixOrigin
from prefill_worker.scheduler import PrefillScheduler


@dataclass(slots=True)
class Totals:
    """What the loop itself counts; `orphaned_blocks` as of the last tick."""

    steps: int = 0
    busy_s: float = 0.0
    orphaned_blocks: int = 0
    pauses: GcPauses = field(default_factory=lambda: PAUSES)


def count(
    openings: Openings,
    prefill: PrefillScheduler,
    decode: DecodeScheduler,
    totals: Totals,
    pace: StepPace,
    links: tuple[LinkState, ...],
    draining: bool,
) -> Counters:
    origins = openings.origins
    tables, restores, receiver = openings.tables, openings.restores, decode.receiver
    pool, roster = tables.scarcest, decode.batch.roster
    queue, handoffs, pieces = prefill.queue, prefill.handoffs, receiver.pieces
    return Counters(
        free_blocks=pool.free,
        leased_blocks=pool.leased,
        active_blocks=pool.active,
        cached_blocks=pool.cached,
        orphaned_blocks=totals.orphaned_blocks,
        prefix_queried_tokens=tables.queried_tokens,
        prefix_hit_tokens=tables.hit_tokens,
        pool_queried_tokens=restores.sought_tokens if restores else 0,
        pool_host_tokens=restores.host_tokens if restores else 0,
        pool_disk_tokens=restores.disk_tokens if restores else 0,
        pool_declined_tokens=openings.declined_tokens,
        pool_remote_tokens=openings.far.tokens if openings.far else 0,
        peer_tokens=openings.pulls.tokens if openings.pulls else 0,
        prefixes_device=origins[PrefixOrigin.DEVICE],
        prefixes_host=origins[PrefixOrigin.HOST],
        prefixes_disk=origins[PrefixOrigin.DISK],
        prefixes_peer=origins[PrefixOrigin.PEER],
        prefixes_remote=origins[PrefixOrigin.REMOTE],
        prefixes_computed=origins[PrefixOrigin.COMPUTED],
        running=decode.sequences + prefill.jobs.handing_over,
        waiting=len(roster.awaiting_prefill) + len(queue),
        prefill_waiting_tokens=queue.tokens + roster.waiting_tokens,
        decode_sequences=len(roster.running),
        decode_kv_tokens=sum([sequence.computed for sequence in roster.running]),
        reserved_sequences=receiver.reserved_choices,
        prefill_correction=pace.prefill.factor,
        decode_correction=pace.decode.factor,
        steps=totals.steps,
        prompt_tokens=prefill.prompt_tokens + decode.prompt_tokens,
        generated_tokens=decode.generated_tokens,
        preemptions=roster.preemptions,
        transfers=handoffs.transfers + pieces.transfers,
        transfer_bytes=handoffs.transfer_bytes + pieces.transfer_bytes,
        transfer_s=handoffs.transfer_s + pieces.transfer_s,
        busy_s=totals.busy_s,
        canaries_passed=decode.receiver.canaries_passed,
        canaries_mismatched=decode.receiver.canaries_mismatched,
        links=links,
        tiers=tier_loads(prefill, decode),
        draining=draining,
        gc_pauses=totals.pauses.count,
        gc_pause_s=totals.pauses.total_s,
        gc_longest_pause_s=totals.pauses.longest_s,
    )


def tier_loads(prefill: PrefillScheduler, decode: DecodeScheduler) -> tuple[TierLoad, ...]:
    """In the order of the configuration."""
    standing = decode.admission.standing
    tiers = standing.qos.tiers
    if len(tiers) == 1:
        return ()
    running, waiting = decode.admission.held(), Counter[str]()
    for sequence in decode.batch.roster.awaiting_prefill:
        waiting[standing.tier_of(sequence.spec)] += len(sequence.choices)
    for job in prefill.queue.awaiting_prefill.values():
        waiting[standing.tier_of(job.message.spec)] += 1
    return tuple(
        TierLoad(tier=tier.name, running=running[tier.name], waiting=waiting[tier.name])
        for tier in tiers
    )
