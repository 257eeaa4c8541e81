"""Workers in threads of this process, so that a test can look into them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import pytest
import uvloop

from cluster.core.settings import WorkerSettings
from cluster.worker.device import WorkerDevice
from cluster.worker.events import RunOnLoop
from cluster.worker.loop import WorkerLoop
from cluster.worker.process import WorkerProcess
from decode_worker.peers import PeerPools
from kvpool.core.transfer.link_cost import LinkCost
from kvpool.memory.kv_memory import KvMemory
from kvrelay.types import Incarnation
from tests.integration.split_kit import PATIENCE_S

READ_DIRECTLY = LinkCost(
    transport="shm",
    latency_s=0.0,
    bytes_per_s=1.0,
    descriptor_s=0.0,
    direct_bytes_per_s=1e9,
    gather_bytes_per_s=1e9,
    scatter_bytes_per_s=1e9,
    run_s=0.0,
)
USE_SLABS = LinkCost(
    transport="shm",
    latency_s=0.0,
    bytes_per_s=1e9,
    descriptor_s=1.0,
    direct_bytes_per_s=1e9,
    gather_bytes_per_s=1e9,
    scatter_bytes_per_s=1e9,
    run_s=0.0,
)


@contextmanager
def unmeasured() -> Iterator[None]:
    """What links cost is only what LocalHost.knows says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PeerPools, "measured", lambda pools, peer, cost: None)
        yield


class LocalHost:
    """As WorkerHost, but here."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._worker: WorkerProcess | None = None

    @property
    def loop(self) -> WorkerLoop:
        """Its state is the loop's thread's: look only when nothing happens."""
        assert self._worker is not None and self._worker._parts is not None
        return self._worker._parts.loop

    @property
    def device(self) -> WorkerDevice:
        assert self._worker is not None and self._worker._parts is not None
        return self._worker._parts.device

    @property
    def memory(self) -> KvMemory:
        """Its KV pool."""
        engine: Any = self.device._engine
        memory: KvMemory = engine.memory
        return memory

    @property
    def incarnation(self) -> Incarnation:
        assert self._worker is not None and self._worker._parts is not None
        return self._worker._parts.hello.incarnation

    def knows(self, peer: LocalHost, cost: LinkCost) -> None:
        """As if the link had been measured so, whatever is measured."""
        pools, incarnation = self.loop.core.decode.reservations.peers, peer.incarnation
        self.loop.inbox.put(RunOnLoop(lambda: pools._costs.__setitem__(incarnation, cost)))

    def start(self, settings: WorkerSettings) -> str:
        self._worker = WorkerProcess(settings)
        return str(self._call(self._worker.start()))

    def stop(self, address: str) -> None:
        assert self._worker is not None
        self._call(self._worker.stop(drain_s=5))

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
