"""A process that starts and stops workers on command, so that many models share one start-up.

Reads one JSON object per line, answers each with one: {"start": settings} |-> {"address": ...},
{"stop": address} |-> {"stopped": address}. Ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import sys

from cluster.settings import WorkerSettings
from cluster.worker import WorkerProcess
from kvrelay.types import Role


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
    fields = command["start"]
    fields["role"] = Role(fields["role"])
    fields["transports"] = tuple(fields["transports"])
    worker = WorkerProcess(WorkerSettings(**fields))
    try:
        address = await worker.start()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    workers[address] = worker
    return {"address": address}


if __name__ == "__main__":
    asyncio.run(main())
