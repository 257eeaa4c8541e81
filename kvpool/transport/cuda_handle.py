"""CUDA memory as other processes are told of it: PyTorch's shared storages, on our own wire."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import torch

from kvrelay.errors import ConfigError, PeerError

# of the handle, the counter's handle and the event's handle the bytes; then storage bytes, storage
# offset, counter offset, whether the event counts; then the region's offset and bytes
_HEAD = struct.Struct("<HHHQQQ?QQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaHandle:
    handle: bytes
    storage_bytes: int
    storage_offset: int  # of the storage, in what CUDA has allocated
    counter_handle: bytes  # PyTorch's, of those who have the storage mapped
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
        """Raises PeerError for what `pack` has not made."""
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
        """uint8 `[bytes]` seen from `device`, which need not be where the memory is. Once for each
        `share`. Raises PeerError."""
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
    """For one process to map, and then let go. Raises ConfigError when CUDA cannot."""
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
    """In place of a process that cannot let go of it any more."""
    storage_type: Any = torch.UntypedStorage
    storage_type._release_ipc_counter_cuda(handle.counter_handle, handle.counter_offset)
