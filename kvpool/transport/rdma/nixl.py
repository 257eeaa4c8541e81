"""NIXL's agent: memory registered once, one-sided transfers over UCX (RDMA, CMA, TCP).

The package is loaded when the first agent is made. Its bindings are used directly: its Python class
cannot set the progress thread's delay, and without one that thread never sleeps.

Within a host the thread that waits is the one that copies. So it polls again at once, before
another thread of its process does so on another core. It doesn't use `time.sleep(0)`, which the
system rounds up to its shortest sleep.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from kvpool.transport.peer.base import RegionName
from kvpool.transport.peer.exposure import Check
from kvpool.transport.rdma.agent import (
    HOST,
    Operation,
    RegionPiece,
    RegionPlace,
    device_of,
    not_registered,
)
from kvpool.transport.rdma.ucx_options import UcxOptions
from kvrelay.errors import ConfigError, PeerError

_ASK_AGAIN = 4
_YIELD_S = 1e-3
_POLL_S = 50e-6
_POLL_STALLED_S = 1e-3
_GRACE_S = 1.0
"""After this time, a running transfer checks whether its peer is still there."""


class Waiting:
    """Waits for one transfer. `check` raises when the peer is gone."""

    def __init__(self, check: Check, poll_s: float = _POLL_S) -> None:
        self._check = check
        self._poll_s = poll_s
        self._started_s = time.monotonic()
        self._idle = 0

    def again(self, *, idle: bool = True) -> None:
        """Called between two polls; `idle`: the last one made no progress. Raises PeerError."""
        waited_s = time.monotonic() - self._started_s
        if waited_s > _GRACE_S:
            self._check()
        if not idle:
            return
        self._idle += 1
        if waited_s > _YIELD_S:
            time.sleep(self._poll_s)
        elif self._idle > _ASK_AGAIN:
            os.sched_yield()


_PACKAGES = ("nixl_cu12", "nixl_cu13")
_BACKEND = "UCX"
_PROGRESS_SLEEP_US = 100_000  # at most; the thread wakes when there is work
_DEFAULTS = {
    "UCX_USE_MT_MUTEX": "y",  # else NIXL's thread spins beside the one that copies within a host
}
_environment_lock = threading.Lock()


class NixlAgent:
    def __init__(self, name: str, options: UcxOptions) -> None:
        """Raises ConfigError when the package is not installed, or UCX refuses an option."""
        nixl = self.nixl = _load()
        self.errors = tuple(v for k, v in vars(nixl).items() if k.endswith("Error"))
        config = nixl.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = _PROGRESS_SLEEP_US
        config.syncMode = nixl.NIXL_THREAD_SYNC_RW
        self._agent: Any = nixl.nixlAgent(name, config)
        self._gives_up = False
        self.backends = [self._create_backend(options)]

    def register(self, memory: torch.Tensor) -> None:
        try:
            self._agent.registerMem(self._registration(memory), self.backends)
        except self.errors as error:
            raise ConfigError(not_registered("NIXL", memory, error)) from error

    def deregister(self, memory: torch.Tensor) -> None:
        self._agent.deregisterMem(self._registration(memory), self.backends)

    def key(self, memory: torch.Tensor) -> bytes:
        described: bytes = self._agent.getLocalPartialMD(
            self._registration(memory), True, self.backends
        )
        return described

    def remote(self) -> NixlRemote:
        return NixlRemote(self)

    def give_up(self) -> None:
        self._gives_up = True

    def check(self) -> None:
        """Raises PeerError once copies may be given up."""
        if self._gives_up:
            raise PeerError("this end of the link closes")

    def close(self) -> None:
        self._agent = None

    def open(self) -> Any:
        """NIXL's own object. Raises PeerError once closed."""
        if self._agent is None:
            raise PeerError("this end of the link is closed")
        return self._agent

    def spans(self, spans: Iterable[tuple[int, int]], device: int) -> object:
        """Addresses and lengths, all on one device."""
        listed = [(address, nbytes, max(device, 0)) for address, nbytes in spans]
        return self.nixl.nixlXferDList(self._segment(device), listed)

    def _create_backend(self, options: UcxOptions) -> int:
        try:
            with _environment(options):
                handle: int = self._agent.createBackend(_BACKEND, {})
                return handle
        except self.errors as error:
            raise ConfigError(f"NIXL's UCX refuses {options}: {error}") from error

    def _registration(self, memory: torch.Tensor) -> object:
        device = device_of(memory)
        piece = (memory.data_ptr(), memory.numel(), max(device, 0), "")
        return self.nixl.nixlRegDList(self._segment(device), [piece])

    def _segment(self, device: int) -> object:
        return self.nixl.DRAM_SEG if device == HOST else self.nixl.VRAM_SEG


