"""What is told of a step's layers while it runs."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from engine.core.sizing import EngineLimits
from engine.core.step import SampleRequest, SequenceSlice, StepBatch
from engine.device.layer_marks import LayerMarks, LayerWatch
from engine.load import load_engine
from engine.model.checkpoint import open_checkpoint
from engine.runner import Engine
from kvpool.core.layout.layout import BlockId
from kvrelay.types import RequestKey, Sampling
from tests.models import random_checkpoint

LIMITS = EngineLimits(max_model_len=256, prefill_chunk_tokens=64, max_running_requests=2)


def engine(folder: Path, device: str) -> Engine:
    model = random_checkpoint(folder, "gemma2", num_hidden_layers=4)
    return load_engine(
        open_checkpoint(str(model)),
        device=device,
        dtype="float32",
        block_size=16,
        blocks=4,
        limits=LIMITS,
    )


def batch(engine: Engine) -> StepBatch:
    table = tuple(BlockId(i) for i in range(2))
    sample = SampleRequest(
        sampling=Sampling(max_tokens=1, seed=0), choice=0, prompt_ids=(), emitted_ids=()
    )
    whole = SequenceSlice(
        key=RequestKey("a", 0),
        choice=0,
        token_ids=tuple(range(2, 32)),
        start=0,
        tables=(table,) * len(engine.layout.groups),
        samples=(sample,),
        prompt_tokens=30,
    )
    return StepBatch(slices=(whole,))


def layer_planes(engine: Engine, layer: int) -> list[torch.Tensor]:
    """Its first 30 slots."""
    (place,) = [
        (group, spec.layers.index(layer))
        for group, spec in enumerate(engine.layout.groups)
        if layer in spec.layers
    ]
    return [plane[:30] for plane in engine.memory.layer(*place)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_marked_layer_is_told_once_its_kv_is_written(tmp_path: Path, device: str) -> None:
    own = engine(tmp_path, device)
    at_mark: dict[int, list[torch.Tensor]] = {}

    def tell(layer: int) -> None:
        at_mark[layer] = [plane.clone() for plane in layer_planes(own, layer)]
        if device == "cpu":  # a GPU may be further by now
            assert not any(plane.any() for plane in layer_planes(own, layer + 1))

    own.run(batch(own), LayerMarks(frozenset({0, 2}), tell))
    assert list(at_mark) == [0, 2]
    for layer, planes in at_mark.items():
        for seen, after in zip(planes, layer_planes(own, layer), strict=True):
            assert seen.any()
            assert torch.equal(seen, after)


class Event:
    """In place of CUDA's: the device is there already, but for events that come after `held`."""

    held: threading.Event | None = None

    def __init__(self, *, blocking: bool) -> None:
        assert blocking
        self._held = Event.held

    def record(self) -> None: ...

    def query(self) -> bool:
        return self._held is None or self._held.is_set()

    def synchronize(self) -> None:
        assert self._held is None or self._held.wait(20)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> LayerWatch:
    """Not run on a device."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return LayerWatch()


def watching() -> int:
    return sum(thread.name == "kvrelay-layers" for thread in threading.enumerate())


def test_a_watch_has_a_thread_only_while_it_has_marks(watch: LayerWatch) -> None:
    """Engines that are made to check and measure a model leave none behind."""
    before = watching()
    watch.drain()
    watch.close()
    assert watching() == before
    told: list[int] = []
    watch.behind(LayerMarks(frozenset({0}), told.append)).wrote(0)
    watch.drain()
    assert told == [0]
    assert watching() == before + 1
    watch.close()
    assert watching() == before


@pytest.mark.timeout(20)
def test_a_step_that_has_ended_does_not_wait_for_the_marks_of_the_next_one(
    watch: LayerWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, int]] = []
    reached = threading.Event()
    watch.behind(LayerMarks(frozenset({0}), lambda layer: told.append(("first", layer)))).wrote(0)
    monkeypatch.setattr(Event, "held", reached)
    watch.behind(LayerMarks(frozenset({0}), lambda layer: told.append(("next", layer)))).wrote(0)
    watch.drain()
    assert told == [("first", 0)]
    reached.set()
    watch.drain()
    assert told == [("first", 0), ("next", 0)]
    watch.close()


@pytest.mark.timeout(20)
def test_what_tell_raises_ends_the_step_and_not_the_watch(watch: LayerWatch) -> None:
    told: list[int] = []

    def tell(layer: int) -> None:
        if layer == 0:
            raise KeyError("no such job")
        told.append(layer)

    marks = watch.behind(LayerMarks(frozenset({0, 1}), tell))
    marks.wrote(0)
    marks.wrote(1)
    with pytest.raises(KeyError, match="no such job"):
        watch.drain()
    assert told == [1]
    watch.drain()
    watch.close()
