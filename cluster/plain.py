"""`kvrelay router`, `kvrelay worker` and `kvrelay pool-node` as ordinary processes, without Ray.

The worker makes itself known to the router by a call that stays open; when the router goes away it
tries again. SIGTERM or SIGINT drains and exits.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator

import grpc

from cluster.pool_node import PoolNode
from cluster.router import RouterProcess
from cluster.settings import PoolNodeSettings, RouterSettings, WorkerSettings
from cluster.worker import WorkerProcess
from kvrelay.v1 import worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.2
LAST_RETRY_S = 5.0


async def run_router(settings: RouterSettings, *, drain_s: float) -> None:
    """Serve until SIGTERM or SIGINT, then drain."""
    stopping = _stop_signals()
    router = RouterProcess(settings)
    address = await router.start()
    print(f"HTTP on {settings.host}:{address.http_port}", flush=True)
    print(f"gRPC on {settings.host}:{address.grpc_port}", flush=True)
    await stopping.wait()
    await router.stop(drain_s=drain_s)


async def run_worker(settings: WorkerSettings, *, join: str, drain_s: float) -> None:
    """Serve until SIGTERM or SIGINT; raises what made the worker stop by itself."""
    stopping = _stop_signals()
    worker = WorkerProcess(settings)
    address = await worker.start()
    print(f"{settings.role} worker on {address}", flush=True)
    waits = [stopping.wait(), worker.wait_closed(), stay_registered(join, address)]
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    await worker.stop(drain_s=drain_s)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    for task in done:
        task.result()


async def run_pool_node(settings: PoolNodeSettings, *, drain_s: float) -> None:
    """Serve until SIGTERM or SIGINT; raises what made the node stop by itself."""
    stopping = _stop_signals()
    node = PoolNode(settings)
    for address in await node.start():
        print(f"pool node of {settings.name} on {address}", flush=True)
    tasks = [asyncio.ensure_future(wait) for wait in (stopping.wait(), node.wait_closed())]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    await node.stop(drain_s=drain_s)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    for task in done:
        task.result()


async def stay_registered(join: str, address: str) -> None:
    """Keep the registration call open, for ever; the router drops the worker when it ends."""
    retry_s = FIRST_RETRY_S
    while True:
        joined = await _register(join, address)
        retry_s = FIRST_RETRY_S if joined else min(2 * retry_s, LAST_RETRY_S)
        await asyncio.sleep(retry_s)


async def _register(join: str, address: str) -> bool:
    """Whether the router took the worker; returns when the call has ended."""
    joined = asyncio.Event()

    async def registration() -> AsyncIterator[worker_pb2.RegisterRequest]:
        yield worker_pb2.RegisterRequest(address=address)
        joined.set()
        await asyncio.Event().wait()

    async with grpc.aio.insecure_channel(join) as channel:
        try:
            await worker_pb2_grpc.RegistryStub(channel).Register(registration())
        except grpc.aio.AioRpcError as error:
            log.warning("router %s: %s; trying again", join, error.details())
    return joined.is_set()


def _stop_signals() -> asyncio.Event:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    return stopping
