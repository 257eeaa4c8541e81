"""A real cluster for tests: a router in a thread of this process, workers in other processes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx
import uvloop

from cluster.core.desired import pool_of
from cluster.core.settings import RouterSettings, WorkerSettings
from cluster.router.process import RouterProcess
from kvrelay.types import Role
from router.core.policy.choice import Policies
from router.core.state.generation import WorkerStatus
from tests.access import ACCESS, HEADERS
from tests.forks import forks
from tests.integration import worker_host
from tests.integration.worker_host import (
    Command,
    Damage,
    Failed,
    Hang,
    Poison,
    SlowStores,
    Stall,
    Start,
    Stop,
)

PATIENCE_S = 60.0
T = TypeVar("T")
ALWAYS_SPLIT = Policies(local_prefill=False)


def wait_until(condition: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    deadline_s = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline_s, f"gave up waiting until {what}"
        time.sleep(0.005)


def worker_settings(name: str, role: Role, model: Path, **changes: Any) -> WorkerSettings:
    """Small and exact: fp32, 16-token blocks, 64-token chunks."""
    plain = WorkerSettings(
        name=name,
        pool=pool_of(name),
        role=role,
        model=str(model),
        revision=None,
        device="cpu",
        dtype="float32",
        block_size=16,
        prefill_chunk_tokens=64,
        max_running_requests=16,
        max_model_len=None,
        memory_fraction=0.2,
        kv_memory_bytes=64 * 2**20,
        prefix_caching=True,
        eviction="lru",
        compile="auto",
        profile="off",
        device_share=2,
        cpu_threads=1,
        transports=("shm",),
        handoff="push",
        codec="none",
        allow_mixed_precision=False,
        require=(),
        ucx=(),
        staging_slabs=4,
        staging_bytes=None,
        canary_every=0,
        lease_ttl_s=30.0,
        host="127.0.0.1",
        port_range=None,
        pool_address=None,
        access=ACCESS,
    )
    return replace(plain, **changes)


def split_workers(
    hosts: tuple[WorkerHost, WorkerHost], model: Path, **changes: Any
) -> list[tuple[WorkerHost, WorkerSettings]]:
    """One prefill and one decode worker, in two processes."""
    return [
        (hosts[0], worker_settings("prefill-0", Role.PREFILL, model, **changes)),
        (hosts[1], worker_settings("decode-0", Role.DECODE, model, **changes)),
    ]


class WorkerHost:
    """Another process that hosts workers (tests/integration/worker_host.py)."""

    def __init__(self) -> None:
        self._commands, theirs = forks().Pipe()
        self.process = forks().Process(target=worker_host.serve, args=(theirs,))
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def start(self, settings: WorkerSettings) -> str:
        answer = self._ask(Start(settings))
        assert isinstance(answer, str), answer
        return answer

    def stop(self, address: str, drain_s: float = 5.0) -> None:
        """A host that has died has nothing to stop."""
        if self.process.is_alive():
            self._ask(Stop(address, drain_s))

    def damage(self, address: str, *, pieces: int) -> None:
        """The next pieces of KV that this worker receives end up wrong."""
        self._ask(Damage(address, pieces))

    def hang(self, address: str, *, least_s: float) -> None:
        """This worker's next step never ends; it is given up after `least_s`."""
        self._ask(Hang(address, least_s))

    def poison(self, address: str, *, token: int, how: str) -> None:
        """A step with this token ends the worker's process: raises, segfault or killed."""
        self._ask(Poison(address, token, how))

    def slow_stores(self, address: str, *, seconds: float) -> None:
        """What this worker stores in its pool node takes so long from now on."""
        self._ask(SlowStores(address, seconds))

    def stall(self) -> None:
        """No copy of its workers over a network moves a byte any more."""
        self._ask(Stall())

    def kill(self) -> None:
        """Returns when it is dead."""
        self.process.kill()
        self.process.join(PATIENCE_S)

    def _ask(self, command: Command) -> str | Failed:
        try:
            self._commands.send(command)
            answer: str | Failed = self._commands.recv()
        except (EOFError, OSError):
            raise AssertionError("the worker host died") from None
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._commands.close()
        self.process.join(PATIENCE_S)
        assert self.process.exitcode is not None, "it ends with its commands"
        self.process.close()


