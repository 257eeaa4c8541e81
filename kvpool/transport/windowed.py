"""Write and read for links that map the peer's regions: both are local copies."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch

from kvpool.transport.base import Read, RegionName, Write


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as uint8 `[bytes]`; the tensor must be contiguous."""
    assert tensor.is_contiguous(), tuple(tensor.stride())
    return tensor.detach().reshape(-1).view(torch.uint8)


class Windowed(ABC):
    @abstractmethod
    def window(self, region: RegionName) -> torch.Tensor:
        """uint8 `[bytes]` over the peer's region; raises PeerError when it is gone."""

    def write(self, region: RegionName, offset: int, source: torch.Tensor) -> None:
        data = as_bytes(source)
        self._span(region, offset, data.numel()).copy_(data)

    def read(self, region: RegionName, offset: int, target: torch.Tensor) -> None:
        data = as_bytes(target)
        data.copy_(self._span(region, offset, data.numel()))

    def write_many(self, writes: Sequence[Write]) -> None:
        windows = self._windows(write.region for write in writes)
        for write in writes:
            span = windows[write.region].take(write.offset, write.source)
            ctypes.memmove(span, write.source.data_ptr(), write.source.nbytes)

    def read_many(self, reads: Sequence[Read]) -> None:
        windows = self._windows(read.region for read in reads)
        for read in reads:
            span = windows[read.region].take(read.offset, read.target)
            ctypes.memmove(read.target.data_ptr(), span, read.target.nbytes)

    def _windows(self, regions: Iterable[RegionName]) -> dict[RegionName, _Addresses]:
        return {region: _Addresses(self.window(region)) for region in dict.fromkeys(regions)}

    def _span(self, region: RegionName, offset: int, nbytes: int) -> torch.Tensor:
        window = self.window(region)
        assert 0 <= offset <= offset + nbytes <= window.numel(), (offset, nbytes, window.numel())
        return window[offset : offset + nbytes]


class _Addresses:
    """A window for many small copies: making a tensor of each would cost more than copying it."""

    def __init__(self, window: torch.Tensor) -> None:
        self._window = window
        self._start = window.data_ptr()
        self._nbytes = window.numel()

    def take(self, offset: int, data: torch.Tensor) -> int:
        """The address of `data`'s bytes in the window."""
        assert data.is_cpu and data.is_contiguous(), (data.device, data.stride())
        assert 0 <= offset <= offset + data.nbytes <= self._nbytes, (offset, self._nbytes)
        return self._start + offset
