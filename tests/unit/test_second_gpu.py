"""What a worker on `cuda:1` starts with goes to that device, not to device 0.

Not run on a device: torch's CUDA functions are stood in for, down to which device is current.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.attention.cuda.graphs import CudaRecorder
from engine.family import build
from engine.model.checkpoint import open_checkpoint
from tests.models import random_checkpoint

SECOND = torch.device("cuda:1")


class Cuda:
    """Two devices; the first is current until something says otherwise."""

    def __init__(self) -> None:
        self.current = 0
        self.ran_on: list[int] = []

    def set_device(self, device: torch.device) -> None:
        assert device.index is not None
        self.current = device.index

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index or 0
        yield
        self.current = before

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.index
        yield
        self.current = before

    def new_stream(self, device: torch.device | None = None) -> Any:
        index = self.current if device is None else device.index
        return SimpleNamespace(index=index, wait_stream=lambda other: same(index, other.index))

    @contextmanager
    def graph(self, graph: Any, *, stream: Any, **_: object) -> Iterator[None]:
        with self.stream(stream):
            yield

    def run(self) -> torch.Tensor:
        self.ran_on.append(self.current)
        return torch.zeros(1)


def same(index: int, other: int) -> None:
    assert index == other


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    stand_ins = {
        "set_device": made.set_device,
        "device": made.device,
        "device_count": lambda: 2,
        "stream": made.stream,
        "Stream": made.new_stream,
        "current_stream": made.new_stream,
        "graph": made.graph,
        "graph_pool_handle": lambda: None,
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return made


def test_loading_makes_the_device_current(
    cuda: Cuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Loading(Exception):
        pass

    def load_config(_: object) -> None:
        raise Loading

    monkeypatch.setattr(build, "_load_config", load_config)
    checkpoint = open_checkpoint(str(random_checkpoint(tmp_path)))
    with pytest.raises(Loading):
        build.load_model(checkpoint, device="cuda:1", dtype="auto")
    assert cuda.current == 1


def test_graphs_are_recorded_on_the_models_device(cuda: Cuda) -> None:
    """In another thread than the one that loaded, too: there device 0 is current."""
    CudaRecorder(SECOND)(cuda.run)()
    assert cuda.ran_on == [1, 1, 1]
    assert cuda.current == 0
