"""A pool node's gRPC face, by which routers watch it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

import grpc

from kvrelay.v1 import pool_node_pb2 as pb
from kvrelay.v1 import pool_node_pb2_grpc


class PoolNodeService(pool_node_pb2_grpc.PoolNodeServicer):
    """`ask` has the loop answer, between two events."""

    def __init__(self, ask: Callable[[Future[pb.PoolReport]], None]) -> None:
        self._ask = ask

    async def Report(  # noqa: N802
        self, request: pb.PoolReportRequest, context: grpc.aio.ServicerContext
    ) -> pb.PoolReport:
        answer: Future[pb.PoolReport] = Future()
        self._ask(answer)
        return await asyncio.wrap_future(answer)
