"""Anonymous shared memory: a sealed memfd, mapped as a torch tensor by its maker and by peers.

It leaves no name behind, and is freed with its last mapping. One page after it shows peers which
lent regions are still registered, so a retired one is known at once without a message.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
import weakref
from dataclasses import dataclass

import numpy as np
import torch

from kvrelay.errors import ConfigError, PeerError

_Pages = np.ndarray[tuple[int], np.dtype[np.uint8]]
_LIVE, _RETIRED = 1, 0
_POPULATE_WRITE = 23  # madvise(2); no constant of Python's
_PORTABLE = 1  # cudaHostRegisterPortable
_libc = ctypes.CDLL(None)
_MAX_LOANS = mmap.PAGESIZE  # out of one piece of memory, in its whole life: one byte of state each

_made: dict[int, _Made] = {}  # address |-> memory of this process that is still alive
_made_lock = threading.Lock()


def allocate(nbytes: int, name: str = "kvrelay-memory", *, lazily: bool = False) -> torch.Tensor:
    """Zeros, uint8 `[nbytes]`, that the shm transport can adopt, whole or in part. All pages are
    taken and touched now, with OSError when there are none, or `lazily` one by one. Freed with the
    last tensor over it, here and at the peers. `name` appears in process listings."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        reserve = os.truncate if lazily else _fill
        reserve(fd, _file_bytes(nbytes))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        pages = _map(fd, nbytes).numpy()
        if not lazily:
            _touch(pages)
    except BaseException:
        os.close(fd)
        raise
    start = pages.ctypes.data
    _made[start] = _Made(fd, start, nbytes, weakref.ref(pages))
    weakref.finalize(pages, _unmake, start)
    return torch.from_numpy(pages)[:nbytes]


def lend(memory: torch.Tensor) -> Loan:
    """Raises ConfigError for memory that `allocate` has not made."""
    assert memory.dtype is torch.uint8 and memory.is_contiguous()
    with _made_lock:
        if (found := _made_with(memory)) is not None:
            made, pages = found
            return made.lend(pages, _start(memory), memory.numel())
    raise ConfigError(
        "only memory of kvpool.transport.mapped.memfd.allocate can be shared between processes; "
        f"these {memory.numel()} bytes on {memory.device} are other memory"
    )


def pin(memory: torch.Tensor) -> bool:
    """From now on CUDA copies to and from it at the bus's rate. Returns False for memory that
    `allocate` has not made. Raises ConfigError when CUDA can't."""
    with _made_lock:
        if (found := _made_with(memory)) is None:
            return False
        made, pages = found
        made.pin(pages)
    return True


def _made_with(memory: torch.Tensor) -> tuple[_Made, _Pages] | None:
    """Called with the lock."""
    for made in list(_made.values()):
        pages = made.pages() if made.holds(_start(memory), memory.numel()) else None
        if pages is not None:
            return made, pages
    return None


def _start(memory: torch.Tensor) -> int:
    return memory.untyped_storage().data_ptr() + int(memory.storage_offset())


@dataclass(frozen=True, slots=True, kw_only=True)
class MemfdPlace:
    """The place of a region in a memfd, as sent to peers."""

    made_bytes: int  # all that the memfd holds but its page of states
    offset: int
    nbytes: int
    loan: int  # its number, and that of its state

    @property
    def state_at(self) -> int:
        return _aligned(self.made_bytes) + self.loan


@dataclass(frozen=True, slots=True, kw_only=True)
class Loan:
    """A region of this process that peers may map; keeps its memory and `fd` until dropped."""

    fd: int
    place: MemfdPlace
    pages: _Pages

    def retire(self) -> None:
        self.pages[self.place.state_at] = _RETIRED


class Mapping:
    """A region of another process, as local memory. Unmapped with its last tensor."""

    def __init__(self, fd: int, place: MemfdPlace) -> None:
        """The descriptor stays the caller's and may be closed after the call. Raises PeerError."""
        size = os.fstat(fd).st_size
        fits = 0 <= place.offset <= place.offset + place.nbytes <= place.made_bytes
        if size != _file_bytes(place.made_bytes) or not fits or place.loan >= _MAX_LOANS:
            raise PeerError(f"shared memory of {size} bytes cannot hold {place}")
        whole = _map(fd, place.made_bytes)
        self.memory = whole[place.offset : place.offset + place.nbytes]
        self._state = whole[place.state_at :][:1]

    @property
    def retired(self) -> bool:
        return self._state.item() == _RETIRED


class _Made:
    def __init__(
        self,
        fd: int,
        start: int,
        nbytes: int,
        pages: weakref.ref[_Pages],
    ) -> None:
        self.fd = fd
        self.pages = pages
        self._start = start
        self._nbytes = nbytes
        self._loans = 0
        self._is_pinned = False

    def holds(self, start: int, nbytes: int) -> bool:
        return self._start <= start and start + nbytes <= self._start + self._nbytes

    def lend(self, pages: _Pages, start: int, nbytes: int) -> Loan:
        assert self._loans < _MAX_LOANS, self._loans
        place = MemfdPlace(
            made_bytes=self._nbytes, offset=start - self._start, nbytes=nbytes, loan=self._loans
        )
        self._loans += 1
        pages[place.state_at] = _LIVE
        return Loan(fd=self.fd, place=place, pages=pages)

    def pin(self, pages: _Pages) -> None:
        if self._is_pinned:
            return
        refused = int(torch.cuda.cudart().cudaHostRegister(self._start, pages.size, _PORTABLE))
        if refused:
            raise ConfigError(
                f"CUDA can't pin {pages.size} bytes of shared memory (cudaError {refused}): leave "
                "shm out of transfer.transports, so that other transports have memory of their own"
            )
        self._is_pinned = True

    def unpin(self) -> None:
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self._start)


def _unmake(start: int) -> None:
    """Runs before the pages are unmapped."""
    made = _made.pop(start)
    made.unpin()
    os.close(made.fd)


def _fill(fd: int, nbytes: int) -> None:
    os.posix_fallocate(fd, 0, nbytes)


def _touch(pages: _Pages) -> None:
    """A page that is first touched in the middle of a transfer takes several times as long as its
    copy, because the kernel clears it then. Before Linux 5.14 pages stay untouched here."""
    _libc.madvise(ctypes.c_void_p(pages.ctypes.data), ctypes.c_size_t(pages.size), _POPULATE_WRITE)


def _map(fd: int, nbytes: int) -> torch.Tensor:
    path, size = f"/proc/self/fd/{fd}", _file_bytes(nbytes)
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


def _file_bytes(nbytes: int) -> int:
    return _aligned(nbytes) + mmap.PAGESIZE


def _aligned(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
