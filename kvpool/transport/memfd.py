"""Anonymous shared memory: a sealed memfd per region, mapped as a torch tensor by both sides.

No name is left behind, and the memory is freed with its last mapping. One page after the region
tells its peers whether it is still registered, so a retired slab is known at once without a
message.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import torch

from kvpool.transport.base import RegionName
from kvrelay.errors import PeerError

_LIVE, _RETIRED = 1, 0


def create(name: RegionName, nbytes: int) -> tuple[int, Mapping]:
    """A descriptor and its mapping. All pages are allocated now; OSError when there are none."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.posix_fallocate(fd, 0, _file_bytes(nbytes))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    mapping = Mapping(fd, nbytes)
    mapping.publish()
    return fd, mapping


class Mapping:
    """A region of this or another process, as local memory. Unmapped with its last tensor."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """The descriptor stays the caller's and need not outlive the call."""
        if os.fstat(fd).st_size != _file_bytes(nbytes):
            raise PeerError(f"shared memory of {os.fstat(fd).st_size} bytes cannot hold {nbytes}")
        whole = torch.from_file(
            f"/proc/self/fd/{fd}", shared=True, size=_file_bytes(nbytes), dtype=torch.uint8
        )
        self.memory = whole[:nbytes]
        self._state = whole[-mmap.PAGESIZE :][:1]

    @property
    def retired(self) -> bool:
        return self._state.item() == _RETIRED

    def publish(self) -> None:
        self._state.fill_(_LIVE)

    def retire(self) -> None:
        self._state.fill_(_RETIRED)


def _file_bytes(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE + mmap.PAGESIZE
