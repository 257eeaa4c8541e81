"""The same cluster on a Ray of its own: faults hit the controller too, and it restarts the others.

`kvrelay serve` runs as a user starts it. Which process is which is told by Ray's table of actors.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import psutil

from bench.chaos.clusters.plain import ChaosCluster, Shape, free_ports, settings_of
from bench.chaos.clusters.processes import (
    LOOK_EVERY_S,
    Ended,
    Process,
    kept_environment,
    kvrelay_command,
)
from kvrelay import AsyncClient
from kvrelay.errors import KvrelayError

NAME = "chaos"
SERVES = r"^  gRPC  (\S+)$"
RAY_AT = r"Ray has started at (\S+)"
INTERNAL_ABOVE = 900
CONTROLLER = "controller"
START_S = 180.0


@dataclass(slots=True, kw_only=True)
class ActorProcess(Process):
    """The worker process of an actor. `at`: its gRPC address, once it serves. `ends` stays empty:
    the supervisor kills what hangs, so an end may have been asked for by nobody here."""

    at: str = ""
    actor_pid: int = 0

    @property
    def pid(self) -> int:
        return self.actor_pid

    @property
    def runs(self) -> bool:
        return self.actor_pid > 0 and psutil.pid_exists(self.actor_pid)

    def address(self) -> str:
        return self.at if self.runs else ""

    def becomes(self, pid: int) -> None:
        if pid != self.actor_pid:
            self.actor_pid, self.at = pid, ""
            self.starts += 1
            self.stopped = self.killed = False


@dataclass(slots=True, kw_only=True)
class RayCluster:
    """The command that serves, and its actors. Stands for the supervisor of plain processes."""

    driver: Process
    routers: Sequence[str]
    processes: dict[str, Process] = field(default_factory=dict)
    mark: str
    ends: list[Ended] = field(default_factory=list)
    _looking: asyncio.Task[None] | None = None

    def of_role(self, *roles: str) -> list[Process]:
        return [one for one in self.processes.values() if one.role in roles]

    def watch(self) -> None:
        self._looking = asyncio.create_task(self._look())

    async def _look(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(10 * LOOK_EVERY_S)

    async def look(self) -> None:
        """Which process each actor is now, and which of them serve."""
        for name, pid in (await asyncio.to_thread(_actors)).items():
            if name not in self.processes:
                self.processes[name] = _actor_process(name)
            process = self.processes[name]
            assert isinstance(process, ActorProcess)
            process.becomes(pid)
        await self._find_addresses()

    async def _find_addresses(self) -> None:
        found = {f"router-{n}": at for n, at in enumerate(self.routers)}
        for router in self.routers:
            with suppress(KvrelayError, TimeoutError):
                async with AsyncClient(router, timeout_s=1.0) as client:
                    workers = (await client.server_info()).workers
                    found |= {worker.name: worker.address for worker in workers}
                    break
        for name, process in self.processes.items():
            assert isinstance(process, ActorProcess)
            process.at = found.get(name, "actor" if process.role in ("pool", CONTROLLER) else "")

    async def close(self, patience_s: float = 60.0) -> list[str]:
        """Asks the command to stop, which stops all."""
        import ray

        ray.shutdown()
        if self._looking is not None:
            self._looking.cancel()
        for process in self.processes.values():
            process.signal(signal.SIGCONT)
        self.driver.signal(signal.SIGTERM)
        deadline_s = time.monotonic() + patience_s
        while self.driver.runs and time.monotonic() < deadline_s:
            await asyncio.sleep(LOOK_EVERY_S)
        if self.driver.runs:
            self.driver.signal(signal.SIGKILL)
            return [f"kvrelay serve did not end within {patience_s:g} s"]
        code = self.driver.exit_code()
        return [f"kvrelay serve ended with {code}"] if code else []


@asynccontextmanager
async def ray_cluster(shape: Shape, logs: Path) -> AsyncIterator[ChaosCluster]:
    """Everything has joined, the pool node too. At the end everything is ended."""
    os.environ["RAY_AUTH_MODE"] = "token"  # read when Ray is imported
    first = free_ports(1)[0]
    routers = [f"127.0.0.1:{first + n}" for n in range(shape.routers)]
    internal = [f"127.0.0.1:{first + INTERNAL_ABOVE + n}" for n in range(shape.routers)]
    serving = RayCluster(driver=_driver(shape, first, logs), routers=routers, mark=uuid4().hex)
    serving.driver.environment = kept_environment(serving.mark)
    serving.driver.start()
    try:
        await _until(lambda: bool(serving.driver.address()), "kvrelay serve")
        _join(serving.driver.log_of_this_start)
        wanted = 1 + shape.routers + shape.prefill + shape.decode + 1
        serving.watch()
        await _until(lambda: len(serving.processes) == wanted, "its actors")
        cluster = ChaosCluster(supervisor=serving, shape=shape, routers=routers, internal=internal)
        await cluster.until_joined()
        yield cluster
    finally:
        await serving.close()


def _driver(shape: Shape, grpc_port: int, logs: Path) -> Process:
    roles = {"prefill": shape.prefill, "decode": shape.decode}
    workers = ", ".join(f"{{role: {role}, replicas: {n}}}" for role, n in roles.items())
    given = {
        "name": NAME,
        "workers": f"[{workers}]",
        "model.dtype": "float32",
        "engine.kv_memory": f"{shape.kv_mib}MiB",
        "scheduler.max_running_requests": 128,
        "router.replicas": shape.routers,
        "router.http_port": 0,
        "router.grpc_port": grpc_port,
        "pool.enabled": "on",
        "pool.host_memory": f"{shape.pool_mib}MiB",
    }
    command = kvrelay_command("serve", *settings_of(given))
    log = logs / "serve.log"
    return Process(
        name="serve", role="driver", command=command, log=log, ready=SERVES, environment={}
    )


def _join(log: str) -> None:
    """To the Ray that the command has started."""
    import ray

    at = re.search(RAY_AT, log)
    assert at is not None, log
    ray.init(address=at[1], log_to_driver=False, logging_level="ERROR")


def _actor_process(name: str) -> ActorProcess:
    return ActorProcess(
        name=name,
        role=name.partition("-")[0],
        command=(),
        log=Path(os.devnull),
        ready="",
        environment={},
    )


def _actors() -> dict[str, int]:
    """# process of the cluster |-> its process id, of those that live"""
    from ray._private import state

    living = state.actors(actor_state_name="ALIVE").values()
    named = [(one["Name"].partition("/"), one["Pid"]) for one in living]
    return {name: pid for (of, _, name), pid in named if of == NAME and name}


async def _until(holds: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + START_S
    while not holds():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{what}: not there within {START_S:g} s")
        await asyncio.sleep(LOOK_EVERY_S)
