"""`attention.backend: auto` where several are installed: whole decode steps are compared, planning
and replays included.

Not run on a device: a step costs what its backend says, on a clock of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import assembly, load, step_comparison
from engine.assembly import Assembly
from engine.attention.backend import Backend, Prepared
from engine.attention.choosing.choice import ChosenBackend, choose_backends
from engine.core.options import CudaOptions
from engine.core.sizing import EngineLimits
from engine.core.step import SequenceSlice
from engine.device.cuda_memory import Reading
from engine.device.layer_marks import LayerMarks
from engine.model.checkpoint import Checkpoint, open_checkpoint
from engine.runner import Engine
from engine.step_comparison import blocks_wanted, fastest, sequences_of, step_times, told
from kvpool.core.layout.layout import KvLayout, LayerGroup, Plane
from kvpool.memory.kv_memory import KvMemory
from kvrelay.errors import ModelError
from tests.models import random_checkpoint

LIMITS = EngineLimits(max_model_len=64, prefill_chunk_tokens=16, max_running_requests=3)
RECORDED_S = 1.0


@dataclass
class Clock:
    """What was launched, in order: the backend's name and how many sequences."""

    now_s: float = 0.0
    steps: list[tuple[str, int]] = field(default_factory=list)

    def read(self) -> float:
        return self.now_s

    def step(self, name: str, sequences: int, step_s: float) -> None:
        self.now_s += step_s
        self.steps.append((name, sequences))


