"""Reads tensors of safetensors files, or one rank's part of them, straight to a device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors import safe_open

from engine.model.checkpoint import WeightFile

WINDOW_BYTES = 256 << 20
"""Pages of files stay mapped after they are read, until tensors of this size have been read."""


@dataclass(frozen=True, slots=True)
class Cut:
    """One rank's part of a parameter: `ranges` of dimension `dim`, joined, with zeros at the end up
    to `size`. `whole`: the length of that dimension on one rank."""

    dim: int
    ranges: tuple[range, ...]
    size: int
    whole: int

    def of(self, source: Any) -> torch.Tensor:
        """`source` is a tensor, or a slice of a safetensors file; of these only the part is
        read."""
        lead = (slice(None),) * self.dim
        parts = [source[(*lead, slice(one.start, one.stop))] for one in self.ranges]
        found: torch.Tensor = parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.dim)
        short = self.size - found.shape[self.dim]
        if not short:
            return found
        zeros = list(found.shape)
        zeros[self.dim] = short
        return torch.cat([found, found.new_zeros(zeros)], dim=self.dim)

    def shape(self, whole: Sequence[int]) -> list[int]:
        return [self.size if dim == self.dim else n for dim, n in enumerate(whole)]

    def is_whole(self, tensor: torch.Tensor) -> bool:
        return tensor.shape[self.dim] == self.whole != self.size


Cuts = Mapping[str, Cut]
"""# parameter |-> this rank's part; parameters that are not named are whole on every rank"""


@dataclass(frozen=True, slots=True)
class _Uploaded:
    """Indexing it copies that part of the file's mapped pages to the device. Parts are joined
    there, and never on the host."""

    source: Any  # of a safetensors file
    device: torch.device

    def __getitem__(self, index: Any) -> torch.Tensor:
        found: torch.Tensor = self.source[index].to(self.device, copy=True)
        return found.contiguous()


class WeightReader:
    """Tensors of safetensors files, or parts of them. Threads may share it."""

    def __init__(self, files: Iterable[WeightFile], device: torch.device) -> None:
        self._paths = {name: file.path for file in files for name in file.tensors}
        self._device = device
        self._lock = Lock()
        self._open: dict[Path, Any] = {}
        self._left_bytes = WINDOW_BYTES

    @property
    def names(self) -> Iterable[str]:
        return self._paths

    def read(self, name: str, cut: Cut | None) -> torch.Tensor:
        """A copy on the device, in the file's dtype."""
        source = self._source(name)
        taken = _Uploaded(source, self._device)
        part = taken[...] if cut is None else cut.of(taken)
        self._count(source.get_shape(), part.element_size())
        return part

    def _source(self, name: str) -> Any:
        path = self._paths[name]
        with self._lock:
            if path not in self._open:
                self._open[path] = safe_open(path, framework="pt")
            return self._open[path].get_slice(name)

    def _count(self, shape: Sequence[int], element_bytes: int) -> None:
        """Files are unmapped once all that was taken from them is copied."""
        with self._lock:
            self._left_bytes -= torch.Size(shape).numel() * element_bytes
            if self._left_bytes <= 0:
                self._open.clear()
                self._left_bytes = WINDOW_BYTES
