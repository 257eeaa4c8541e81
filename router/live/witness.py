"""Asks a worker's witness how the worker has ended."""

from __future__ import annotations

import asyncio
import json
import logging

from kvrelay.messages import WorkerHello
from kvrelay.types import RequestKey
from router.core.faults.poison import Blame, Ending

log = logging.getLogger(__name__)

PATIENCE_S = 1.0
"""Where a host is gone, nobody answers."""
MOST_BYTES = 4 * 2**20


async def ask_witness(hello: WorkerHello) -> Ending:
    """Nobody is blamed where nobody knows."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            return _ending(await _answer(hello))
    except (OSError, TimeoutError, ValueError, KeyError, TypeError) as error:
        log.info("how worker %s ended is not known: %r", hello.name, error)
        return Ending()


async def _answer(hello: WorkerHello) -> bytes:
    host, _, port = hello.witness.rpartition(":")
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), limit=MOST_BYTES)
    try:
        writer.write(hello.witness_key.encode())
        return await reader.readline()
    finally:
        writer.close()


def _ending(line: bytes) -> Ending:
    """Raises ValueError, KeyError or TypeError for what no witness says."""
    told = json.loads(line)
    keys = dict.fromkeys(RequestKey(str(name), int(attempt)) for name, attempt, _ in told["step"])
    return Ending(
        blame=Blame(told["blame"]),
        step=tuple(keys),
        complete=bool(told["complete"]),
        why=str(told["why"]),
    )
