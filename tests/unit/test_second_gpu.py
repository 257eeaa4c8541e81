"""What a worker on `cuda:1` does goes to that device, not to device 0, and in which order: its
loading, its steps, the copies of its KV.

Not run on a device: torch's CUDA functions are stood in for, down to which device is current.
"""

from __future__ import annotations

import queue
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from bench.engine.ranks import tensor
from cluster.worker import mover as moving
from cluster.worker.mover import Mover
from engine.attention.cuda.graphs import CudaRecorder
from engine.core.step import StepBatch
from engine.device.streams import StepStream
from engine.family import build
from engine.model.checkpoint import open_checkpoint
from engine.runner import Engine
from kvpool.core.blocks.holding import Holder
from kvpool.core.transfer.messages import BlocksDigested, DigestBlocks
from kvpool.core.transfer.write import TokenSpan
from kvpool.memory.kv_memory import KvMemory
from kvpool.transport.mapped.cuda_ipc import CudaHandle, CudaIpcPeer
from kvpool.transport.peer.base import Read, RegionName
from kvrelay.errors import PeerError
from kvrelay.types import RequestKey
from tests.models import random_checkpoint
from tests.unit.test_layer_marks import batch, engine

SECOND = torch.device("cuda:1")


@dataclass(frozen=True, slots=True)
class Stream:
    """What is told of it: the device, and its number there; 0: the device's own."""

    cuda: Cuda = field(repr=False, compare=False)
    index: int
    number: int

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.index)

    def wait_stream(self, other: Stream) -> None:
        assert self.index == other.index
        self.cuda.log.append(("waits", self.number, other.number))

    def synchronize(self) -> None:
        self.cuda.log.append(("synchronized", self.index, self.number))


