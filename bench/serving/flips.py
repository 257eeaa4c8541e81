"""Workers change their roles under load: how soon a router goes by it, and what streams notice.

The bundled model, two prefill and two decode workers as plain processes, requests at 0.8 of what
they serve. Roles change to and fro, so that there is always one of each.

    python -m bench.serving.flips
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from bench.access import ACCESS
from bench.report import Row, print_table, write_json
from bench.serving.http_load import Sent, send
from bench.serving.plain_cluster import HANDED_OVER, PlainCluster, WorkerPlan, plain_cluster
from cluster.process.admin import ask, flip
from engine.bundled import checkpoint_path
from kvrelay.types import Role
from kvrelay.v1.inference_pb2 import GetServerInfoRequest

PROMPT_TOKENS, OUTPUT_TOKENS = 120, 60
CLIENTS, CAPACITY_S, SHARE = 12, 8.0, 0.8
PLANS = tuple(
    WorkerPlan(role=role, cores=(core,)) for role in ("prefill", "decode") for core in (0, 1)
)
ORDER = (
    ("decode-2", Role.PREFILL),
    ("prefill-0", Role.DECODE),
    ("decode-2", Role.DECODE),
    ("prefill-0", Role.PREFILL),
)
PAUSE_S = 0.2
GOAL_KNOWN_S, GOAL_GAP_S = 1.0, 0.25


@dataclass(slots=True)
class Load:
    """Requests of equal lengths, each with a prompt of its own."""

    port: int
    sent: list[Sent] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    _random: Random = field(default_factory=lambda: Random(3))

    async def one(self) -> None:
        prompt = [self._random.randrange(3, 3000) for _ in range(PROMPT_TOKENS)]
        try:
            self.sent.append(await send(self.port, prompt, OUTPUT_TOKENS))
        except (RuntimeError, OSError, AssertionError) as error:
            self.failed.append(str(error))

    async def closed(self, clients: int, seconds: float) -> float:
        """Requests a second."""
        until_s = time.perf_counter() + seconds

        async def client() -> None:
            while time.perf_counter() < until_s:
                await self.one()

        await asyncio.gather(*(client() for _ in range(clients)))
        return len(self.sent) / seconds

    async def open(self, rate: float, enough: asyncio.Event) -> None:
        """Until it is enough, and all have ended."""
        async with asyncio.TaskGroup() as group:
            while not enough.is_set():
                group.create_task(self.one())
                await asyncio.sleep(self._random.expovariate(rate))


def _role(cluster: PlainCluster, worker: str) -> str:
    request, address = GetServerInfoRequest(), cluster.internal_grpc
    info = ask(address, lambda stub: stub.GetServerInfo, request, ACCESS, timeout_s=9)
    return str(next(one.role for one in info.workers if one.name == worker))


def _flip(cluster: PlainCluster, worker: str, role: Role) -> float:
    """Seconds from the command until the router goes by the new role."""
    began_s = time.perf_counter()
    flip(worker, role, cluster.internal_grpc, ACCESS)
    while _role(cluster, worker) != role:
        time.sleep(0.001)
    return time.perf_counter() - began_s


async def flips(cluster: PlainCluster, count: int) -> tuple[list[float], Load, float]:
    """(seconds of each flip, what was sent meanwhile, its rate)"""
    capacity = await Load(cluster.http_port).closed(CLIENTS, CAPACITY_S)
    load, enough, known_s = Load(cluster.http_port), asyncio.Event(), []
    asking = asyncio.create_task(load.open(SHARE * capacity, enough))
    for number in range(count):
        worker, role = ORDER[number % len(ORDER)]
        known_s.append(await asyncio.to_thread(_flip, cluster, worker, role))
        await asyncio.sleep(PAUSE_S)
    enough.set()
    await asking
    return known_s, load, SHARE * capacity


def _p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


def measure(count: int) -> list[Row]:
    settings = (*HANDED_OVER, "router.admission.policy=none")
    with plain_cluster(checkpoint_path(), PLANS, (), router_settings=settings) as cluster:
        known_s, load, rate = asyncio.run(flips(cluster, count))
    gaps_s = [max(one.gaps_s) for one in load.sent]
    method = f"{count} flips, {len(load.sent)} requests at {rate:.1f}/s (0.8 of the capacity)"
    known = Row(
        name="from the command until the router goes by it, p99",
        value=_p99(known_s),
        unit="s",
        against="goal",
        against_value=GOAL_KNOWN_S,
        goal=1.0,
        lower_is_better=True,
        method=method,
    )
    gap = Row(
        name="longest gap in a stream, p99 of the streams",
        value=_p99(gaps_s),
        unit="s",
        against="goal",
        against_value=GOAL_GAP_S,
        goal=1.0,
        lower_is_better=True,
        method=method,
        spread=f"longest {max(gaps_s):.3f}",
    )
    failed = Row(name="requests that failed", value=len(load.failed), unit="", method=method)
    return [known, gap, failed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = measure(options.flips)
    print_table("flips", rows)
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
