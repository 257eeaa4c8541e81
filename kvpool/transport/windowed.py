"""Write and read for links that map the peer's regions: both are one local copy."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from kvpool.transport.base import RegionName


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

    def _span(self, region: RegionName, offset: int, nbytes: int) -> torch.Tensor:
        window = self.window(region)
        assert 0 <= offset <= offset + nbytes <= window.numel(), (offset, nbytes, window.numel())
        return window[offset : offset + nbytes]
