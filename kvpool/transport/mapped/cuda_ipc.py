"""Between processes of one host, device to device: regions are CUDA memory that the peer maps.

The handle travels over the control connection. Copies run on their own stream, after the work on
the caller's stream, and are done when the call returns. PyTorch counts the processes that have a
region mapped, and keeps freed memory while the count is above zero. For a process that died without
releasing, the count is lowered here, once the process is gone; a peer that was only declared dead
may still run.

The wire format of the handle is our own, over PyTorch's shared storages.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from kvpool.transport.mapped import windowed
from kvpool.transport.peer.base import Read, RegionName, RegionWrite
from kvpool.transport.peer.control_wire import Grant
from kvpool.transport.peer.exposure import Check, FetchGrant
from kvrelay.errors import ConfigError, PeerError

# of the handle, the counter's handle and the event's handle the bytes; then storage bytes, storage
# offset, counter offset, whether the event counts; then the region's offset and bytes
_HEAD = struct.Struct("<HHHQQQ?QQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaHandle:
    handle: bytes
    storage_bytes: int
    storage_offset: int  # of the storage, in CUDA's allocation
    counter_handle: bytes  # PyTorch's counter of processes that map the storage
    counter_offset: int
    event_handle: bytes  # after which the storage may be used
    event_counts: bool
    offset: int  # of the region, in the storage
    nbytes: int

    def pack(self) -> bytes:
        texts = self.handle, self.counter_handle, self.event_handle
        sizes = (len(text) for text in texts)
        head = _HEAD.pack(
            *sizes,
            self.storage_bytes,
            self.storage_offset,
            self.counter_offset,
            self.event_counts,
            self.offset,
            self.nbytes,
        )
        return head + b"".join(texts)

    @staticmethod
    def unpack(payload: bytes) -> CudaHandle:
        """Raises PeerError for bytes that `pack` has not made."""
        if len(payload) < _HEAD.size:
            raise PeerError(f"the peer granted CUDA memory in {len(payload)} bytes")
        *sizes, storage_bytes, storage_offset, counter_offset, counts, offset, nbytes = (
            _HEAD.unpack_from(payload)
        )
        if len(payload) != _HEAD.size + sum(sizes) or offset + nbytes > storage_bytes:
            raise PeerError(f"the peer granted CUDA memory that does not fit: {sizes}")
        first, second = _HEAD.size + sizes[0], _HEAD.size + sizes[0] + sizes[1]
        return CudaHandle(
            handle=payload[_HEAD.size : first],
            storage_bytes=storage_bytes,
            storage_offset=storage_offset,
            counter_handle=payload[first:second],
            counter_offset=counter_offset,
            event_handle=payload[second:],
            event_counts=counts,
            offset=offset,
            nbytes=nbytes,
        )

    def map(self, device: torch.device) -> torch.Tensor:
        """uint8 `[bytes]` seen from `device`, which may be another device than the memory's. Once
        for each `share`. Raises PeerError."""
        storage_type: Any = torch.UntypedStorage
        try:
            storage = storage_type._new_shared_cuda(
                device.index,
                self.handle,
                self.storage_bytes,
                self.storage_offset,
                self.counter_handle,
                self.counter_offset,
                self.event_handle,
                self.event_counts,
            )
        except RuntimeError as error:
            raise PeerError(f"{device} cannot map the peer's CUDA memory: {error}") from error
        whole = torch.empty(0, dtype=torch.uint8, device=device)
        return whole.set_(storage, self.offset, (self.nbytes,), (1,))


def share(memory: torch.Tensor) -> CudaHandle:
    """For one process to map and later release. Raises ConfigError when CUDA cannot."""
    storage: Any = memory.untyped_storage()
    try:
        _, handle, nbytes, offset, counter, counter_offset, event, counts = storage._share_cuda_()
    except RuntimeError as error:
        raise ConfigError(
            f"transport 'cuda_ipc' cannot share CUDA memory: {error}. Unset expandable_segments in "
            "PYTORCH_CUDA_ALLOC_CONF (or PYTORCH_ALLOC_CONF)"
        ) from error
    return CudaHandle(
        handle=handle,
        storage_bytes=nbytes,
        storage_offset=offset,
        counter_handle=counter,
        counter_offset=counter_offset,
        event_handle=event,
        event_counts=counts,
        offset=int(memory.storage_offset()),
        nbytes=memory.numel(),
    )


def release(handle: CudaHandle) -> None:
    """Called for a process that can't release it itself any more."""
    storage_type: Any = torch.UntypedStorage
    storage_type._release_ipc_counter_cuda(handle.counter_handle, handle.counter_offset)


