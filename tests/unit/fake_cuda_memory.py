"""A CUDA device's memory without a device: what the driver and torch's allocator say of it, as
`engine.device.cuda_memory` asks them. More than there is ends in OutOfMemoryError."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

STEP = 2 << 20


class Piece:
    """Goes to the allocator's cache when nothing refers to it."""

    def __init__(self, device: FakeDevice, nbytes: int) -> None:
        device.reserve(nbytes)
        self.gone = weakref.finalize(self, device.cache, nbytes)


class FakeDevice:
    """`outside`: bytes on the device that torch's allocator knows nothing of."""

    def __init__(self, total: int, outside: int) -> None:
        self.total, self.outside = total, outside
        self.reserved = self.peak = self.cached = 0
        self.workspaces: dict[str, Piece] = {}

    def take(self, nbytes: int) -> Piece:
        return Piece(self, -(-nbytes // STEP) * STEP)

    def reserve(self, nbytes: int) -> None:
        used = min(self.cached, nbytes)
        self.cached -= used
        self.reserved += nbytes - used
        if self.free < 0:  # torch gives back its cache before it fails
            self.empty_cache()
        if self.free < 0:
            raise torch.OutOfMemoryError(f"{-self.free} bytes are missing")
        self.peak = max(self.peak, self.reserved)

    def cache(self, nbytes: int) -> None:
        self.cached += nbytes

    def empty_cache(self) -> None:
        self.reserved -= self.cached
        self.cached = 0

    @property
    def free(self) -> int:
        return self.total - self.outside - self.reserved

    @property
    def live(self) -> int:
        return self.reserved - self.cached

    def reset_peak(self) -> None:
        self.peak = self.reserved

    def stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        functions: dict[str, Any] = {
            "synchronize": lambda device: None,
            "empty_cache": self.empty_cache,
            "mem_get_info": lambda device: (self.free, self.total),
            "memory_reserved": lambda device: self.reserved,
            "max_memory_reserved": lambda device: self.peak,
            "reset_peak_memory_stats": lambda device: self.reset_peak(),
        }
        for name, function in functions.items():
            monkeypatch.setattr(torch.cuda, name, function)
        clear = "_cuda_clearCublasWorkspaces"
        monkeypatch.setattr(torch._C, clear, self.workspaces.clear, raising=False)


class _Graphs:
    def __init__(self, pool: Piece) -> None:
        self.pool = pool


class FakeEngine:
    """Takes what an engine on the device takes, when it takes it. Each one has streams of its own,
    and so workspaces: see `engine.device.cuda_memory`."""

    def __init__(self, device: FakeDevice, *, workspace: int, step: int, graphs: int) -> None:
        self.device, self.workspace = device, workspace
        self._step, self._graphs = step, graphs
        self._streams = 0

    def new_stream(self) -> str:
        self._streams += 1
        return str(self._streams)

    def multiply(self, stream: str) -> None:
        if stream not in self.device.workspaces:
            self.device.workspaces[stream] = self.device.take(self.workspace)

    def step(self, stream: str) -> None:
        self.multiply(stream)
        self.device.take(self._step)

    def record(self) -> object:
        """The graphs: a pool of their own, and what the driver keeps of them."""
        stream = self.new_stream()
        self.step(stream)  # a warm-up leaves its memory in the cache
        pool = self.device.take(self._graphs)
        driver = self._graphs // 8
        self.device.outside += driver
        held = _Graphs(pool)
        weakref.finalize(held, self._forget, driver)
        return held

    def _forget(self, driver: int) -> None:
        self.device.outside -= driver
