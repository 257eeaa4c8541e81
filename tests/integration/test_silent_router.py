"""A router that is silent for too long, as when its host is gone: its calls end."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator

import grpc
import pytest

from cluster.process import net
from kvrelay.v1 import worker_pb2 as pb
from kvrelay.v1 import worker_pb2_grpc
from tests.access import ACCESS
from tests.integration.faces_kit import in_loop

ROUTER = """
import sys, time, grpc
from tests.access import ACCESS
from kvrelay.v1 import worker_pb2 as pb, worker_pb2_grpc

def said():
    yield pb.ToWorker()
    time.sleep(600)

with grpc.insecure_channel(sys.argv[1]) as channel:
    for _ in worker_pb2_grpc.WorkerStub(channel).Attach(said(), metadata=ACCESS.metadata):
        pass
"""


class Worker(worker_pb2_grpc.WorkerServicer):
    def __init__(self) -> None:
        self.heard, self.ended = asyncio.Event(), asyncio.Event()

    async def Attach(  # noqa: N802
        self, requests: AsyncIterator[pb.ToWorker], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.FromWorker]:
        try:
            yield pb.FromWorker()
            async for _ in requests:
                self.heard.set()
        finally:
            self.ended.set()


@in_loop
async def test_a_worker_lets_go_of_a_router_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(net, "PING_MS", 300)
    monkeypatch.setattr(net, "PATIENCE_MS", 300)
    server, worker = net.grpc_server(ACCESS), Worker()
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)
    port = net.bind_port(server, "127.0.0.1", None, ACCESS)
    await server.start()
    router = subprocess.Popen([sys.executable, "-c", ROUTER, f"127.0.0.1:{port}"])
    try:
        await worker.heard.wait()
        assert not worker.ended.is_set()
        router.send_signal(signal.SIGSTOP)
        await worker.ended.wait()
    finally:
        router.kill()
        router.wait()
        await server.stop(0)