_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_exposed: dict[RegionName, torch.Tensor] = {}
"""By all endpoints of this process: CUDA does not map a process's own memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    process_fd: int  # readable once the process is gone
    handle: CudaHandle


class CudaIpcExposure:
    """Adopts memory of its own device only, allocated by PyTorch."""

    staging_bytes = 0

    def __init__(self, device: str) -> None:
        """`device` is PyTorch's name. Raises ConfigError if there is no such device, or its memory
        can't be shared."""
        self.device = _cuda_device(device)
        self._regions: dict[RegionName, torch.Tensor] = {}
        self._given: list[_Given] = []
        release(share(self.allocate(1, RegionName("probe"))))

    def allocate(self, nbytes: int, name: RegionName) -> torch.Tensor:
        return torch.zeros(max(nbytes, 1), dtype=torch.uint8, device=self.device)[:nbytes]

    def expose(self, name: RegionName, memory: torch.Tensor) -> None:
        if memory.device != self.device:
            raise ConfigError(
                f"transport 'cuda_ipc' reaches memory of {self.device} only, not {memory.device}"
            )
        self._regions[name] = _exposed[name] = memory

    def grant(self, name: RegionName, peer: socket.socket) -> Grant:
        self._settle()
        pid = _pid(peer)
        if pid == os.getpid():
            return Grant(payload=b"")
        handle = share(self._regions[name])
        self._given.append(_Given(process_fd=os.pidfd_open(pid), handle=handle))
        return Grant(payload=handle.pack())

    def retire(self, name: RegionName) -> None:
        _exposed.pop(name, None)

    def free(self, name: RegionName) -> None:
        """PyTorch keeps the memory for processes that still have it mapped."""
        del self._regions[name]
        self._settle()

    def peer(self, address: str, fetch: FetchGrant) -> CudaIpcPeer:
        return CudaIpcPeer(address, fetch, self.device)

    def give_up(self) -> None:
        pass  # copies of mapped memory end by themselves

    def close(self) -> None:
        self._regions.clear()
        self._settle()
        for given in self._given:
            os.close(given.process_fd)
        self._given.clear()

    def _settle(self) -> None:
        """Lowers the counts for processes that are gone; their memory is freed with its region."""
        alive = []
        for given in self._given:
            if _is_gone(given.process_fd):
                release(given.handle)
                os.close(given.process_fd)
            else:
                alive.append(given)
        if len(alive) < len(self._given):
            torch.cuda.ipc_collect()
        self._given = alive


class CudaIpcPeer:
    def __init__(self, address: str, fetch: FetchGrant, device: torch.device) -> None:
        self._address = address
        self._fetch = fetch
        self._device = device
        self._lock = threading.Lock()
        self._stream = torch.cuda.Stream(device)
        self._done = torch.cuda.Event(blocking=True)
        self._mapped: dict[RegionName, torch.Tensor] = {}

    def write(self, writes: Sequence[RegionWrite], check: Check) -> None:
        with self._copying(check):
            windowed.write(self._window, writes)

    def read(self, reads: Sequence[Read], check: Check) -> None:
        with self._copying(check):
            windowed.read(self._window, reads)

    def window(self, region: RegionName, check: Check) -> torch.Tensor:
        """The caller synchronises its queued copies on the window before the next `notify`."""
        with self._lock:
            check()
            return self._window(region)

    def retire(self, region: RegionName) -> None:
        with self._lock:
            self._mapped.pop(region, None)

    def drain(self) -> None:
        with self._lock:
            pass

    def rest(self, patience_s: float) -> bool:
        with self._lock:
            self._mapped.clear()
        return True

    @contextmanager
    def _copying(self, check: Check) -> Iterator[None]:
        """Runs after the work on the caller's stream; done on return, also after an error."""
        with self._lock:
            check()
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            try:
                with torch.cuda.stream(self._stream):
                    yield
            finally:
                self._done.record(self._stream)
                self._done.synchronize()

    def _window(self, region: RegionName) -> torch.Tensor:
        mapped = self._mapped.get(region)
        if mapped is None:
            payload = self._fetch(region).payload
            mapped = CudaHandle.unpack(payload).map(self._device) if payload else _own(region)
            self._mapped[region] = mapped
        return mapped


def _cuda_device(name: str) -> torch.device:
    if not torch.cuda.is_available():
        raise ConfigError("transport 'cuda_ipc' needs a CUDA device, and PyTorch sees none")
    device = torch.device(name)
    index = torch.cuda.current_device() if device.index is None else device.index
    if device.type != "cuda" or index >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ConfigError(f"transport 'cuda_ipc' has no device {name!r}; PyTorch sees {count}")
    return torch.device("cuda", index)


def _own(region: RegionName) -> torch.Tensor:
    memory = _exposed.get(region)
    if memory is None:
        raise PeerError(f"this process has no region {region} (any more)")
    return memory


def _pid(peer: socket.socket) -> int:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[0])


def _is_gone(process_fd: int) -> bool:
    poll = select.poll()
    poll.register(process_fd, select.POLLIN)
    return bool(poll.poll(0))
