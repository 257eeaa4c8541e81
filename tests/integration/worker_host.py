"""A process that starts and stops workers on command, so that many models share one start-up.

Reads one JSON object per line, answers each with one: {"start": settings} |-> {"address": ...},
{"stop": address} |-> {"stopped": address}, {"damage": address, "pieces": n} |-> {"damaged":
address}: the KV of so many pieces that this worker receives from now on is wrong, though every
checksum was right. Ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pydantic import TypeAdapter

from cluster.settings import WorkerSettings
from cluster.worker import WorkerProcess
from kvpool.cached_block import Place
from kvpool.layout import NO_BLOCK, Tables
from kvpool.memory import KvMemory
from kvpool.memory_host import HostBlocks

SETTINGS = TypeAdapter(WorkerSettings)


async def main() -> None:
    workers: dict[str, WorkerProcess] = {}
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await answer(json.loads(line), workers)), flush=True)
    for worker in workers.values():
        await worker.stop(drain_s=0)


async def answer(command: dict, workers: dict[str, WorkerProcess]) -> dict[str, str]:  # type: ignore[type-arg]
    if "stop" in command:
        await workers.pop(command["stop"]).stop(drain_s=5)
        return {"stopped": command["stop"]}
    if "damage" in command:
        damage(workers[command["damage"]], command["pieces"])
        return {"damaged": command["damage"]}
    worker = WorkerProcess(SETTINGS.validate_python(command["start"]))
    try:
        address = await worker.start()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    workers[address] = worker
    return {"address": address}


def damage(worker: WorkerProcess, pieces: int) -> None:
    """Behind the back of the product: its transfer thread's last move leaves wrong bytes."""
    assert worker._parts is not None
    mover, pool = worker._parts.mover, worker._parts.pool
    left = iter(range(pieces))

    def spoiling(move: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def spoil(job: Any) -> Any:
            moved = move(job)
            if next(left, None) is not None:
                spoil_first_block(mover._memory, job.tables)
            return moved

        return spoil

    if pool is not None:
        spoil_fetches(pool._side._mover._blocks, left)
    mover._scatter = spoiling(type(mover)._scatter.__get__(mover))  # type: ignore[method-assign]
    mover._fetch = spoiling(type(mover)._fetch.__get__(mover))  # type: ignore[method-assign]


def spoil_fetches(blocks: HostBlocks, left: Iterator[int]) -> None:
    """What comes from the pool node, a batch of blocks at a time."""
    scatter = type(blocks).scatter.__get__(blocks)

    def spoil(places: Sequence[Place]) -> None:
        scatter(places)
        if next(left, None) is not None:
            spoil_first_block(blocks._memory, tuple(zip(*places, strict=True)))

    blocks.scatter = spoil  # type: ignore[method-assign]


def spoil_first_block(memory: KvMemory, tables: Tables) -> None:
    """In every layer, of the blocks that are held."""
    size = memory.layout.block_size
    for planes, table in zip(memory.planes, tables, strict=True):
        first = next(block for block in table if block != NO_BLOCK)
        for plane in planes:
            plane[:, first * size : (first + 1) * size].add_(1)


if __name__ == "__main__":
    asyncio.run(main())