class NixlRemote:
    def __init__(self, agent: NixlAgent) -> None:
        self._agent = agent
        self._name = ""  # of the peer's agent, once anything is known
        self._known: dict[RegionName, RegionPlace] = {}  # known to our agent
        self._retired: set[RegionName] = set()  # of those

    def learn(self, region: RegionName, place: RegionPlace) -> None:
        if region not in self._known:
            if any(place.overlaps(other) for other in self._known.values()):
                self._unlearn_retired()
            self._add(place)
            self._known[region] = place
        self._retired.discard(region)

    def forget(self, region: RegionName) -> None:
        self._retired.add(region)

    def transfer(self, operation: Operation, pieces: Sequence[RegionPiece], check: Check) -> None:
        """One request for each pair of a device here and one of the peer's."""
        groups: dict[tuple[int, int], list[RegionPiece]] = defaultdict(list)
        for piece in pieces:
            groups[device_of(piece[0]), self._known[piece[1]].device].append(piece)
        for (here, there), group in groups.items():
            self._move(operation, group, here, there, check)

    def rest(self) -> bool:
        """Never dropped: UCX does not free everything that it holds for a peer that comes back."""
        self._retired.update(self._known)
        return False

    def _move(
        self,
        operation: Operation,
        pieces: Sequence[RegionPiece],
        device: int,
        peers_device: int,
        check: Check,
    ) -> None:
        nixl, agent = self._agent.nixl, self._agent.open()
        kind = nixl.NIXL_WRITE if operation is Operation.WRITE else nixl.NIXL_READ
        ours = ((data.data_ptr(), data.nbytes) for data, _, _ in pieces)
        theirs = ((address, data.nbytes) for data, _, address in pieces)
        here, there = self._agent.spans(ours, device), self._agent.spans(theirs, peers_device)
        try:
            request = agent.createXferReq(kind, here, there, self._name, "", self._agent.backends)
            try:
                self._finish(agent, request, check)
            finally:
                agent.releaseXferReq(request)
        except self._agent.errors as error:
            raise PeerError(f"NIXL could not move {len(pieces)} pieces: {error}") from error

    def _finish(self, agent: Any, request: int, check: Check) -> None:
        """A request that is released while it runs goes on, and its bytes would come into memory
        that is another's by then. So it is waited for though the connection is over. It fails by
        itself when the peer dies."""
        status = agent.postXferReq(request)
        try:
            status = self._wait(agent, request, status, Waiting(check))
        except PeerError:
            self._wait(agent, request, status, Waiting(self._agent.check, _POLL_STALLED_S))
            raise
        if status != self._agent.nixl.NIXL_SUCCESS:
            raise PeerError(f"a transfer ended with {status}")

    def _wait(self, agent: Any, request: int, status: Any, waiting: Waiting) -> Any:
        while status == self._agent.nixl.NIXL_IN_PROG:
            waiting.again()
            status = agent.getXferStatus(request)
        return status

    def _add(self, place: RegionPlace) -> None:
        try:
            name: bytes = self._agent.open().loadRemoteMD(place.key)
        except self._agent.errors as error:
            raise PeerError(f"NIXL cannot use the announced memory of the peer: {error}") from error
        self._name = name.decode()

    def _unlearn_retired(self) -> None:
        """NIXL would use a retired region's key for a new one in its place, and can forget a peer
        only as a whole."""
        self._agent.open().invalidateRemoteMD(self._name)
        for region in self._retired:
            del self._known[region]
        self._retired.clear()
        for place in self._known.values():
            self._add(place)


@contextmanager
def _environment(options: UcxOptions) -> Iterator[None]:
    """NIXL's UCX takes settings only from the environment."""
    ours = {f"UCX_{name}": value for name, value in options.settings().items()}
    with _environment_lock:
        settings = {n: v for n, v in _DEFAULTS.items() if n not in os.environ} | ours
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _load() -> ModuleType:
    for package in _PACKAGES:
        try:
            return importlib.import_module(f"{package}._bindings")
        except ModuleNotFoundError:
            continue
    raise ConfigError("transport 'nixl' needs its extra: pip install 'kvrelay[nixl]'")
