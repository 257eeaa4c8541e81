"""Stages whose KV lies apart, as on GPUs, against one process: see apart_kit."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import load_ranks
from engine.core.step import StepBatch
from engine.device.layer_marks import LayerMarks
from engine.flight import Flight
from engine.parallel.leader import Leader
from engine.parallel.nccl_line import NcclLine
from engine.runner import Engine
from kvrelay.errors import PeerError
from tests.drive import run_mixed, start
from tests.models import random_checkpoint
from tests.reference import Reference, assert_same_tokens
from tests.unit.apart_kit import (
    follow,
    follow_without_room,
    follow_without_sharing,
    use_gpus_ways_on_rank_0,
)
from tests.unit.test_parallel import (
    CHUNK_TOKENS,
    TOKENS,
    assert_logits,
    assert_tokens_in_mixed_batches,
    handed_over,
    ranks,
    references,
    refused,
)
from tests.unit.test_pipeline import TURNS, alone, wait_for


@dataclass(frozen=True, slots=True)
class Kind:
    """`held`: # rank |-> the layers of each group that it holds"""

    family: str
    held: list[list[tuple[int, ...]]]
    stages: int = 2
    tensor: int = 1
    changes: dict[str, Any] = field(default_factory=dict)


KINDS = {
    "llama, an odd layer": Kind("llama", [[(2,)], [(0, 1)]], changes={"num_hidden_layers": 3}),
    "llama, one head on two ranks in each stage": Kind(
        "llama", [[(1,)], [(1,)], [(0,)], [(0,)]], tensor=2, changes={"num_key_value_heads": 1}
    ),
    "gemma2": Kind("gemma2", [[(2,), (3,)], [(0,), (1,)]], changes=TURNS),
    "llama, three stages": Kind(
        "llama", [[(3,)], [(2,)], [(0, 1)]], 3, changes={"num_hidden_layers": 4}
    ),
}


USUAL = "gemma2"


@dataclass(frozen=True, slots=True)
class Case:
    kind: Kind
    folder: Path
    engine: Engine
    references: list[Reference]


def _kinds() -> list[Any]:
    """A start of several ranks takes long."""
    return [pytest.param(name, marks=[] if name == USUAL else pytest.mark.long) for name in KINDS]


@pytest.fixture(scope="module", params=_kinds())
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    kind, folder = KINDS[request.param], tmp_path_factory.mktemp("model")
    random_checkpoint(folder, kind.family, **kind.changes)
    with pytest.MonkeyPatch.context() as patched:
        use_gpus_ways_on_rank_0(patched)
        engine = ranks(folder, kind.tensor, stages=kind.stages, follow=follow)
        yield Case(kind, folder, engine, references(folder))
        engine.close()


def test_each_rank_holds_its_layers(case: Case) -> None:
    assert case.engine.memory.lies_apart
    parts = case.engine.memory.parts
    assert [[group.layers for group in part.layout.groups] for part in parts] == case.kind.held


def test_logits_are_those_of_one_process(case: Case) -> None:
    assert_logits(case.engine, case.references)


def test_tokens_in_mixed_batches(case: Case) -> None:
    assert_tokens_in_mixed_batches(case.engine, case.references)


def test_prompts_go_to_one_process_and_back(case: Case) -> None:
    one = alone(case.folder)
    for first, second in ((case.engine, one), (one, case.engine)):
        for reference in case.references:
            handed = handed_over(first, second, reference.prompt)
            assert_same_tokens(reference, handed.emitted)


def test_chunks_are_launched_behind_one_another(case: Case) -> None:
    """Nothing waits to be collected before it is computed."""
    (reference,) = case.references[-1:]
    (one,) = start(case.engine, [reference.prompt], max_tokens=TOKENS)
    launched, before = [], None
    while one.done_tokens < len(one.prompt):
        piece = one.next_slice(CHUNK_TOKENS)
        before = case.engine.launch(StepBatch(slices=(piece,)), before=before)
        assert isinstance(before, Flight)
        launched.append(before)
        one.done_tokens += len(piece.token_ids)
    outcomes = [step.collect() for step in launched]
    one.emitted.append(outcomes[-1].sampled[0][0].token_id)
    run_mixed(case.engine, [one], chunk_tokens=CHUNK_TOKENS)
    assert_same_tokens(reference, one.emitted)


def test_layers_are_told_of_once_all_ranks_have_them(case: Case) -> None:
    (one,) = start(case.engine, [[7] * 40], max_tokens=1)
    parts, told = case.engine.memory.parts, list[int]()
    for part in parts:
        part.flat.zero_()

    def tell(layer: int) -> None:
        told.append(layer)
        for part in parts:
            for group, spec in enumerate(part.layout.groups):
                row = one.tables[group][0] * 16
                for index, held in enumerate(spec.layers):
                    assert held > layer or part.layer(group, index)[0][row].any()

    layers = case.engine.model.layers
    every = frozenset(range(layers.stop))
    case.engine.run(StepBatch(slices=(one.next_slice(64),)), LayerMarks(every, tell))
    assert told == [layers.start - 1, *layers]


def test_a_stage_that_dies_ends_the_worker(case: Case) -> None:
    """The last test of this engine. It hears of it before NCCL lets a step end without its hidden
    states."""
    lost: Future[PeerError] = Future()
    ranked: Any = case.engine._ranks
    nccl = ranked.own.line._nccl

    def hear(error: PeerError) -> None:
        assert not nccl.aborted
        lost.set_result(error)

    case.engine.watch(hear)
    (one,) = start(case.engine, [[5] * 40], max_tokens=1)
    ranked._followers[-1].process.kill()
    assert f"rank {len(ranked._followers)} has ended with exit code -9" in str(lost.result(30))
    wait_for(lambda: nccl.aborted)  # nobody waits for hidden states any more
    with pytest.raises(PeerError):
        case.engine.run(StepBatch(slices=(one.next_slice(64),)))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use_gpus_ways_on_rank_0(monkeypatch)
    return random_checkpoint(tmp_path, "llama")


@pytest.mark.processes
def test_a_rank_that_can_not_share_its_kv_says_why(folder: Path) -> None:
    refused(folder, "no handle for this memory", 1, stages=2, follow=follow_without_sharing)


@pytest.mark.processes
def test_the_reason_is_the_rank_s_whatever_rank_0_has_computed_without_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's calls that are given up leave memory as it was, and raise nothing."""
    receive, leaders = NcclLine.receive, list[Leader]()

    def received(self: NcclLine, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if shape == (1,):
            return receive(self, shape, dtype)
        wait_for(lambda: leaders[0].has_lost)
        return torch.zeros(shape, dtype=dtype)

    class Told(Leader):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            leaders.append(self)

    monkeypatch.setattr(load_ranks, "Leader", Told)
    monkeypatch.setattr(NcclLine, "receive", received)
    refused(folder, "^no room on this GPU$", 1, stages=2, follow=follow_without_room)