class Cuda:
    """Two devices; the first is current until something says otherwise. `log`: what was asked of
    streams and events, in order."""

    def __init__(self) -> None:
        self.current = 0
        self.ran_on: list[int] = []
        self.log: list[tuple[object, ...]] = []
        self.streams = self.events = 0
        self.within = 0  # the current stream's number

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
        before = self.current, self.within
        self.current, self.within = stream.index, stream.number
        yield
        self.current, self.within = before

    def new_stream(self, device: torch.device | None = None, priority: int = 0) -> Stream:
        self.streams += 1
        return Stream(self, self._index(device), self.streams)

    def current_stream(self, device: torch.device | None = None) -> Stream:
        index = self._index(device)
        return Stream(self, index, self.within if index == self.current else 0)

    def _index(self, device: torch.device | None) -> int:
        if device is None:
            return self.current
        assert device.index is not None
        return device.index

    def new_event(self, *, blocking: bool = False) -> Any:
        self.events += 1
        name = f"event {self.events}"
        return SimpleNamespace(
            record=lambda stream: self.log.append((name, "on", stream.index, stream.number)),
            synchronize=lambda: self.log.append((name, "reached")),
        )

    @contextmanager
    def graph(self, graph: Any, *, stream: Any, **_: object) -> Iterator[None]:
        with self.stream(stream):
            yield

    def run(self) -> torch.Tensor:
        self.ran_on.append(self.current)
        return torch.zeros(1)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    stand_ins = {
        "set_device": made.set_device,
        "device": made.device,
        "device_count": lambda: 2,
        "stream": made.stream,
        "Stream": made.new_stream,
        "current_stream": made.current_stream,
        "Event": made.new_event,
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


@pytest.mark.parametrize("goes_first", [False, True])
def test_steps_run_on_a_stream_of_the_models_device(cuda: Cuda, goes_first: bool) -> None:
    steps = StepStream(SECOND, goes_first=goes_first)
    with steps.within():
        cuda.run()
        wait = steps.mark()
    with steps.beside():
        cuda.run()
    cuda.run()
    wait()
    assert cuda.ran_on == [1, 1, 0]
    assert cuda.log == [("waits", 1, 0), ("event 1", "on", 1, 1), ("event 1", "reached")]


def _chunks(engine: Engine) -> list[StepBatch]:
    """Of one prompt; the last one draws a token."""
    (whole,) = batch(engine).slices
    pieces = [
        replace(whole, token_ids=whole.token_ids[start : start + 10], start=start, samples=())
        for start in (0, 10, 20)
    ]
    pieces[-1] = replace(pieces[-1], samples=whole.samples)
    return [StepBatch(slices=(piece,)) for piece in pieces]


@pytest.fixture
def own(tmp_path: Path) -> Engine:
    """On the CPU, loaded as everywhere."""
    return engine(tmp_path, "cpu")


def test_a_chunk_behind_another_is_on_the_stream_before_anybody_waits(
    own: Engine, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three chunks two are launched at most. The model runs on the CPU; streams and events are
    those of a device."""
    own._stream = StepStream(SECOND, goes_first=False)
    computed = own.logits

    def logits(asked: StepBatch, *rest: Any) -> torch.Tensor:
        cuda.log.append(("computes from", asked.slices[0].start, cuda.current, cuda.within))
        return computed(asked, *rest)

    monkeypatch.setattr(own, "logits", logits)
    first, second, third = _chunks(own)
    running = own.launch(first)
    behind = own.launch(second, before=running)
    running.collect()
    last = own.launch(third, before=behind)
    behind.collect()
    (drawn,) = last.collect().sampled
    assert cuda.log == [
        *(("waits", 1, 0), ("computes from", 0, 1, 1), ("event 1", "on", 1, 1)),
        *(("waits", 1, 0), ("computes from", 10, 1, 1), ("event 2", "on", 1, 1)),
        ("event 1", "reached"),
        *(("waits", 1, 0), ("computes from", 20, 1, 1), ("event 3", "on", 1, 1)),
        *(("event 2", "reached"), ("event 3", "reached")),
    ]
    own._stream = StepStream(torch.device("cpu"), goes_first=False)
    ((alone,),) = own.run(batch(own)).sampled
    assert drawn[0].token_id == alone.token_id


class Kv(KvMemory):
    """Of the second device, without memory."""

    def __init__(self) -> None:
        self.device = SECOND


def test_kv_is_moved_on_a_stream_of_its_own_device(cuda: Cuda) -> None:
    memory = Kv()
    with memory.beside():
        cuda.run()
        memory.settle()
    memory.settle()
    assert cuda.ran_on == [1]
    assert cuda.log == [("synchronized", 1, 1), ("synchronized", 1, 0)]


def test_the_mover_copies_on_a_stream_of_the_kvs_device(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its threads: in a new one device 0 is current."""

    def digest(*_: object) -> tuple[()]:
        cuda.run()
        return ()

    posted: queue.SimpleQueue[Any] = queue.SimpleQueue()
    monkeypatch.setattr(moving, "digest", digest)
    mover = Mover(Kv(), Mock(), "", slabs=0, slab_bytes=0, post=posted.put, crashed=posted.put)
    key = RequestKey("a", 0)
    span = TokenSpan(start=0, tokens=16, next_position=16)
    mover.put(DigestBlocks(holder=Holder("decode", key), span=span, tables=((),)))
    assert isinstance(posted.get(timeout=20), BlocksDigested)
    mover.close()
    assert (cuda.ran_on, cuda.streams) == ([1], 1)


def test_the_ipc_peer_copies_on_a_stream_of_its_own_device(cuda: Cuda) -> None:
    """After the work of the caller there, and until its copies are done, also when one fails."""

    def fetch(_: object) -> None:
        cuda.run()
        raise PeerError("it has no such region")

    peer = CudaIpcPeer("a", fetch, SECOND)  # type: ignore[arg-type]
    peer.write((), lambda: None)
    read = Read(region=RegionName("gone"), offset=0, target=torch.zeros(8))
    with pytest.raises(PeerError, match="no such region"):
        peer.read((read,), lambda: None)
    copied = [("waits", 1, 0), ("event 1", "on", 1, 1), ("event 1", "reached")]
    assert cuda.log == [*copied, *copied]
    assert cuda.ran_on == [1]


def test_the_ipc_peer_maps_memory_for_its_own_device(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def map_for(index: int, *_: object) -> None:
        asked.append(index)
        raise RuntimeError("as far as it goes without a device")

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", map_for)
    handle = CudaHandle(
        handle=b"h",
        storage_bytes=8,
        storage_offset=0,
        counter_handle=b"c",
        counter_offset=0,
        event_handle=b"e",
        event_counts=True,
        offset=0,
        nbytes=8,
    )
    peer = CudaIpcPeer("a", Mock(return_value=Mock(payload=handle.pack())), SECOND)
    with pytest.raises(PeerError, match="cuda:1 cannot map"):
        peer.window(RegionName("r"), lambda: None)
    assert asked == [1]


def test_ranks_are_skipped_with_a_line_below_two_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("two GPUs are needed")

    monkeypatch.setattr(tensor, "measure", never)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(sys, "argv", ["tensor", "--device=cuda"])
    tensor.main()
    assert "skipped: 2 ranks on CUDA need 2 GPUs, and torch sees 1" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(AssertionError, match="two GPUs are needed"):
        tensor.main()
