"""What the workers and pool nodes of a cluster hold, asked now: `/debug/kv` and Admin.GetKv."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import grpc

from kvrelay.v1 import admin_pb2 as pb
from kvrelay.v1.pool_node_pb2 import PoolReport
from kvrelay.v1.worker_pb2 import DebugKvResponse
from router.link import WorkerLink
from router.pool_nodes import PoolNodeLink

Report = TypeVar("Report")


async def kv_reports(
    workers: Iterable[WorkerLink],
    pool_nodes: Iterable[PoolNodeLink],
    tenant_of: Callable[[str], str],
) -> pb.GetKvResponse:
    """`tenant_of` a request's id, as reports show it; empty where it isn't known."""
    answers, pools = await asyncio.gather(
        asyncio.gather(*(_asked(link.debug_kv(), link.address) for link in workers)),
        asyncio.gather(*(_asked(link.report(), link.address) for link in pool_nodes)),
    )
    found = pb.GetKvResponse()
    for answer in (*answers, *pools):
        _add(found, answer)
    _name(found, tenant_of)
    return found


async def _asked(asked: Awaitable[Report], address: str) -> Report | pb.SilentProcess:
    """One that does not answer hides none of the others."""
    try:
        return await asked
    except grpc.aio.AioRpcError as error:
        return pb.SilentProcess(address=address, error=error.details() or error.code().name)


def _add(found: pb.GetKvResponse, answer: object) -> None:
    match answer:
        case pb.SilentProcess():
            found.silent.append(answer)
        case DebugKvResponse():
            found.workers.append(answer)
        case PoolReport():
            found.pool_nodes.append(answer)


def _name(found: pb.GetKvResponse, tenant_of: Callable[[str], str]) -> None:
    for held in (held for worker in found.workers for held in worker.held):
        held.tenant = tenant_of(held.request_id)
    names = {worker.incarnation: worker.worker for worker in found.workers}
    for pool_held in (held for node in found.pool_nodes for held in node.held):
        pool_held.worker = names.get(pool_held.worker, pool_held.worker)
