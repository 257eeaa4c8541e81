"""UCX through ucxx: host memory registered once, one-sided transfers over whatever UCX finds.

ucxx makes the context, the worker, its thread (asleep while nothing happens) and the endpoints; the
package is loaded when the first agent is made. Endpoints have error handling, without which UCX
ends the process when a peer dies. With it UCX moves bytes within a host by CMA (process_vm_writev),
but only where it need not be able to cancel a rendezvous of messages, and else by TCP.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import struct
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from kvpool.transport import ucp
from kvpool.transport.agent import Operation, Piece, Place
from kvpool.transport.base import RegionName
from kvpool.transport.exposure import Check
from kvpool.transport.ucp import Ucp
from kvpool.transport.ucx_options import UcxOptions
from kvpool.transport.waiting import Waiting
from kvrelay.errors import ConfigError, PeerError

_PACKAGE = "ucxx._lib.libucxx"
_DEFAULTS = {
    "TCP_TX_SEG_SIZE": "256k",  # 8 KiB halves the rate
    "TCP_RX_SEG_SIZE": "256k",
    "CMA_SEG_SIZE": "8m",  # one system call for a slab, about a millisecond
    "RNDV_THRESH": "inf",  # of messages, which are not used: else UCX avoids CMA (see above)
}
_ADDRESS_BYTES = struct.Struct("<H")
_POLL_S = 50e-6
_CLOSE_PERIOD_NS = 10_000_000
_CLOSE_ATTEMPTS = 100


class UcxAgent:
    def __init__(self, options: UcxOptions) -> None:
        """Raises ConfigError when the package is not installed, or UCX refuses an option."""
        self.ucxx = _load()
        self.ucp = Ucp(_library())
        self._error = self.ucxx.UCXError
        try:
            self._context: Any = self.ucxx.UCXContext(_DEFAULTS | options.settings())
            _check_devices(options, self._context.info)
            self.worker: Any = self.ucxx.UCXWorker(self._context)
        except self._error as error:
            raise ConfigError(f"UCX refuses {options}: {error}") from error
        self.worker.init_blocking_progress_mode()
        self.worker.start_progress_thread(polling_mode=False, epoll_timeout=-1)
        self._address: bytes = self.worker.address.tobytes()
        self._mapped: dict[int, tuple[torch.Tensor, int]] = {}  # id |-> memory, its handle
        self._remotes: weakref.WeakSet[UcxRemote] = weakref.WeakSet()

    def register(self, memory: torch.Tensor) -> None:
        handle = self.ucp.map(self._context.handle, memory.data_ptr(), memory.numel())
        self._mapped[id(memory)] = memory, handle

    def deregister(self, memory: torch.Tensor) -> None:
        _, handle = self._mapped.pop(id(memory))
        self.ucp.unmap(self._context.handle, handle)

    def key(self, memory: torch.Tensor) -> bytes:
        packed = self.ucp.pack_key(self._context.handle, self._mapped[id(memory)][1])
        return _ADDRESS_BYTES.pack(len(self._address)) + self._address + packed

    def remote(self) -> UcxRemote:
        remote = UcxRemote(self)
        self._remotes.add(remote)
        return remote

    def connect(self, address: bytes) -> Any:
        """ucxx's endpoint to the worker with this address. Raises PeerError."""
        if self.worker is None:
            raise PeerError("this end of the link is closed")
        try:
            buffer = self.ucxx.UCXAddress.create_from_buffer(bytearray(address))
            return self.worker.create_endpoint_from_worker_address(
                buffer, endpoint_error_handling=True
            )
        except self._error as error:
            raise PeerError(f"UCX cannot reach the peer: {error}") from error

    def close(self) -> None:
        for remote in list(self._remotes):
            remote.close()
        self.worker.stop_progress_thread()
        self.worker = self._context = None


