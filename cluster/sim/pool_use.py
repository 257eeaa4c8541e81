"""How busy the pools of a simulation were, and what that cost. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.resolve import worker_names
from cluster.sim.profiles.load import HardwareProfile
from cluster.sim.simulation import Simulated
from cluster.sim.worker import SimWorker
from kvrelay.types import Incarnation

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
    fleet = simulated.fleet
    return tuple(
        _use(
            str(pool.role),
            [worker for name in names for worker in fleet.of(name)],
            fleet.profiles[Incarnation(names[0])],
            len(names) * duration_s,
        )
        for pool, names in zip(pools, worker_names(pools), strict=True)
    )


def _use(
    role: str, workers: Sequence[SimWorker], profile: HardwareProfile, total_s: float
) -> PoolUse:
    """`total_s` of all its workers together; one that died and its successor count as one."""
    prefill_s = sum(worker.device.prefill_busy_s for worker in workers)
    decode_s = sum(worker.device.decode_busy_s for worker in workers)
    loops = [worker.loop for worker in workers]
    counters = [loop.counters() for loop in loops]
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