@dataclass
class Costly:
    """Another backend, whose steps take so long."""

    name: str
    step_s: float
    clock: Clock
    own: Backend
    breaks_at: int = 1 << 30
    "The first position at which it fails."
    is_wrong: bool = False

    def prepare(self, slices: Sequence[SequenceSlice], marks: LayerMarks | None = None) -> Prepared:
        if max(piece.start for piece in slices) >= self.breaks_at:
            raise TypeError("plan() takes no such pages")
        self.clock.step(self.name, len(slices), self.step_s)
        found = self.own.prepare(slices, marks)
        if self.is_wrong:
            found = replace(found, positions=found.positions // 2)
        return found


@dataclass
class Graphs:
    """Recorded steps of one sequence or two."""

    clock: Clock
    vocab: int

    def has(self, slices: Sequence[SequenceSlice]) -> bool:
        return all(len(piece.token_ids) == 1 for piece in slices)

    def logits(
        self, slices: Sequence[SequenceSlice], token_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.clock.step("replayed", len(slices), RECORDED_S)
        return torch.zeros(len(slices), self.vocab)

    def replay(self, sequences: int) -> torch.Tensor:
        raise AssertionError("steps are whole")


@dataclass
class Memory:
    """Of a device that isn't there."""

    device: torch.device
    released: list[bool] = field(default_factory=list)

    def reading(self) -> Reading:
        return Reading(total_bytes=2**34, free_bytes=2**33, reserved_bytes=0)

    def release(self) -> None:
        self.released.append(True)


@dataclass
class World:
    """The backends that are "installed", the first as triton would be."""

    checkpoint: Checkpoint
    patched: pytest.MonkeyPatch
    clock: Clock = field(default_factory=Clock)
    records: bool = True

    def load(self, *costs: dict[str, Any]) -> Assembly:
        taken: list[Assembly] = []

        def several(name: str, *of: Any) -> tuple[ChosenBackend, ...]:
            (own,) = choose_backends("native", *of)
            return tuple(self._costly(own, **cost) for cost in costs)

        def sized(one: Assembly, blocks: int | None) -> Any:
            taken.append(one)
            return sizing(one, blocks)

        sizing = Assembly.sizing
        self.patched.setattr(load, "choose_backends", several)
        self.patched.setattr(Assembly, "sizing", sized)
        self.patched.setattr(assembly, "CudaMemory", Memory)
        self.patched.setattr(assembly, "_is_well", lambda device: True)
        self.patched.setattr(assembly, "rehearse_recording", self._record)
        self.patched.setattr(
            assembly, "step_times", lambda *args: step_times(*args, clock=self.clock.read)
        )
        load.load_engine(
            self.checkpoint,
            device="cpu",
            dtype="auto",
            block_size=16,
            blocks=8,
            limits=LIMITS,
            cuda=CudaOptions(graphs=self.records),
            compiled=False,
        )
        return taken[0]

    def _costly(self, own: ChosenBackend, name: str, step_s: float, **how: Any) -> ChosenBackend:
        def opened(memory: KvMemory) -> Backend:
            plain = own.open(memory)
            assert plain is not None
            return Costly(name, step_s, self.clock, plain, **how)

        return ChosenBackend(name, opened)  # type: ignore[arg-type]

    def _record(self, engine: Engine, most: int) -> Engine:
        assert most == 3
        if isinstance(engine.backend, Costly) and engine.backend.name == "triton":
            engine.graphs = Graphs(self.clock, engine.facts.vocab_size)
        return engine


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(open_checkpoint(str(random_checkpoint(tmp_path))), monkeypatch)


TRITON = {"name": "triton", "step_s": 5.0}


@pytest.mark.parametrize(
    ("step_s", "taken"), [(0.9 * RECORDED_S, "flash"), (0.96 * RECORDED_S, "triton")]
)
def test_a_backend_must_beat_replayed_steps(world: World, step_s: float, taken: str) -> None:
    """Which costs less than triton's own from Python, and more or less than its replays."""
    assert world.load(TRITON, {"name": "flash", "step_s": step_s}).backend.name == taken
    assert {name for name, _ in world.clock.steps[-100:]} == {"replayed", "flash"}


def test_without_graphs_its_own_steps_count(world: World) -> None:
    world.records = False
    found = world.load(TRITON, {"name": "flash", "step_s": 1.5 * RECORDED_S})
    assert found.backend.name == "flash"


def test_engines_take_turns_with_one_sequence_and_many(world: World) -> None:
    world.load(TRITON, {"name": "flash", "step_s": 2.0}, {"name": "flashinfer", "step_s": 3.0})
    turns = [step for step, _ in groupby(world.clock.steps)]
    one_round = [
        (name, sequences) for name in ("replayed", "flash", "flashinfer") for sequences in (1, 3)
    ]
    assert turns[-18:] == 3 * one_round


def test_what_gives_wrong_logits_is_left_out(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        found = world.load(TRITON, {"name": "flash", "step_s": 0.1, "is_wrong": True})
    assert found.backend.name == "triton"
    assert "auto goes on without flash failed" in caplog.text
    assert "paged logits differ" in caplog.text


def test_what_fails_at_long_contexts_is_left_out(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Beyond the tokens that are checked."""
    fails = {"name": "flashinfer", "step_s": 0.1, "breaks_at": 40}
    with caplog.at_level(logging.INFO):
        found = world.load(TRITON, fails, {"name": "flash", "step_s": 0.5})
    assert found.backend.name == "flash"
    assert "flashinfer failed (plan() takes no such pages)" in caplog.text
    assert "auto is flash: ms of a decode step of 1 and 3 sequences: triton 1000.00" in caplog.text


@pytest.mark.parametrize("why", ["other ranks wait", "the device is broken"])
def test_where_the_start_cant_go_on_without_it_the_error_says_what_to_do(
    world: World, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = Assembly._tried

    def refuse(*_: object) -> None:
        raise TypeError("no such plan")

    def in_trouble(one: Assembly, *args: Any) -> Engine | None:
        if why == "the device is broken":
            monkeypatch.setattr(assembly, "_is_well", lambda device: False)
            return tried(one, *args)
        monkeypatch.setattr(Assembly, "check", refuse)
        model = SimpleNamespace(group=object(), device=one.model.device)
        return tried(replace(one, model=model), *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Assembly, "_tried", in_trouble)
    with pytest.raises(ModelError, match=r"attention\.backend: auto compared.*name another one"):
        world.load(TRITON, {"name": "flash", "step_s": 0.1, "breaks_at": 40})


@pytest.mark.parametrize("ranks", [1, 2])
def test_where_there_is_no_memory_to_compare_in_the_first_is_taken(
    world: World, ranks: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ranks would not all know."""

    def full(one: Assembly, device: object) -> KvMemory:
        if ranks == 2:
            object.__setattr__(one.model, "group", object())
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Assembly, "_compared_memory", full)
    if ranks == 2:
        with pytest.raises(ModelError, match=r"no memory in which to compare.*name one, such as t"):
            world.load(TRITON, {"name": "flash", "step_s": 0.1})
    else:
        assert world.load(TRITON, {"name": "flash", "step_s": 0.1}).backend.name == "triton"
        assert "no memory in which to compare" in caplog.text


def test_of_several_ranks_the_sums_decide(world: World) -> None:
    """The other rank is as slow with what is fast here."""
    found = world.load(TRITON)
    there = torch.tensor([9.0, 9.0])
    group = SimpleNamespace(sum=lambda part: part + there)
    one = replace(found, model=SimpleNamespace(group=group))  # type: ignore[arg-type]
    assert one._of_all_ranks((1.0, 2.0)) == (10.0, 11.0)
    assert found._of_all_ranks((1.0, 2.0)) == (1.0, 2.0)


def test_both_loads_count() -> None:
    """One sequence gains 20 %, many lose 20 %; or lose 5 %."""
    assert fastest({"first": (1.0, 10.0), "other": (0.8, 12.0)}) == "first"
    assert fastest({"first": (1.0, 10.0), "other": (0.8, 10.5)}) == "other"
    assert fastest({"first": (1.0,), "other": (0.9,), "third": (0.8,)}) == "third"


def test_sequences_have_their_own_blocks_as_far_as_memory_goes() -> None:
    planes = (Plane(name="k", heads=2, dim=64), Plane(name="v", heads=2, dim=64))
    layout = KvLayout(
        groups=(LayerGroup(layers=(0,), planes=planes),), dtype="bfloat16", block_size=16
    )
    block = layout.bytes_per_block
    assert sequences_of(1) == (1,)
    assert sequences_of(256) == (1, 64)
    assert blocks_wanted(layout, 256, 8192, 2**40) == 64 * 125
    assert blocks_wanted(layout, 4, 8192, 4 * 300 * block) == 300
    assert blocks_wanted(layout, 4, 8192, 0) == 125
    assert blocks_wanted(layout, 4, 100, 2**40) == 4 * 7


def test_the_log_names_the_load() -> None:
    assert told({"triton": (0.0046, 0.0127)}, 64) == (
        "ms of a decode step of 1 and 64 sequences: triton 4.60 and 12.70"
    )
    assert step_comparison.CONTEXT_TOKENS == 2000