class UcxRemote:
    def __init__(self, agent: UcxAgent) -> None:
        self._agent = agent
        self._ucp = agent.ucp
        self._endpoint: Any = None
        self._keys: dict[RegionName, int] = {}

    def learn(self, region: RegionName, place: Place) -> None:
        address, packed = _split(place.key)
        if self._endpoint is None:
            self._endpoint = self._agent.connect(address)
        self._keys[region] = self._ucp.unpack_key(self._endpoint.handle, packed)

    def forget(self, region: RegionName) -> None:
        key = self._keys.pop(region, None)
        if key is not None:
            self._ucp.destroy_key(key)

    def transfer(self, operation: Operation, pieces: Sequence[Piece], check: Check) -> None:
        if self._endpoint is None or not self._endpoint.alive:
            raise PeerError("UCX has lost the peer")
        requests = self._post(operation, pieces)
        try:
            self._wait(requests, check)
        except PeerError:
            self._give_up(requests)
            raise
        finally:
            for request in requests:
                self._ucp.free(request)

    def rest(self) -> bool:
        """An endpoint whose peer lives is kept: the peer would not return all that it holds for
        one that is closed here and comes back."""
        self._forget_all()
        if self._endpoint is not None and not self._endpoint.alive:
            self.close()
        return self._endpoint is None

    def close(self) -> None:
        """Ends the endpoint, and with it all that was posted: nothing here is touched any more."""
        self._forget_all()
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.close_blocking(period=_CLOSE_PERIOD_NS, max_attempts=_CLOSE_ATTEMPTS)

    def _forget_all(self) -> None:
        for region in list(self._keys):
            self.forget(region)

    def _post(self, operation: Operation, pieces: Sequence[Piece]) -> list[int]:
        move = self._ucp.put if operation is Operation.WRITE else self._ucp.get
        endpoint = self._endpoint.handle
        requests = [
            move(endpoint, data.data_ptr(), data.nbytes, address, self._keys[region])
            for data, region, address in pieces
        ]
        requests.append(self._ucp.flush(endpoint))
        return requests

    def _wait(self, requests: list[int], check: Check) -> None:
        """The last of them is the flush, so it is the last to end."""
        waiting = Waiting(check)
        while (status := self._ucp.status(requests[-1])) == ucp.IN_PROGRESS:
            waiting.again(idle=not self._agent.worker.progress_once())
        failed = [s for s in map(self._ucp.status, requests) if s != ucp.OK]
        if failed or status != ucp.OK:
            raise PeerError(f"UCX could not move {len(requests) - 1} pieces: status {failed}")

    def _give_up(self, requests: list[int]) -> None:
        self.close()
        while any(self._ucp.status(request) == ucp.IN_PROGRESS for request in requests):
            self._agent.worker.progress_once()
            time.sleep(_POLL_S)


def _split(key: bytes) -> tuple[bytes, bytes]:
    """The address of the peer's worker, and UCX's key."""
    (nbytes,) = _ADDRESS_BYTES.unpack_from(key) if len(key) >= _ADDRESS_BYTES.size else (0,)
    start, end = _ADDRESS_BYTES.size, _ADDRESS_BYTES.size + nbytes
    if not nbytes or len(key) <= end:
        raise PeerError(f"the peer granted a region with a key of {len(key)} bytes")
    return key[start:end], key[end:]


def _check_devices(options: UcxOptions, info: str) -> None:
    """UCX only warns about those that do not exist."""
    for device in (options.net_devices or "").split(","):
        if device and device != "all" and device[0] != "^" and f"/{device}" not in info:
            raise ConfigError(f"UCX has no network device {device!r}; its context:\n{info}")


def _load() -> Any:
    """ucxx sets UCX's environment variables when it is imported; NIXL's UCX would take them too."""
    before = set(os.environ)
    try:
        return importlib.import_module(_PACKAGE)
    except ModuleNotFoundError as error:
        raise ConfigError("transport 'ucx' needs its extra: pip install 'kvrelay[ucx]'") from error
    finally:
        for name in set(os.environ) - before:
            if name.startswith("UCX_"):
                del os.environ[name]


def _library() -> ctypes.CDLL:
    """That which ucxx itself has loaded."""
    loaded = importlib.import_module("libucx").load_library()
    found = [library for library in loaded if library and "libucp" in library._name]
    return found[0] if found else ctypes.CDLL("libucp.so.0")
