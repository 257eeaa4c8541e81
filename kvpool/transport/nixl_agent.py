"""NIXL's agent: host memory registered once, one-sided transfers over UCX (RDMA, CMA, TCP).

The package is loaded when the first agent is made. Its bindings are used directly: its Python
class cannot set the progress thread's delay, and without one that thread never sleeps.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable
from enum import Enum
from types import ModuleType
from typing import Any

import torch

from kvrelay.errors import ConfigError, PeerError

_PACKAGES = ("nixl_cu12", "nixl_cu13")
_BACKEND = "UCX"
_PROGRESS_SLEEP_US = 100_000  # at most; the thread wakes when there is work
_SPIN_S = 200e-6
_POLL_S = 50e-6
_GRACE_S = 1.0
"""How long a transfer may run before it is asked whether its peer is still there."""


class Operation(Enum):
    WRITE = "NIXL_WRITE"
    READ = "NIXL_READ"


class Agent:
    """Thread safe. Memory is uint8 `[bytes]` on the host throughout."""

    def __init__(self, name: str) -> None:
        """Raises ConfigError when the package is not installed."""
        nixl = self._nixl = _load()
        self._errors = tuple(v for k, v in vars(nixl).items() if k.endswith("Error"))
        config = nixl.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = _PROGRESS_SLEEP_US
        config.syncMode = nixl.NIXL_THREAD_SYNC_RW
        self._agent: Any = nixl.nixlAgent(name, config)
        self._backends = [self._agent.createBackend(_BACKEND, {})]
        self._lock = threading.Lock()
        self._registered: dict[int, torch.Tensor] = {}  # address |-> memory

    def register(self, memory: torch.Tensor) -> None:
        with self._lock:
            self._agent.registerMem(self._registration(memory), self._backends)
            self._registered[memory.data_ptr()] = memory

    def deregister(self, memory: torch.Tensor) -> None:
        with self._lock:
            if self._registered.pop(memory.data_ptr(), None) is not None:
                self._agent.deregisterMem(self._registration(memory), self._backends)

    def close(self) -> None:
        """Deregisters what is left and frees the agent, once no transfer runs."""
        for memory in list(self._registered.values()):
            self.deregister(memory)
        self._agent = None

    def owns(self, data: torch.Tensor) -> bool:
        """Whether all of `data` lies in one registered piece of memory."""
        start, end = data.data_ptr(), data.data_ptr() + data.numel()
        with self._lock:
            return any(a <= start and end <= a + m.numel() for a, m in self._registered.items())

    def describe(self, memory: torch.Tensor) -> bytes:
        """What a peer's `add_peer` needs to reach this registered memory."""
        described: bytes = self._agent.getLocalPartialMD(
            self._registration(memory), True, self._backends
        )
        return described

    def add_peer(self, description: bytes) -> str:
        """The name of the peer's agent. Raises PeerError."""
        try:
            name: bytes = self._open().loadRemoteMD(description)
        except self._errors as error:
            raise PeerError(f"NIXL cannot use what the peer told of its memory: {error}") from error
        return name.decode()

    def drop_peer(self, name: str) -> None:
        """Forget everything that was added under this name."""
        self._open().invalidateRemoteMD(name)

    def transfer(
        self,
        operation: Operation,
        local: torch.Tensor,
        peer: str,
        address: int,
        check: Callable[[], None],
    ) -> None:
        """Returns once the bytes have arrived. `local` is registered; `address` is the peer's.
        Raises PeerError when they could not, and what `check` raises once it has taken long."""
        kind = getattr(self._nixl, operation.value)
        here, there = self._span(local.data_ptr(), local), self._span(address, local)
        try:
            agent = self._open()
            request = agent.createXferReq(kind, here, there, peer, "", self._backends)
            try:
                self._finish(agent, request, check)
            finally:
                agent.releaseXferReq(request)
        except self._errors as error:
            raise PeerError(f"NIXL could not move {local.numel()} bytes: {error}") from error

    def _finish(self, agent: Any, request: int, check: Callable[[], None]) -> None:
        started_s = time.monotonic()
        status = agent.postXferReq(request)
        while status == self._nixl.NIXL_IN_PROG:
            waited_s = time.monotonic() - started_s
            if waited_s > _GRACE_S:
                check()
            time.sleep(_POLL_S if waited_s > _SPIN_S else 0.0)
            status = agent.getXferStatus(request)
        if status != self._nixl.NIXL_SUCCESS:
            raise PeerError(f"a transfer ended with {status}")

    def _open(self) -> Any:
        if self._agent is None:
            raise PeerError("this end of the link is closed")
        return self._agent

    def _registration(self, memory: torch.Tensor) -> object:
        piece = (memory.data_ptr(), memory.numel(), 0, "")
        return self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [piece])

    def _span(self, address: int, data: torch.Tensor) -> object:
        return self._nixl.nixlXferDList(self._nixl.DRAM_SEG, [(address, data.numel(), 0)])


def _load() -> ModuleType:
    for package in _PACKAGES:
        try:
            return importlib.import_module(f"{package}._bindings")
        except ModuleNotFoundError:
            continue
    raise ConfigError("transport 'nixl' needs its extra: pip install 'kvrelay[nixl]'")
