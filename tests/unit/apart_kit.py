"""Ranks on CPUs that work as ranks on GPUs do: each has its KV in memory of its own, hidden states
go by the line of NCCL, and steps are launched behind one another.

Real are the processes, the messages and the model. NCCL's groups are gloo's, CUDA's handles are
files, and CPUs have no streams: a call has done its work when it returns.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import FileStore, ProcessGroupGloo  # type: ignore[attr-defined]

from engine import assembly, follower
from engine.device.group import Line
from engine.model.model import Model
from engine.parallel import leader, nccl_line, opening, ranks
from engine.parallel.grid import Grid
from engine.parallel.nccl_line import NcclLine
from kvpool.memory.kv_memory import Allocate, KvMemory
from kvpool.transport.mapped import memfd
from kvpool.transport.mapped.memfd import Mapping, MemfdPlace
from kvrelay.errors import ConfigError, ModelError

Patch = Callable[[object, str, object], None]


class Gloo(ProcessGroupGloo):  # type: ignore[misc]
    """What of NCCL's group is used, on CPUs."""

    aborted = False
    timeout_s = 0.0

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout_s = timeout.total_seconds()

    def abort(self) -> None:
        self.aborted = True


def open_gloo(meeting: Path, rank: int, size: int) -> Gloo:
    return Gloo(FileStore(str(meeting), size), rank, size, timedelta(seconds=60))


def use_gpus_ways(patch: Patch) -> None:
    """In the process of any rank."""
    patch(torch.cuda, "set_device", lambda device: None)
    patch(torch.cuda, "synchronize", lambda device: None)
    patch(nccl_line, "open_nccl", open_gloo)
    patch(opening, "_open_line", _open_line)
    for module in (leader, follower, assembly):
        patch(module, "lies_apart", lambda device: True)
    patch(ranks, "KvMemory", _SharedMemory)
    patch(ranks, "share", _share)
    patch(ranks.CudaHandle, "unpack", staticmethod(_handle))


def use_gpus_ways_on_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    use_gpus_ways(monkeypatch.setattr)
    monkeypatch.setattr(Model, "on_cpu", False)


def follow() -> None:
    """The main function of the other ranks."""
    use_gpus_ways(setattr)
    follower.main()


def follow_without_sharing() -> None:
    """As where CUDA can't share memory."""
    use_gpus_ways(setattr)
    ranks.share = _refuse
    follower.main()


def _refuse(memory: torch.Tensor) -> SimpleNamespace:
    raise ConfigError("no handle for this memory")


def follow_without_room() -> None:
    """It fails when all compute together for the first time."""
    use_gpus_ways(setattr)
    NcclLine.send = _greet_only  # type: ignore[method-assign]
    follower.main()


_send = NcclLine.send


def _greet_only(self: NcclLine, hidden: torch.Tensor) -> None:
    if hidden.numel() > 1:
        raise ModelError("no room on this GPU")
    _send(self, hidden)


def _open_line(device: str, rank: int, grid: Grid, meeting: Path) -> Line:
    return NcclLine(torch.device(device), grid, rank, meeting / "line")


class _SharedMemory(KvMemory):
    def __init__(
        self, layout: Any, blocks: int, device: Any, allocate: Allocate | None = None, **named: Any
    ) -> None:
        super().__init__(layout, blocks, device, allocate or memfd.allocate, **named)


_lent: list[memfd.Loan] = []
"""Until this process ends."""


def _share(memory: torch.Tensor) -> SimpleNamespace:
    loan = memfd.lend(memory)
    _lent.append(loan)
    facts = {"path": f"/proc/{os.getpid()}/fd/{loan.fd}", "place": asdict(loan.place)}
    return SimpleNamespace(pack=lambda: json.dumps(facts).encode())


def _handle(packed: bytes) -> SimpleNamespace:
    facts = json.loads(packed)

    def mapped(device: torch.device) -> torch.Tensor:
        file = os.open(facts["path"], os.O_RDWR)
        try:
            return Mapping(file, MemfdPlace(**facts["place"])).memory
        finally:
            os.close(file)

    return SimpleNamespace(map=mapped)
