"""NIXL's agent: host memory registered once, one-sided transfers over UCX (RDMA, CMA, TCP).

The package is loaded when the first agent is made. Its bindings are used directly: its Python
class cannot set the progress thread's delay, and without one that thread never sleeps.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from types import ModuleType
from typing import Any

import numpy as np
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
        self._registered: list[torch.Tensor] = []  # memory adopted twice is in it twice

    def register(self, memory: torch.Tensor) -> None:
        with self._lock:
            self._agent.registerMem(self._registration(memory), self._backends)
            self._registered.append(memory)

    def deregister(self, memory: torch.Tensor) -> None:
        """Once for each `register` of this very tensor; what has gone is let be."""
        with self._lock:
            at = next((i for i, m in enumerate(self._registered) if m is memory), None)
            if at is not None:
                del self._registered[at]
                self._agent.deregisterMem(self._registration(memory), self._backends)

    def close(self) -> None:
        """Deregisters what is left and frees the agent, once no transfer runs."""
        for memory in list(self._registered):
            self.deregister(memory)
        self._agent = None

    def owned(self, pieces: Sequence[torch.Tensor]) -> list[bool]:
        """Of each piece, whether all of it lies in one registered piece of memory."""
        with self._lock:
            spans = [(m.data_ptr(), m.data_ptr() + m.numel()) for m in self._registered]
        starts = np.array([piece.data_ptr() for piece in pieces], dtype=np.uint64)
        ends = starts + np.array([piece.nbytes for piece in pieces], dtype=np.uint64)
        found = np.zeros(len(pieces), dtype=bool)
        for start, end in spans:
            found |= (starts >= start) & (ends <= end)
        owned: list[bool] = found.tolist()
        return owned

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
        pieces: Sequence[tuple[torch.Tensor, int]],
        peer: str,
        check: Callable[[], None],
    ) -> None:
        """One batch: registered memory here, and addresses in the peer's. Returns once all bytes
        have arrived. Raises PeerError when they could not, and what `check` raises once it has
        taken long."""
        kind = getattr(self._nixl, operation.value)
        here = self._spans((local.data_ptr(), local.nbytes, 0) for local, _ in pieces)
        there = self._spans((address, local.nbytes, 0) for local, address in pieces)
        try:
            agent = self._open()
            request = agent.createXferReq(kind, here, there, peer, "", self._backends)
            try:
                self._finish(agent, request, check)
            finally:
                agent.releaseXferReq(request)
        except self._errors as error:
            raise PeerError(f"NIXL could not move {len(pieces)} pieces: {error}") from error

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

    def _spans(self, spans: Iterable[tuple[int, int, int]]) -> object:
        """Addresses, lengths and devices."""
        return self._nixl.nixlXferDList(self._nixl.DRAM_SEG, list(spans))


def _load() -> ModuleType:
    for package in _PACKAGES:
        try:
            return importlib.import_module(f"{package}._bindings")
        except ModuleNotFoundError:
            continue
    raise ConfigError("transport 'nixl' needs its extra: pip install 'kvrelay[nixl]'")
