"""UCX through ucxx: memory registered once, one-sided transfers over whatever UCX finds.

ucxx makes the context, the worker, its thread (asleep while nothing happens) and the endpoints; the
package is loaded when the first agent is made. Endpoints have error handling, without which UCX
ends the process when a peer dies. With it UCX moves bytes within a host by CMA (process_vm_writev),
but only where it need not be able to cancel a rendezvous of messages, and else by TCP.

ucxx's Python interface lacks the one-sided operations of UCX's C library. They are called here on
ucxx's own objects, and only through UCX's documented stable interface (ucp/api/ucp.h, 1.x): handles
are opaque, and structures begin with a mask of the fields in use. Every call is thread safe,
because ucxx makes its workers thread safe.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvpool.transport.peer.base import RegionName
from kvpool.transport.peer.exposure import Check
from kvpool.transport.rdma.agent import Operation, RegionPiece, RegionPlace, not_registered
from kvpool.transport.rdma.nixl import Waiting
from kvpool.transport.rdma.slab_memory import SlabMemory
from kvpool.transport.rdma.ucx_options import UcxOptions
from kvrelay.errors import ConfigError, PeerError

OK, IN_PROGRESS = 0, 1

_ADDRESS_AND_LENGTH = 0b11
_Handle = ctypes.c_void_p
_Status = ctypes.c_int8  # UCX packs it
_RequestOrError = ctypes.c_ssize_t  # a pointer, none, or a status below zero


class _MapParameters(ctypes.Structure):
    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("address", ctypes.c_void_p),
        ("length", ctypes.c_size_t),
        ("not_set", ctypes.c_uint64 * 8),
    )


class _RequestParameters(ctypes.Structure):
    _fields_ = (("op_attr_mask", ctypes.c_uint32), ("not_set", ctypes.c_uint32 * 63))


_PLAIN = ctypes.byref(_RequestParameters())


class Ucp:
    """Contexts, endpoints, memory and keys are handles: plain integers."""

    def __init__(self, library: ctypes.CDLL) -> None:
        def declared(name: str, result: object, *arguments: object) -> Callable[..., int]:
            function: Callable[..., int] = library[name]
            function.restype, function.argtypes = result, arguments  # type: ignore[attr-defined]
            return function

        any_, size = ctypes.c_void_p, ctypes.c_size_t
        address = ctypes.c_uint64
        self._mem_map = declared("ucp_mem_map", _Status, _Handle, any_, any_)
        self._mem_unmap = declared("ucp_mem_unmap", _Status, _Handle, _Handle)
        self._pack = declared("ucp_rkey_pack", _Status, _Handle, _Handle, any_, any_)
        self._release = declared("ucp_rkey_buffer_release", None, any_)
        self._unpack = declared("ucp_ep_rkey_unpack", _Status, _Handle, ctypes.c_char_p, any_)
        self._destroy = declared("ucp_rkey_destroy", None, _Handle)
        move = (_Handle, any_, size, address, _Handle, any_)
        self._put = declared("ucp_put_nbx", _RequestOrError, *move)
        self._get = declared("ucp_get_nbx", _RequestOrError, *move)
        self._flush = declared("ucp_ep_flush_nbx", _RequestOrError, _Handle, any_)
        self._check = declared("ucp_request_check_status", _Status, _Handle)
        self._free = declared("ucp_request_free", None, _Handle)

    def map(self, context: int, address: int, nbytes: int) -> int:
        memory = _Handle()
        parameters = _MapParameters(_ADDRESS_AND_LENGTH, address, nbytes)
        place, result = ctypes.byref(parameters), ctypes.byref(memory)
        _succeed("map memory", self._mem_map(context, place, result))
        return memory.value or 0

    def unmap(self, context: int, memory: int) -> None:
        _succeed("unmap memory", self._mem_unmap(context, memory))

    def pack_key(self, context: int, memory: int) -> bytes:
        """The key by which a peer reaches the memory."""
        packed, nbytes = ctypes.c_void_p(), ctypes.c_size_t()
        result = ctypes.byref(packed), ctypes.byref(nbytes)
        _succeed("pack a key", self._pack(context, memory, *result))
        key = ctypes.string_at(packed, nbytes.value)
        self._release(packed)
        return key

    def unpack_key(self, endpoint: int, packed: bytes) -> int:
        key = _Handle()
        _succeed("use a key", self._unpack(endpoint, packed, ctypes.byref(key)))
        return key.value or 0

    def destroy_key(self, key: int) -> None:
        self._destroy(key)

    def put(self, endpoint: int, here: int, nbytes: int, there: int, key: int) -> int:
        """A request, 0 when it is done already, or a status below zero."""
        return self._put(endpoint, here, nbytes, there, key, _PLAIN)

    def get(self, endpoint: int, here: int, nbytes: int, there: int, key: int) -> int:
        """As `put`."""
        return self._get(endpoint, here, nbytes, there, key, _PLAIN)

    def flush(self, endpoint: int) -> int:
        """As `put`; done when all that came before it is visible at the peer."""
        return self._flush(endpoint, _PLAIN)

    def status(self, request: int) -> int:
        return request if request <= OK else self._check(request)

    def free(self, request: int) -> None:
        if request > OK:
            self._free(request)


def _succeed(what: str, status: int) -> None:
    if status != OK:
        raise PeerError(f"UCX could not {what} (status {status})")


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
    def __init__(self, options: UcxOptions, slabs: SlabMemory) -> None:
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
        self.worker.set_progress_thread_start_callback(slabs.enter_device, ())
        self.worker.start_progress_thread(polling_mode=False, epoll_timeout=-1)
        self._address: bytes = self.worker.address.tobytes()
        self._mapped: dict[int, tuple[torch.Tensor, int]] = {}  # id |-> memory, its handle
        self._remotes: weakref.WeakSet[UcxRemote] = weakref.WeakSet()

    def register(self, memory: torch.Tensor) -> None:
        try:
            handle = self.ucp.map(self._context.handle, memory.data_ptr(), memory.numel())
        except PeerError as error:
            raise ConfigError(not_registered("UCX", memory, error)) from error
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

    def give_up(self) -> None:
        pass  # a transfer whose connection is over ends with UCX's endpoint

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

    def learn(self, region: RegionName, place: RegionPlace) -> None:
        address, packed = _split(place.key)
        if self._endpoint is None:
            self._endpoint = self._agent.connect(address)
        self._keys[region] = self._ucp.unpack_key(self._endpoint.handle, packed)

    def forget(self, region: RegionName) -> None:
        key = self._keys.pop(region, None)
        if key is not None:
            self._ucp.destroy_key(key)

    def transfer(self, operation: Operation, pieces: Sequence[RegionPiece], check: Check) -> None:
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

    def _post(self, operation: Operation, pieces: Sequence[RegionPiece]) -> list[int]:
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
        while (status := self._ucp.status(requests[-1])) == IN_PROGRESS:
            waiting.again(idle=not self._agent.worker.progress_once())
        failed = [s for s in map(self._ucp.status, requests) if s != OK]
        if failed or status != OK:
            raise PeerError(f"UCX could not move {len(requests) - 1} pieces: status {failed}")

    def _give_up(self, requests: list[int]) -> None:
        self.close()
        while any(self._ucp.status(request) == IN_PROGRESS for request in requests):
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
