"""The pool nodes of a router. Each streams the changes of its blocks, and is asked every second for
a report.

Requests never wait for them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc

from kvrelay.access.tls import LastingChannel
from kvrelay.access.values import NO_ACCESS, Access
from kvrelay.errors import PeerError
from kvrelay.gc_pauses import GcPauses
from kvrelay.types import WIRE_VERSION, Incarnation
from kvrelay.v1 import pool_node_pb2 as pb
from kvrelay.v1 import pool_node_pb2_grpc
from kvrelay.wire import decode_update
from router.core.events import PoolNodeLost, PoolNodeSaid
from router.core.state.generation import PoolNodeStatus
from router.live.link import channel_options

log = logging.getLogger(__name__)

PERIOD_S = 1.0
PATIENCE_S = 5.0


_Post = Callable[[PoolNodeSaid | PoolNodeLost], None]


class PoolNodeLink:
    """`latest` is None while the node doesn't answer."""

    def __init__(self, address: str, post: _Post, access: Access = NO_ACCESS) -> None:
        """Raises ConfigError when a file of `access` can't be read."""
        self.address = address
        self.latest: pb.PoolReport | None = None
        self._post = post
        self._metadata = access.metadata
        self._channel = LastingChannel(address, access.dials, channel_options())
        self._tasks = [asyncio.ensure_future(run) for run in (self._ask(), self._watch())]

    async def report(self) -> pb.PoolReport:
        """Raises grpc.aio.AioRpcError."""
        request = pb.PoolReportRequest()
        return await self._stub().Report(request, timeout=PATIENCE_S, metadata=self._metadata)

    def _stub(self) -> pool_node_pb2_grpc.PoolNodeStub:
        return pool_node_pb2_grpc.PoolNodeStub(self._channel.latest())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()

    async def _watch(self) -> None:
        """Follows its stream, and starts again when that ends."""
        told = ""
        while True:
            reason = await self._follow()
            if reason not in ("", told):
                log.warning("pool node at %s does not stream its blocks: %s", self.address, reason)
            told = reason
            await asyncio.sleep(PERIOD_S)

    async def _follow(self) -> str:
        """Returns when the stream ends: the reason, or nothing if the node is silent. The router
        then forgets the node's blocks."""
        nodes: set[Incarnation] = set()
        request = pb.WatchRequest(wire_version=WIRE_VERSION)
        stream = self._stub().Watch(request, metadata=self._metadata)
        try:
            async for message in stream:
                nodes.add(Incarnation(message.node))
                self._post(PoolNodeSaid(update=decode_update(message)))
        except grpc.aio.AioRpcError as error:
            is_silent = error.code() is grpc.StatusCode.UNAVAILABLE
            return "" if is_silent else error.details() or error.code().name
        except PeerError as error:
            return str(error)
        except Exception as error:
            log.exception("an update of the pool node at %s was not handled well", self.address)
            return repr(error)
        finally:
            stream.cancel()
            for node in nodes:
                self._post(PoolNodeLost(node=node))
        return "it closed the stream"

    async def _ask(self) -> None:
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
    """`post` receives the changes of the nodes' blocks."""

    def __init__(self, post: _Post, access: Access = NO_ACCESS) -> None:
        self._post = post
        self._access = access
        self._links: dict[str, PoolNodeLink] = {}  # address |-> link

    def add(self, address: str) -> None:
        if address not in self._links:
            self._links[address] = PoolNodeLink(address, self._post, self._access)

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
        """The reports of nodes that answer."""
        return tuple(_status(link.latest) for link in self.links() if link.latest is not None)


def _status(report: pb.PoolReport) -> PoolNodeStatus:
    return PoolNodeStatus(
        name=report.name,
        orphaned_blocks=report.orphaned_blocks,
        blocks={(t.tier, s.state): s.blocks for t in report.tiers for s in t.states},
        pauses=GcPauses(report.gc_pauses, report.gc_pause_s, report.gc_longest_pause_s),
    )
