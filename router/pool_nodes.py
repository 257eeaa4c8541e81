"""The pool nodes that a router watches: it asks each of them every second what it holds.

Requests never wait for them.
"""

from __future__ import annotations

import asyncio
import logging

import grpc

from kvrelay.gc_pauses import GcPauses
from kvrelay.v1 import pool_node_pb2 as pb
from kvrelay.v1 import pool_node_pb2_grpc
from router.generation import PoolNodeStatus

log = logging.getLogger(__name__)

PERIOD_S = 1.0
PATIENCE_S = 5.0


class PoolNodeLink:
    """`latest` is None while the node doesn't answer."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.latest: pb.PoolReport | None = None
        self._channel = grpc.aio.insecure_channel(address)
        self._stub = pool_node_pb2_grpc.PoolNodeStub(self._channel)
        self._task = asyncio.ensure_future(self._run())

    async def report(self) -> pb.PoolReport:
        """Raises grpc.aio.AioRpcError."""
        return await self._stub.Report(pb.PoolReportRequest(), timeout=PATIENCE_S)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._channel.close()

    async def _run(self) -> None:
        while True:
            before = self.latest
            try:
                self.latest = await self.report()
            except grpc.aio.AioRpcError as error:
                self.latest = None
                if before is not None:
                    log.warning("pool node at %s is silent: %s", self.address, error.details())
            if before is None and self.latest is not None:
                log.info("pool node %s answers at %s", self.latest.name, self.address)
            await asyncio.sleep(PERIOD_S)


class PoolNodes:
    def __init__(self) -> None:
        self._links: dict[str, PoolNodeLink] = {}  # address |-> link

    def add(self, address: str) -> None:
        if address not in self._links:
            self._links[address] = PoolNodeLink(address)

    async def remove(self, address: str) -> None:
        link = self._links.pop(address, None)
        if link is not None:
            await link.close()

    async def close(self) -> None:
        for address in list(self._links):
            await self.remove(address)

    def links(self) -> tuple[PoolNodeLink, ...]:
        return tuple(self._links.values())

    def statuses(self) -> tuple[PoolNodeStatus, ...]:
        """Of those that answer."""
        return tuple(_status(link.latest) for link in self.links() if link.latest is not None)


def _status(report: pb.PoolReport) -> PoolNodeStatus:
    return PoolNodeStatus(
        name=report.name,
        orphaned_blocks=report.orphaned_blocks,
        blocks={(t.tier, s.state): s.blocks for t in report.tiers for s in t.states},
        pauses=GcPauses(report.gc_pauses, report.gc_pause_s, report.gc_longest_pause_s),
    )
