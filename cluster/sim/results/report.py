"""What a simulation amounts to, in numbers. Pure: the same simulation, the same report.

Attainment and goodput count every request that was offered: one that is refused, fails or comes
late is a miss.

How busy the pools of a simulation were, and what that cost. Pure.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster.config.simulation import SloSection
from cluster.core.desired import pool_of
from cluster.sim.profiles.load import HardwareProfile
from cluster.sim.simulation import Simulated
from cluster.sim.timeline import TimelinePoint
from cluster.sim.trace import Outcome
from cluster.sim.worker import SimWorker

SECONDS_PER_HOUR = 3600.0
JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUse:
    """`utilisation` is the share of time in which the workers ran steps, `price` that of all of the
    pool for the whole time, and `energy_j` that of idle and peak power; None: not known."""

    role: str
    workers: int
    profile: str
    utilisation: float
    prefill_busy_s: float
    decode_busy_s: float
    steps: int
    prompt_tokens: int
    generated_tokens: int
    preemptions: int
    price: float | None
    energy_j: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """None where a profile doesn't tell."""

    price: float | None
    energy_j: float | None
    price_per_million_tokens: float | None
    kwh_per_million_tokens: float | None


def pool_uses(simulated: Simulated, duration_s: float) -> tuple[PoolUse, ...]:
    pools = simulated.config.workers
    workers = defaultdict(list)
    for worker in simulated.fleet.workers.values():
        workers[pool_of(worker.name)].append(worker)
    return tuple(
        _use(
            str(pool.role or "auto"),
            workers[pool.label],
            simulated.fleet.profiles[workers[pool.label][0].incarnation],
            _worker_s(simulated, pool.label, duration_s),
        )
        for pool in pools
    )


def _worker_s(simulated: Simulated, pool: str, duration_s: float) -> float:
    """Of all its workers together, also while they start."""
    lives = [one for one in simulated.lives if one.worker is not None]
    ours = [one for one in lives if pool_of(one.worker or "") == pool]
    return sum(one.seconds(duration_s) for one in ours)


def _use(
    role: str, workers: Sequence[SimWorker], profile: HardwareProfile, total_s: float
) -> PoolUse:
    """One that died and its successor count as one."""
    prefill_s = sum(worker.device.prefill_busy_s for worker in workers)
    decode_s = sum(worker.device.decode_busy_s for worker in workers)
    counters = [worker.core.counters(worker.links.states) for worker in workers]
    busy_s = prefill_s + decode_s
    power, price = profile.power_w, profile.price_per_hour
    return PoolUse(
        role=role,
        workers=len({worker.name for worker in workers}),
        profile=profile.name,
        utilisation=busy_s / total_s,
        prefill_busy_s=prefill_s,
        decode_busy_s=decode_s,
        steps=sum(one.steps for one in counters),
        prompt_tokens=sum(one.prompt_tokens for one in counters),
        generated_tokens=sum(one.generated_tokens for one in counters),
        preemptions=sum(one.preemptions for one in counters),
        price=None if price is None else price * total_s / SECONDS_PER_HOUR,
        energy_j=None if power is None else power.idle * (total_s - busy_s) + power.peak * busy_s,
    )


def cost_of(pools: Sequence[PoolUse], tokens: int) -> Cost:
    price = _sum([pool.price for pool in pools])
    energy_j = _sum([pool.energy_j for pool in pools])
    millions = tokens / 1e6
    return Cost(
        price=price,
        energy_j=energy_j,
        price_per_million_tokens=price / millions if price is not None and tokens else None,
        kwh_per_million_tokens=(
            energy_j / JOULES_PER_KWH / millions if energy_j is not None and tokens else None
        ),
    )


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPoolUse:
    """What all workers fetched, in prompt tokens: from the memory and the disk of their own host's
    pool node, and from the pool nodes of other hosts. `declined_tokens` were there, but another
    source was faster. `stored_blocks` were written by workers. At the end `host_blocks` are in
    memory and `disk_blocks` on disk."""

    nodes: int
    host_tokens: int
    disk_tokens: int
    remote_tokens: int
    declined_tokens: int
    stored_blocks: int
    host_blocks: int
    disk_blocks: int


def kv_pool_use(simulated: Simulated) -> KvPoolUse | None:
    """None without pool nodes."""
    if simulated.pools is None:
        return None
    workers = simulated.fleet.workers.values()
    counters = [worker.core.counters(worker.links.states) for worker in workers]
    links = [worker.node_links for worker in workers if worker.node_links is not None]
    counts = [node.core.books.counts() for node in simulated.pools.living]
    return KvPoolUse(
        nodes=len(simulated.pools.hosts),
        host_tokens=sum(one.pool_host_tokens for one in counters),
        disk_tokens=sum(one.pool_disk_tokens for one in counters),
        remote_tokens=sum(one.pool_remote_tokens for one in counters),
        declined_tokens=sum(one.pool_declined_tokens for one in counters),
        stored_blocks=sum(one.stored_blocks for one in links),
        host_blocks=sum(one["cached"] for one in counts),
        disk_blocks=sum(one["disk_cached"] for one in counts),
    )


QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Of the requests that have it."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """`attainment` and `goodput_per_s` are over what was offered, `admitted_attainment` over what
    was admitted. `hit_rate` is of prompt tokens whose KV a prefill found, `reuse_rate` of those
    that it found on its own device. `retries`: how often clients came back when they were told to,
    and how many of these times they were admitted. `level_changes`: how often a tier was tightened
    or eased. `ahead_tokens` were computed before their prompt was complete. `kv_pool` is None
    without pool nodes."""

    name: str
    rate_scale: float
    replicas: int
    seed: int
    ttft_slo_s: float
    tpot_slo_s: float
    offered: int
    completed: int
    good: int
    refused: dict[str, int]
    failed: dict[str, int]
    refusals: int
    retries: int
    retried_admitted: int
    duration_s: float
    offered_per_s: float
    completed_per_s: float
    goodput_per_s: float
    attainment: float
    admitted_attainment: float
    ttft_s: Spread | None
    tpot_s: Spread | None
    e2e_s: Spread | None
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    hit_rate: float
    reuse_rate: float
    moved_bytes: int
    preemptions: int
    level_changes: int
    ahead_tokens: int
    local_prefills: int
    pools: tuple[PoolUse, ...]
    cost: Cost
    timeline: tuple[TimelinePoint, ...]
    kv_pool: KvPoolUse | None


def report(simulated: Simulated) -> Report:
    outcomes, simulation = simulated.outcomes, simulated.config.simulation
    slo = simulation.slo
    good = sum(is_good(one, slo) for one in outcomes)
    completed = [one for one in outcomes if one.done]
    admitted = sum(one.admitted_s is not None for one in outcomes)
    duration_s = max(_ends(outcomes), default=0.0) or 1.0
    pools = pool_uses(simulated, duration_s)
    prompts = sum(one.request.input_tokens for one in completed)
    output = sum(one.tokens for one in outcomes)
    return Report(
        name=simulated.config.name,
        rate_scale=simulated.scale.rate,
        replicas=simulated.scale.replicas,
        seed=simulation.seed,
        ttft_slo_s=slo.ttft,
        tpot_slo_s=slo.tpot,
        offered=len(outcomes),
        completed=len(completed),
        good=good,
        refused=_counted(one.refused for one in outcomes),
        failed=_counted(one.failed for one in outcomes),
        refusals=sum(one.refusals for one in outcomes),
        retries=sum(one.retries for one in outcomes),
        retried_admitted=sum(one.retries > 0 and one.admitted_s is not None for one in outcomes),
        duration_s=duration_s,
        offered_per_s=len(outcomes) / (outcomes[-1].request.arrival_s or 1.0),
        completed_per_s=len(completed) / duration_s,
        goodput_per_s=good / duration_s,
        attainment=good / len(outcomes),
        admitted_attainment=good / admitted if admitted else 0.0,
        ttft_s=spread(one.ttft_s for one in outcomes),
        tpot_s=spread(one.tpot_s for one in outcomes),
        e2e_s=spread(one.e2e_s for one in outcomes),
        prompt_tokens=sum(one.request.input_tokens for one in outcomes),
        output_tokens=output,
        output_tokens_per_s=output / duration_s,
        hit_rate=sum(one.cached_tokens for one in completed) / max(1, prompts),
        reuse_rate=_reuse_rate(simulated),
        moved_bytes=simulated.moved_bytes,
        preemptions=sum(pool.preemptions for pool in pools),
        level_changes=simulated.level_changes,
        ahead_tokens=simulated.ahead_tokens,
        local_prefills=sum(one.prefilled_locally for one in outcomes),
        pools=pools,
        cost=cost_of(pools, output),
        timeline=tuple(simulated.timeline),
        kv_pool=kv_pool_use(simulated),
    )


def is_good(outcome: Outcome, slo: SloSection) -> bool:
    """It met its objectives."""
    if not outcome.done or outcome.ttft_s is None or outcome.ttft_s > slo.ttft:
        return False
    return outcome.tpot_s is None or outcome.tpot_s <= slo.tpot


def spread(values: Iterable[float | None]) -> Spread | None:
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    p50, p90, p99 = (known[min(len(known) - 1, int(q * len(known)))] for q in QUANTILES)
    mean = sum(known) / len(known)
    return Spread(count=len(known), mean=mean, p50=p50, p90=p90, p99=p99, most=known[-1])


def _ends(outcomes: Sequence[Outcome]) -> Iterable[float]:
    for one in outcomes:
        yield one.request.arrival_s
        if one.last_token_s is not None:
            yield one.last_token_s


def _counted(reasons: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(reason for reason in reasons if reason).items()))


def _reuse_rate(simulated: Simulated) -> float:
    cores = [worker.core for worker in simulated.fleet.workers.values()]
    tables = [core.tables for core in cores if core.prefill.prompt_tokens]
    queried = sum(one.queried_tokens for one in tables)
    return sum(one.hit_tokens for one in tables) / queried if queried else 0.0
