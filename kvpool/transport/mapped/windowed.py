"""Write and read for links that map the peer's regions: both are local copies."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence

import torch

from kvpool.transport.peer.base import Read, RegionName, RegionWrite

_SMALL_BYTES = 2**18
"""For smaller copies torch takes longer to prepare than this way takes in all."""

Window = Callable[[RegionName], torch.Tensor]
"""uint8 `[bytes]` over the peer's region; raises PeerError when it is gone."""


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as uint8 `[bytes]`; the tensor must be contiguous."""
    assert tensor.is_contiguous(), tuple(tensor.stride())
    return tensor.detach().reshape(-1).view(torch.uint8)


def write(window: Window, writes: Sequence[RegionWrite]) -> None:
    spans = _spans(window, (w.region for w in writes))
    for w in writes:
        spans[w.region].write(w.offset, w.source)


def read(window: Window, reads: Sequence[Read]) -> None:
    spans = _spans(window, (r.region for r in reads))
    for r in reads:
        spans[r.region].read(r.offset, r.target)


def _spans(window: Window, regions: Iterable[RegionName]) -> dict[RegionName, _Span]:
    return {region: _Span(window(region)) for region in dict.fromkeys(regions)}


class _Span:
    """A window that serves many copies."""

    def __init__(self, window: torch.Tensor) -> None:
        self._window = window
        self._start = window.data_ptr()
        self._nbytes = window.numel()
        self._on_cpu = window.is_cpu

    def write(self, offset: int, source: torch.Tensor) -> None:
        nbytes = self._check(offset, source)
        if nbytes < _SMALL_BYTES and self._on_cpu and source.is_cpu:
            ctypes.memmove(self._start + offset, source.data_ptr(), nbytes)
        else:
            self._window[offset : offset + nbytes].copy_(as_bytes(source))

    def read(self, offset: int, target: torch.Tensor) -> None:
        nbytes = self._check(offset, target)
        if nbytes < _SMALL_BYTES and self._on_cpu and target.is_cpu:
            ctypes.memmove(target.data_ptr(), self._start + offset, nbytes)
        else:
            as_bytes(target).copy_(self._window[offset : offset + nbytes])

    def _check(self, offset: int, data: torch.Tensor) -> int:
        nbytes = data.nbytes
        assert data.is_contiguous(), tuple(data.stride())
        assert 0 <= offset <= offset + nbytes <= self._nbytes, (offset, nbytes, self._nbytes)
        return nbytes
