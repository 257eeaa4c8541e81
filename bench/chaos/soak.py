"""Many requests that their clients abort: nothing stays held, and no process grows.

    python -m bench.chaos.soak --minutes 30 --aborts 100000

Clients leave at any time: before the prompt is computed, between two tokens, close to the end. A
few stay, and their tokens are compared. The memory and the descriptors of each process in the last
quarter are compared with those in the second one.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import mean

from bench.chaos.clusters.plain import ChaosCluster, Shape, chaos_cluster
from bench.chaos.leaks import files_in_shm, left_over, until_nothing_is_held
from bench.chaos.prompts import Answer, Asked, Lengths, draw_requests
from bench.chaos.streams import Clients, Load
from bench.report import Row, print_table
from kvrelay.errors import KvrelayError, Refused

LENGTHS = Lengths(prompt=(16, 160), output=(16, 256))
REQUESTS = 48
STAYING = 0.03
"""This share of the clients waits for the whole answer."""
MEAN_STAY_S = 0.2
SAMPLE_EVERY_S = 2.0
AT_ONCE = 64
GROWTH_GOAL = 1.02
SETTLE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Of one process."""

    resident_bytes: int
    descriptors: int


@dataclass(slots=True, kw_only=True)
class Soaked:
    """`ended`: # how a request ended |-> how many"""

    samples: dict[str, list[Sample]] = field(default_factory=lambda: defaultdict(list))
    ended: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    held: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)


class Leavers:
    """Clients that leave when they like."""

    def __init__(
        self, clients: Clients, requests: Sequence[Asked], expected: Mapping[int, Answer], seed: int
    ) -> None:
        self.found = Soaked()
        self._clients, self._requests, self._expected = clients, requests, expected
        self._rng = Random(seed)
        self._number = 0
        self._room = asyncio.Semaphore(AT_ONCE)

    async def run(self, *, aborts: int, seconds: float) -> None:
        """So many in this time, as evenly as the cluster permits."""
        began_s, running = time.monotonic(), set[asyncio.Task[None]]()
        while self.found.ended["aborted"] < aborts:
            await self._room.acquire()
            task = asyncio.create_task(self._one())
            running.add(task)
            task.add_done_callback(running.discard)
            due_s = began_s + seconds * self.found.ended["aborted"] / aborts
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        await asyncio.gather(*running)

    async def _one(self) -> None:
        try:
            self._number += 1
            index = self._rng.randrange(len(self._requests))
            stays_s = self._rng.expovariate(1 / MEAN_STAY_S)
            stays = self._rng.random() < STAYING
            await self._ask(index, None if stays else stays_s)
        finally:
            self._room.release()

    async def _ask(self, index: int, stays_s: float | None) -> None:
        asked, request_id = self._requests[index], f"soak-{self._number}"
        tenant = f"t{self._number}" if self._rng.random() < 0.5 else ""
        stream, _ = self._clients.stream(asked, request_id, tenant)
        ids: list[list[int]] = [[] for _ in range(asked.choices)]
        try:
            async with asyncio.timeout(stays_s):
                async for chunk in stream:
                    ids[chunk.index] += chunk.token_ids
        except TimeoutError:
            self.found.ended["aborted"] += 1
        except Refused:
            self.found.ended["refused"] += 1
        except KvrelayError as error:
            self.found.ended["failed"] += 1
            self.found.errors[str(error)] += 1
        else:
            self.found.ended["completed"] += 1
            right = [choice[0] for choice in self._expected[index]]
            self.found.wrong += [tuple(own) for own in ids] != right
        finally:
            stream.close()


async def _sample(cluster: ChaosCluster, found: Soaked) -> None:
    while True:
        await asyncio.sleep(SAMPLE_EVERY_S)
        for name, process in cluster.supervisor.processes.items():
            sample = Sample(
                resident_bytes=process.resident_bytes(), descriptors=process.descriptors()
            )
            found.samples[name].append(sample)


async def soak(shape: Shape, *, minutes: float, aborts: int, seed: int, logs: Path) -> Soaked:
    logs.mkdir(parents=True, exist_ok=True)
    in_shm = files_in_shm()
    async with chaos_cluster(shape, logs) as cluster:
        clients = Clients(cluster.routers, 8)
        requests = draw_requests(REQUESTS, LENGTHS, seed)
        calm = Load(clients, requests, seed, "calm")
        await calm.in_a_closed_loop(range(REQUESTS), 8)
        expected = {one.index: one.answer for one in calm.records}
        leavers = Leavers(clients, requests, expected, seed)
        sampling = asyncio.create_task(_sample(cluster, leavers.found))
        await leavers.run(aborts=aborts, seconds=60 * minutes)
        sampling.cancel()
        leavers.found.held = await until_nothing_is_held(cluster, SETTLE_S)
        await clients.close()
        leavers.found.left = await cluster.supervisor.close()
    leavers.found.left += await left_over(cluster.supervisor, in_shm)
    return leavers.found


def growth(values: Sequence[float]) -> float:
    """The mean of the last quarter by that of the second one."""
    quarter = len(values) // 4
    return mean(values[-quarter:]) / mean(values[quarter : 2 * quarter]) if quarter else 1.0


def rows(found: Soaked) -> list[Row]:
    given: list[Row] = []
    for name, samples in sorted(found.samples.items()):
        quarter = len(samples) // 4
        for what, unit, values in (
            ("resident memory", "MiB", [one.resident_bytes / 2**20 for one in samples]),
            ("descriptors", "", [float(one.descriptors) for one in samples]),
        ):
            given.append(
                Row(
                    name=f"{name}: {what}",
                    value=mean(values[-quarter:]),
                    unit=unit,
                    against="second quarter",
                    against_value=mean(values[quarter : 2 * quarter]),
                    goal=GROWTH_GOAL,
                    lower_is_better=True,
                    method="mean of the last quarter of the run",
                )
            )
    return given


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--aborts", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--logs", type=Path, help="a folder; default: one in build/soak")
    args = parser.parse_args()
    logs = args.logs or Path("build/soak", time.strftime("%Y%m%d-%H%M%S")).resolve()
    shape = Shape(prefill=1, decode=1, kv_mib=64, pool_mib=64)
    began_s = time.monotonic()
    found = asyncio.run(
        soak(shape, minutes=args.minutes, aborts=args.aborts, seed=args.seed, logs=logs)
    )
    ended = ", ".join(f"{count} {how}" for how, count in found.ended.most_common())
    print(f"{ended} in {time.monotonic() - began_s:.0f} s; {found.wrong} wrong")
    for error, count in found.errors.most_common():
        print(f"failed: {count} x {error}")
    print(f"held at the end: {len(found.held)}", *found.held[:20], sep="\n  ")
    print(f"left at the end: {len(found.left)}", *found.left[:20], sep="\n  ")
    shown = rows(found)
    print_table("Soak", shown)
    bad = found.wrong or found.held or found.left or found.ended["failed"]
    return 1 if bad or not all(row.reached for row in shown) else 0


if __name__ == "__main__":
    sys.exit(main())
