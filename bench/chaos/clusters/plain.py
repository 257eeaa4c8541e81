"""A cluster of plain processes: routers, prefill and decode workers, a pool node; who serves what.

With a second host half of the workers are in its network namespace: they share no memory with the
others.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import grpc

from bench.access import ACCESS
from bench.chaos.clusters.host import SecondHost
from bench.chaos.clusters.processes import Process, Processes, Supervisor, kvrelay_command
from kvrelay import AsyncClient
from kvrelay.errors import KvrelayError
from kvrelay.v1 import admin_pb2, worker_pb2
from kvrelay.v1.admin_pb2_grpc import AdminStub
from kvrelay.v1.worker_pb2_grpc import WorkerStub

WORKER_READY = r"^(?:prefill|decode) worker on (\S+)$"
ROUTER_READY = r"^internal gRPC on (\S+)$"
POOL_READY = r"^internal gRPC on (\S+)$"
ASK_S = 1.5
FIRST_PORT, LAST_PORT = 20_000, 30_000
_MESSAGES = [("grpc.max_receive_message_length", -1)]
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """`kv_mib`: of each worker. `disk`: a folder for the disk tier."""

    routers: int = 2
    prefill: int = 2
    decode: int = 2
    kv_mib: int = 256
    pool_mib: int = 128
    disk: Path | None = None
    disk_mib: int = 256
    second_host: SecondHost | None = None


@dataclass(slots=True, kw_only=True)
class ChaosCluster:
    supervisor: Processes
    shape: Shape
    routers: Sequence[str]
    internal: Sequence[str]

    @property
    def workers(self) -> list[Process]:
        return self.supervisor.of_role("prefill", "decode")

    @property
    def roles(self) -> dict[str, str]:
        return {name: process.role for name, process in self.supervisor.processes.items()}

    @property
    def serving(self) -> list[str]:
        return [name for name, process in self.supervisor.processes.items() if process.serves]

    def is_far(self, name: str) -> bool:
        return self.shape.second_host is not None and name in _far_names(self.shape)

    async def until_joined(self, patience_s: float = 60.0) -> None:
        """Every router knows every worker and pool node. Raises TimeoutError."""
        deadline_s = time.monotonic() + patience_s
        while (missing := await self._missing()) and time.monotonic() < deadline_s:
            await asyncio.sleep(0.2)
        if missing:
            raise TimeoutError(f"not joined within {patience_s:g} s: {missing}")

    async def _missing(self) -> str:
        """In words; empty when all is there."""
        names = {worker.name for worker in self.workers}
        for address, internal in zip(self.routers, self.internal, strict=True):
            try:
                async with AsyncClient(address, timeout_s=5.0) as client:
                    known = {worker.name for worker in (await client.server_info()).workers}
                nodes = len((await kv_of(internal)).pool_nodes)
            except (KvrelayError, grpc.RpcError) as error:
                return f"router {address}: {error!r}"
            if known != names or nodes != len(self.supervisor.of_role("pool")):
                return f"router {address} knows {sorted(known)} and {nodes} pool nodes"
        return ""

    async def held_by(self, worker: Process) -> list[str] | None:
        """The ids of requests that it holds blocks for; None if it doesn't answer at once."""
        with suppress(grpc.RpcError):
            return [one.request_id for one in (await debug_kv(worker.address(), ASK_S)).held]
        return None


async def _ask(address: str, call: Callable[[grpc.aio.Channel], Awaitable[Answer]]) -> Answer:
    async with grpc.aio.insecure_channel(address, options=_MESSAGES) as channel:
        return await call(channel)


async def kv_of(internal: str, timeout_s: float = 10.0) -> admin_pb2.GetKvResponse:
    """As a router is told by all workers and pool nodes."""
    request = admin_pb2.GetKvRequest()
    return await _ask(
        internal, lambda c: AdminStub(c).GetKv(request, timeout=timeout_s, metadata=ACCESS.metadata)
    )


async def debug_kv(address: str, timeout_s: float) -> worker_pb2.DebugKvResponse:
    request = worker_pb2.DebugKvRequest()
    return await _ask(
        address,
        lambda c: WorkerStub(c).DebugKv(request, timeout=timeout_s, metadata=ACCESS.metadata),
    )


