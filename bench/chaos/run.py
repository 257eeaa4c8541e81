"""One run: capacity and expected tokens first, then load and faults, then what is left."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from bench.chaos.clusters.host import (
    MemoryGroup,
    NotPermitted,
    SecondHost,
    SmallDisk,
    memory_group,
    second_host,
    small_disk,
)
from bench.chaos.clusters.on_ray import ray_cluster
from bench.chaos.clusters.plain import ChaosCluster, Shape, chaos_cluster
from bench.chaos.clusters.processes import Ended
from bench.chaos.faults import Seen
from bench.chaos.inflict import Inflictor
from bench.chaos.leaks import (
    files_in_shm,
    footprints,
    grown,
    left_over,
    until_nothing_is_held,
)
from bench.chaos.prompts import Answer, Asked, Lengths, draw_requests, unrepeatable
from bench.chaos.streams import Clients, Load, Outcome, StreamRecord

PASSES = 2
CLIENTS = 8
PATIENCE_S = 420.0
"""For streams that still run when the last fault has ended."""
SETTLE_S = 60.0
LAG_EVERY_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`only`: faults whose text contains one of these. `on_ray`: `kvrelay serve` on a Ray of its
    own, on one host and without a disk tier."""

    seed: int = 1
    minutes: float = 20.0
    every_s: float = 10.0
    streams: int = 64
    share: float = 0.8
    lengths: Lengths = field(default_factory=Lengths)
    shape: Shape = field(default_factory=Shape)
    only: Sequence[str] = ()
    second_host: bool = True
    on_ray: bool = False
    logs: Path = Path("build/chaos")


@dataclass(slots=True, kw_only=True)
class Found:
    """`calm`: streams without faults. `lag_s`: the longest pause of the clients' own loop."""

    calm: list[StreamRecord] = field(default_factory=list)
    records: list[StreamRecord] = field(default_factory=list)
    expected: Mapping[int, Answer] = field(default_factory=dict)
    unrepeatable: int = 0
    capacity_per_s: float = 0.0
    load_s: float = 0.0
    seen: Sequence[Seen] = ()
    live: Sequence[int] = ()
    topped_up: int = 0
    lag_s: float = 0.0
    leaked: list[str] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    not_ended: list[str] = field(default_factory=list)

    def count(self, outcome: Outcome) -> int:
        return sum(one.outcome is outcome for one in self.records)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Host:
    second: SecondHost | None
    disk: SmallDisk | None
    memory: MemoryGroup | None


async def run(plan: Plan, tell: Callable[[str], None]) -> Found:
    """Keeps the logs of all processes in `plan.logs`."""
    plan.logs.mkdir(parents=True, exist_ok=True)
    dev_shm, found = files_in_shm(), Found()
    with ExitStack() as stack:
        host = _of_this_machine(plan, stack, tell)
        disk = host.disk and host.disk.folder
        shape = replace(plan.shape, second_host=host.second, disk=disk)
        started = ray_cluster(shape, plan.logs) if plan.on_ray else chaos_cluster(shape, plan.logs)
        async with _closing(started, found) as cluster, _lag(found):
            clients = Clients(cluster.routers, CLIENTS)
            try:
                await _under_load(plan, cluster, clients, host, found, tell)
            finally:
                await clients.close()
        found.leaked += await left_over(cluster.supervisor, dev_shm)
        keep(found, plan.logs / "streams.json")
        found.ended = cluster.supervisor.ends
    return found


def keep(found: Found, path: Path) -> None:
    """When each stream's tokens came, and the faults; times are those of the logs, in seconds."""
    clock_s = time.time() - time.monotonic()
    faults = [[clock_s + one.at_s, str(one.fault), sorted(one.on_it)] for one in found.seen]
    streams = [
        {
            "id": one.request_id,
            "asked_s": clock_s + one.asked_s,
            "came_s": [round(clock_s + at_s, 3) for at_s in one.came_s],
            "outcome": one.outcome,
            "error": one.error,
        }
        for one in found.records
    ]
    path.write_text(json.dumps({"faults": faults, "streams": streams}))


