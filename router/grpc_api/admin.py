"""kvrelay.v1.Admin on a router's public gRPC port."""

from __future__ import annotations

import grpc

from kvrelay.v1 import admin_pb2 as pb
from kvrelay.v1 import admin_pb2_grpc
from router.generation import Dispatcher


class AdminFace(admin_pb2_grpc.AdminServicer):
    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    async def GetKv(  # noqa: N802
        self, request: pb.GetKvRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetKvResponse:
        return await self._dispatcher.debug_kv()