@asynccontextmanager
async def chaos_cluster(shape: Shape, logs: Path) -> AsyncIterator[ChaosCluster]:
    """Everything has joined. At the end everything is ended, whatever state it is in."""
    supervisor = Supervisor()
    host = "127.0.0.1" if shape.second_host is None else shape.second_host.near
    ports = free_ports(3 * shape.routers)
    try:
        for number in range(shape.routers):
            own = ports[3 * number : 3 * number + 3]
            supervisor.add(_router(supervisor, number, host, own, logs))
        internal = [f"{host}:{ports[3 * n + 1]}" for n in range(shape.routers)]
        pool = f"chaos-{uuid4().hex[:8]}"
        supervisor.add(_pool_node(supervisor, shape, pool, internal, logs))
        for role, count in (("prefill", shape.prefill), ("decode", shape.decode)):
            for number in range(count):
                supervisor.add(_worker(supervisor, shape, role, number, pool, internal, logs))
        await supervisor.until_served()
        cluster = ChaosCluster(
            supervisor=supervisor,
            shape=shape,
            routers=[f"{host}:{ports[3 * n]}" for n in range(shape.routers)],
            internal=internal,
        )
        await cluster.until_joined()
        supervisor.watch()
        yield cluster
    finally:
        await supervisor.close()


def _router(
    supervisor: Supervisor, number: int, host: str, ports: Sequence[int], logs: Path
) -> Process:
    grpc_port, internal_port, http_port = ports
    settings = {
        "router.internal_host": host,
        "router.internal_grpc_port": internal_port,
        "router.internal_http_port": 0,
    }
    name = f"router-{number}"
    command = kvrelay_command(
        *("router", f"--host={host}", f"--http-port={http_port}", f"--grpc-port={grpc_port}"),
        *settings_of(settings),
    )
    return _process(supervisor, name, "router", command, ROUTER_READY, logs)


def _worker(
    supervisor: Supervisor,
    shape: Shape,
    role: str,
    number: int,
    pool: str,
    internal: Sequence[str],
    logs: Path,
) -> Process:
    name = f"{role}-{number}"
    settings = {
        "model.dtype": "float32",
        "engine.kv_memory": f"{shape.kv_mib}MiB",
        "scheduler.max_running_requests": 128,
    }
    there = shape.second_host if name in _far_names(shape) else None
    inside = () if there is None else ("ip", "netns", "exec", there.name)
    command = [
        *inside,
        *kvrelay_command("worker", f"--role={role}", f"--name={name}", f"--pool={pool}"),
        *("--device=cpu", "--cpu-threads=1", "--cpu-pinning=off"),
        *(f"--join={address}" for address in internal),
        *settings_of(settings | ({} if there is None else {"network.host": there.far})),
    ]
    return _process(supervisor, name, role, command, WORKER_READY, logs)


def _pool_node(
    supervisor: Supervisor, shape: Shape, pool: str, internal: Sequence[str], logs: Path
) -> Process:
    disk = shape.disk and (f"--disk={shape.disk}", f"--disk-size={shape.disk_mib}MiB")
    far = () if shape.second_host is None else ("--transport=nixl",)
    command = kvrelay_command(
        *("pool-node", f"--name={pool}", f"--host-memory={shape.pool_mib}MiB"),
        *(f"--join={address}" for address in internal),
        *(disk or ()),
        *far,
    )
    return _process(supervisor, "pool-0", "pool", command, POOL_READY, logs)


def _far_names(shape: Shape) -> set[str]:
    """The second half of each role."""
    counts = (("prefill", shape.prefill), ("decode", shape.decode))
    return {f"{role}-{n}" for role, count in counts for n in range((count + 1) // 2, count)}


def settings_of(settings: dict[str, object]) -> list[str]:
    return [f"--set={key}={value}" for key, value in settings.items()]


def _process(
    supervisor: Supervisor, name: str, role: str, command: Sequence[str], ready: str, logs: Path
) -> Process:
    return Process(
        name=name,
        role=role,
        command=command,
        log=logs / f"{name}.log",
        ready=ready,
        environment=supervisor.environment(),
    )


def free_ports(count: int) -> list[int]:
    """Below those that the system gives to connections."""
    found: list[int] = []
    start = FIRST_PORT + uuid4().int % (LAST_PORT - FIRST_PORT - 1000)
    for port in range(start, LAST_PORT):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            found.append(port)
        if len(found) == count:
            break
    return found