def _of_this_machine(plan: Plan, stack: ExitStack, tell: Callable[[str], None]) -> _Host:
    """Tells what it does not permit."""

    def entered(what: str, context):  # type: ignore[no-untyped-def]
        try:
            return stack.enter_context(context)
        except NotPermitted as error:
            tell(f"skipped: {what}: {error}")
            return None

    second = entered("a second host", second_host()) if plan.second_host else None
    if second is not None and not second.is_lossy_possible:
        tell(f"skipped: a lossy link: {second.why_not_lossy}")
    if plan.on_ray:
        return _Host(second=second, disk=None, memory=None)
    folder = plan.logs / f"disk-{time.time_ns()}"
    return _Host(
        second=second,
        disk=entered("a full disk tier", small_disk(folder)),
        memory=entered("a memory limit", memory_group()),
    )


@asynccontextmanager
async def _closing(
    started: AbstractAsyncContextManager[ChaosCluster], found: Found
) -> AsyncIterator[ChaosCluster]:
    async with started as cluster:
        yield cluster
        found.not_ended = await cluster.supervisor.close()


@asynccontextmanager
async def _lag(found: Found) -> AsyncIterator[None]:
    async def watch() -> None:
        while True:
            due_s = time.monotonic() + LAG_EVERY_S
            await asyncio.sleep(LAG_EVERY_S)
            found.lag_s = max(found.lag_s, time.monotonic() - due_s)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()


async def _under_load(
    plan: Plan,
    cluster: ChaosCluster,
    clients: Clients,
    host: _Host,
    found: Found,
    tell: Callable[[str], None],
) -> None:
    requests = draw_requests(2 * plan.streams, plan.lengths, plan.seed)
    await _calm(plan, clients, requests, found, tell)
    held = await until_nothing_is_held(cluster, SETTLE_S)
    found.leaked += [f"before any fault: {one}" for one in held]
    before = footprints(cluster.supervisor.processes.values())

    load = Load(clients, requests, plan.seed, "chaos")
    found.records = load.records
    inflictor = Inflictor(
        cluster=cluster,
        load=load,
        streams=plan.streams,
        disk=host.disk,
        memory=host.memory,
        only=plan.only,
        tell=tell,
    )
    await _disturbed(plan, load, inflictor, found)
    found.seen, found.live = inflictor.seen, inflictor.live
    found.topped_up = inflictor.topped_up
    await load.until_ended(PATIENCE_S)
    await _settled(cluster, found)
    found.leaked += grown(before, footprints(cluster.supervisor.processes.values()))


async def _calm(
    plan: Plan,
    clients: Clients,
    requests: Sequence[Asked],
    found: Found,
    tell: Callable[[str], None],
) -> None:
    """Every request, twice: what comes of each, and how many a second."""
    load = Load(clients, requests, plan.seed, "calm")
    twice = [*range(len(requests))] * PASSES
    found.capacity_per_s = await load.in_a_closed_loop(twice, plan.streams)
    found.calm = load.records
    failed = [one for one in load.records if one.outcome is not Outcome.COMPLETED]
    if failed:
        raise RuntimeError(f"without any fault {len(failed)} failed: {failed[0].error}")
    half = len(requests)
    answers = [one.answer for one in load.records]
    odd = unrepeatable(answers[:half], answers[half:])
    found.unrepeatable = len(odd)
    found.expected = {i: answers[i] for i in range(half) if i not in odd}
    tell(
        f"capacity: {found.capacity_per_s:.2f} requests/s with {plan.streams} clients; "
        f"{len(odd)} of {half} requests give other tokens the second time"
    )


async def _disturbed(plan: Plan, load: Load, inflictor: Inflictor, found: Found) -> None:
    over, began_s = asyncio.Event(), time.monotonic()
    rate_per_s = plan.share * found.capacity_per_s
    offering = asyncio.create_task(load.in_an_open_loop(rate_per_s, over))
    try:
        rng = Random(plan.seed)
        await inflictor.run(rng, every_s=plan.every_s, seconds=60.0 * plan.minutes)
        await asyncio.sleep(plan.every_s)
    finally:
        over.set()
        await offering
        await inflictor.end()
        found.load_s = time.monotonic() - began_s


async def _settled(cluster: ChaosCluster, found: Found) -> None:
    try:
        await cluster.until_joined(SETTLE_S)
    except TimeoutError as error:
        found.leaked.append(str(error))
    found.leaked += await until_nothing_is_held(cluster, SETTLE_S)