class RouterThread:
    """A RouterProcess in its own event loop."""

    def __init__(self, model: Path, **changes: Any) -> None:
        plain = RouterSettings(
            preload=(),
            name="test",
            process="router-0",
            model=str(model),
            revision=None,
            served_model_name="test-model",
            host="127.0.0.1",
            http_port=0,
            grpc_port=0,
            internal_host="127.0.0.1",
            internal_http_port=0,
            internal_grpc_port=0,
            max_body_bytes=4 * 2**20,
            policies=ALWAYS_SPLIT,
            access=ACCESS,
        )
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.process = RouterProcess(replace(plain, **changes))
        self.address = self.call(self.process.start())

    def call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE_S)

    def read(self, found: Callable[[], T]) -> T:
        """In its own thread: what that one changes meanwhile, no other can iterate over."""

        async def of() -> T:
            return found()

        result: T = self.call(of())
        return result

    def workers(self) -> tuple[WorkerStatus, ...]:
        return self.read(self.process.dispatcher.workers)

    def close(self, drain_s: float = 2.0) -> None:
        self.call(self.process.stop(drain_s=drain_s))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@dataclass
class Cluster:
    router: RouterThread
    http: httpx.Client

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.router.address.public.grpc}"

    @property
    def internal_grpc(self) -> str:
        return f"127.0.0.1:{self.router.address.internal.grpc}"

    @property
    def internal_url(self) -> str:
        return f"http://127.0.0.1:{self.router.address.internal.http}"

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self.router.address.public.http}"

    def add(self, host: WorkerHost, settings: WorkerSettings) -> str:
        """One more worker; it is the caller's to stop, by its address."""
        address = host.start(settings)
        self.join(address, settings.name)
        return address

    def join(self, address: str, name: str) -> None:
        before = len(self.router.workers())
        self.router.call(self.router.process.add_worker(address))
        wait_until(lambda: len(self.router.workers()) > before, f"{name} joined")

    def add_pool_node(self, address: str) -> None:
        self.router.call(self.router.process.add_pool_node(address))

    def completion(
        self, prompt: list[int] | list[list[int]] | str, **fields: Any
    ) -> dict[str, Any]:
        body = {"model": "test-model", "prompt": prompt, "return_token_ids": True, **fields}
        response = self.http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def kv(self) -> list[dict[str, Any]]:
        found = httpx.get(f"{self.internal_url}/debug/kv", headers=HEADERS, timeout=PATIENCE_S)
        workers: list[dict[str, Any]] = found.json()["workers"]
        return workers

    def metrics(self) -> str:
        metrics = f"{self.internal_url}/metrics"
        return httpx.get(metrics, headers=HEADERS, timeout=PATIENCE_S).text

    def assert_clean(self) -> None:
        """Soon after the last request nothing is held anywhere."""

        def clean() -> bool:
            return all(_free(w) and not w["slabs"] for w in self.kv())

        wait_until(clean, f"nothing is held: {self.kv()}", 20.0)
        assert all(worker["orphaned_blocks"] == 0 for worker in self.kv())
        assert self.router.process.dispatcher.running_requests() == 0


@contextmanager
def running_cluster(
    model: Path, workers: list[tuple[WorkerHost, WorkerSettings]], **router: Any
) -> Iterator[Cluster]:
    """A router and these workers, ready; all stopped and clean at the end."""
    thread = RouterThread(model, **router)
    url = f"http://127.0.0.1:{thread.address.public.http}"
    started: list[tuple[WorkerHost, str]] = []
    try:
        for host, settings in workers:
            started.append((host, host.start(settings)))
            thread.call(thread.process.add_worker(started[-1][1]))
        wait_until(lambda: len(thread.workers()) == len(workers), "all workers joined")
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as http:
            cluster = Cluster(thread, http)
            yield cluster
            cluster.assert_clean()
    finally:
        thread.close()
        for host, address in started:
            host.stop(address)


def _free(worker: dict[str, Any]) -> bool:
    """Nothing is held but what was pinned for good."""
    held = worker["held"]
    pinned = sum(len(one["block_ids"]) for one in held if one["holder"].startswith("pinned"))
    available = worker["free_blocks"] + worker["cached_blocks"]
    only_pins = all(one["holder"].startswith("pinned") for one in held)
    return bool(only_pins and available + pinned == worker["total_blocks"])
