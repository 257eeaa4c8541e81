"""Stages of a pipeline against one process: the same logits and tokens, and KV that goes to ranks
which share heads, and back."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine import assembly
from engine.core.sizing import MemoryProfile, of_one_host
from engine.core.step import StepBatch
from engine.device.layer_marks import LayerMarks
from engine.family.build import bare_model
from engine.family.split_check import check_stages_of_copy
from engine.load import load_engine
from engine.model.checkpoint import open_checkpoint
from engine.model.model import Model
from engine.parallel.grid import Grid
from engine.parallel.host_line import HostLine
from engine.parallel.leader import Leader
from engine.parallel.stages import check_cut
from engine.runner import Engine
from kvrelay.errors import ModelError, PeerError
from tests.drive import run_mixed, start
from tests.models import random_checkpoint, save_tokenizer
from tests.reference import Reference, assert_same_tokens
from tests.unit.test_parallel import (
    CHUNK_TOKENS,
    LIMITS,
    TOKENS,
    assert_logits,
    assert_tokens_in_mixed_batches,
    handed_over,
    ranks,
    references,
    refused,
)
from tests.unit.test_prompt_logprobs import check_scores

TURNS = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}


@dataclass(frozen=True, slots=True)
class Kind:
    """`layers` of the last stage, which is this process."""

    family: str
    layers: range
    stages: int = 2
    tensor: int = 1
    compiled: bool = False  # captures take seconds: the others run their modules
    changes: dict[str, Any] = field(default_factory=dict)


KINDS = {
    "llama": Kind("llama", range(2, 3), compiled=True, changes={"num_hidden_layers": 3}),
    "llama, tied": Kind("llama", range(1, 2), changes={"tie_word_embeddings": True}),
    "llama, two ranks in each stage": Kind("llama", range(1, 2), tensor=2),
    "gemma2": Kind("gemma2", range(2, 4), changes=TURNS),
    "gpt_oss": Kind("gpt_oss", range(2, 4), changes=TURNS),
    "mixtral, three stages": Kind("mixtral", range(4, 5), 3, changes={"num_hidden_layers": 5}),
}


@dataclass(frozen=True, slots=True)
class Case:
    kind: Kind
    folder: Path
    engine: Engine
    references: list[Reference]


@pytest.fixture(scope="module", params=sorted(KINDS))
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    kind, folder = KINDS[request.param], tmp_path_factory.mktemp("model")
    random_checkpoint(folder, kind.family, **kind.changes)
    engine = ranks(folder, kind.tensor, stages=kind.stages, compiled=kind.compiled)
    assert (engine.model.flat is not None) == kind.compiled
    yield Case(kind, folder, engine, references(folder))
    engine.close()


def test_this_process_has_the_last_layers_and_sees_all_kv(case: Case) -> None:
    assert case.engine.model.layers == case.kind.layers
    layers = [layer for group in case.engine.memory.layout.groups for layer in group.layers]
    assert sorted(layers) == list(range(case.kind.layers.stop))
    assert len(case.engine.memory.parts) == case.kind.tensor


def test_logits_are_those_of_one_process(case: Case) -> None:
    assert_logits(case.engine, case.references)


def test_tokens_in_mixed_batches(case: Case) -> None:
    assert_tokens_in_mixed_batches(case.engine, case.references)


def test_chunks_are_launched_behind_one_another(case: Case) -> None:
    """All chunks of a prompt, before the first is collected."""
    (reference,) = case.references[-1:]
    (one,) = start(case.engine, [reference.prompt], max_tokens=TOKENS)
    launched = []
    while one.done_tokens < len(one.prompt):
        piece = one.next_slice(CHUNK_TOKENS)
        launched.append(case.engine.launch(StepBatch(slices=(piece,))))
        one.done_tokens += len(piece.token_ids)
    outcomes = [step.collect() for step in launched]
    assert [len(outcome.sampled[0]) for outcome in outcomes] == [0, 0, 1]
    one.emitted.append(outcomes[-1].sampled[0][0].token_id)
    run_mixed(case.engine, [one], chunk_tokens=CHUNK_TOKENS)
    assert_same_tokens(reference, one.emitted)


def test_stages_are_charged_what_each_has_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of two has two layers of three and the embeddings, this process the head."""
    told: list[Sequence[MemoryProfile]] = []

    def heard(profiles: Sequence[MemoryProfile]) -> MemoryProfile:
        told.append(profiles)
        return of_one_host(profiles)

    monkeypatch.setattr(assembly, "of_one_host", heard)
    folder = random_checkpoint(tmp_path, "llama", num_hidden_layers=3)
    limits = replace(LIMITS, kv_memory_bytes=1 << 20, staging_slabs=2)
    engine, whole = ranks(folder, 1, stages=2, blocks=None, limits=limits), alone(folder)
    for one in (engine, whole):
        one.close()
    last, first = told[0]
    assert first.weight_bytes > last.weight_bytes > 0
    twice = first.weight_bytes + last.weight_bytes - whole.model.weight_bytes
    assert 0 <= twice < 1024, "the frequencies of rotations"
    assert last.staging_bytes > first.staging_bytes == 0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = random_checkpoint(tmp_path_factory.mktemp("pair"), "llama", num_hidden_layers=4)
    engine = ranks(folder, 1, stages=2)
    yield engine
    engine.close()


@pytest.mark.parametrize("degree", [1, 2])
def test_prompts_go_from_stages_to_ranks_and_back(
    pair: Engine, tmp_path: Path, degree: int
) -> None:
    """Computed by one engine, decoded by the other: two stages, and `degree` ranks of heads."""
    folder = random_checkpoint(tmp_path, "llama", num_hidden_layers=4)
    other = ranks(folder, degree) if degree > 1 else alone(folder)
    for first, second in ((pair, other), (other, pair)):
        for reference in references(folder):
            handed = handed_over(first, second, reference.prompt)
            assert_same_tokens(reference, handed.emitted)
    other.close()


def alone(folder: Path) -> Engine:
    return load_engine(
        open_checkpoint(str(folder)),
        device="cpu",
        dtype="float32",
        block_size=16,
        blocks=48,
        limits=LIMITS,
        compiled=False,
    )


def test_the_first_stage_goes_ahead(pair: Engine) -> None:
    """It has computed the second of two steps, of which nobody has collected the first."""
    pair.memory.flat.zero_()
    one, two = start(pair, [[5] * 40, [6] * 40], max_tokens=1)
    launched = [pair.launch(StepBatch(slices=(each.next_slice(64),))) for each in (one, two)]
    keys = pair.memory.layer(0, 0)[0]
    wait_for(lambda: bool(keys[two.tables[0][0] * 16].any()))
    assert not pair.memory.layer(0, 2)[0][one.tables[0][0] * 16].any(), "nor this stage its part"
    for step in launched:
        step.collect()
    assert pair.memory.layer(0, 3)[0][two.tables[0][0] * 16].any()


def wait_for(happened: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < ends_s
        time.sleep(1e-3)


def test_layers_are_told_of_once_all_stages_have_them(pair: Engine) -> None:
    """Those of earlier stages at once, and only the last of them: it stands for all."""
    (one,) = start(pair, [[7] * 40], max_tokens=1)
    told: list[tuple[int, bool]] = []

    def tell(layer: int) -> None:
        row = one.tables[0][0] * 16
        written = [bool(pair.memory.layer(0, i)[0][row].any()) for i in range(layer + 1)]
        told.append((layer, all(written)))

    pair.memory.flat.zero_()
    marks = LayerMarks(frozenset({0, 1, 2, 3}), tell)
    pair.run(StepBatch(slices=(one.next_slice(64),)), marks)
    assert told == [(1, True), (2, True), (3, True)]


def test_prompts_are_scored(pair: Engine, tmp_path: Path) -> None:
    one = alone(random_checkpoint(tmp_path, "llama", num_hidden_layers=4))
    check_scores(pair, references=one)
    one.close()


def test_a_stage_that_hangs_or_dies_ends_the_step(pair: Engine) -> None:
    """The last test of this engine."""
    lost: Future[PeerError] = Future()
    pair.watch(lost.set_result)
    assert isinstance(pair._ranks, Leader)
    pair._ranks.own.bound(1.0)
    (one,) = start(pair, [[5] * 40], max_tokens=1)
    step, other = StepBatch(slices=(one.next_slice(64),)), pair._ranks._followers[0].process
    other.send_signal(signal.SIGSTOP)
    with pytest.raises(PeerError, match="hangs"):
        pair.run(step)
    other.kill()
    assert "rank 1 has ended with exit code -9" in str(lost.result(30))
    with pytest.raises(PeerError):
        pair.run(step)


# --- refusals -----------------------------------------------------------------------------------


def test_a_family_without_a_plan_is_refused() -> None:
    config = AutoConfig.for_model("gpt2", n_layer=2, n_embd=8, n_head=2, vocab_size=32)
    with pytest.raises(ModelError, match=r"gpt2 family .* has no pipeline plan"):
        check_cut(AutoModelForCausalLM.from_config(config), 2)


def test_longrope_is_refused(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "phi3",
        num_hidden_layers=2,
        hidden_size=16,
        intermediate_size=8,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
        vocab_size=32,
        max_position_embeddings=64,
        original_max_position_embeddings=16,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
        },
    )
    with pytest.raises(ModelError, match=r"phi3 family .* LongRoPE"):
        check_cut(AutoModelForCausalLM.from_config(config), 2)


@pytest.mark.processes
def test_more_stages_than_layers_are_refused(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path, "llama")
    refused(folder, r"parallel\.pipeline 5: this llama model has 2 layers", 1, stages=5)


@pytest.mark.processes
def test_stages_without_layers_of_some_kind_are_refused(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path, "gpt_oss")
    refused(folder, "stage 0 .* no layer like layer 1, whose window is None", 1, stages=2)


@pytest.mark.processes
def test_stages_on_gpus_are_refused(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path, "llama")
    refused(folder, r"2 stages on cuda:1: .* choose them by CUDA", 1, stages=2, device="cuda:1")


@pytest.mark.processes
def test_a_stage_that_gets_other_hidden_states_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = HostLine.receive

    def others(self: HostLine, *given: Any) -> torch.Tensor:
        return receive(self, *given).flip(1)

    monkeypatch.setattr(HostLine, "receive", others)
    folder = random_checkpoint(tmp_path, "llama")
    refused(folder, r"llama family can't be served \(split check\)", 1, stages=2)


@pytest.mark.parametrize(
    "changes", [{"embedding_multiplier": 12.0}, {}], ids=["scaled", "not scaled"]
)
def test_a_family_that_changes_hidden_states_outside_its_layers_is_refused(
    changes: dict[str, float], tmp_path: Path
) -> None:
    """Granite scales embeddings in the model itself, so each stage would do so once more."""
    bare = bare_granite(tmp_path, changes)
    if not changes:
        check_stages_of_copy(bare)
        return
    with pytest.raises(ModelError, match=r"granite family .* \(stages check\): in stages"):
        check_stages_of_copy(bare)


def bare_granite(folder: Path, changes: dict[str, float]) -> Model:
    config = AutoConfig.for_model(
        "granite",
        num_hidden_layers=4,
        hidden_size=32,
        intermediate_size=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        **changes,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    save_tokenizer(folder, 64)
    return bare_model(folder, device="cpu", dtype="float32")


@pytest.mark.processes
def test_the_reason_is_the_rank_s_that_had_one(tmp_path: Path) -> None:
    """The neighbour of a stage that can't be only notices its end."""
    kinds = ["sliding_attention"] * 3 + ["full_attention", "sliding_attention", "full_attention"]
    folder = random_checkpoint(tmp_path, "gemma2", num_hidden_layers=6, layer_types=kinds)
    refused(folder, "stage 0 .* no layer like layer 3", 1, stages=3)


@pytest.mark.processes
def test_a_stage_that_fails_late_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When rank 0 has its KV pool already."""
    memory = Leader._memory

    def spoil(self: Leader, *given: Any) -> Any:
        made = memory(self, *given)
        for one in self._followers:
            one.process.kill()
            one.process.wait()
        return made

    monkeypatch.setattr(Leader, "_memory", spoil)
    folder = random_checkpoint(tmp_path, "llama")
    refused(folder, "rank 1 has ended with exit code -9 while it loaded", 1, stages=2)


# --- the grid -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("tensor", "stages"), [(1, 2), (2, 2), (1, 5), (3, 4)])
def test_hidden_states_pass_each_stage_once(tensor: int, stages: int) -> None:
    grid = Grid(tensor=tensor, stages=stages)
    assert grid.stage(0) == stages - 1, "rank 0 has the logits"
    for rank in range(grid.size):
        after = grid.after(rank)
        assert (after is None) == (grid.stage(rank) == stages - 1)
        if after is not None:
            assert grid.before(after) == rank
            assert grid.stage(after) == grid.stage(rank) + 1
            assert grid.tensor_rank(after) == grid.tensor_rank(rank)


@pytest.mark.parametrize(("total", "stages"), [(2, 2), (3, 2), (7, 3), (80, 6)])
def test_each_layer_is_in_one_stage(total: int, stages: int) -> None:
    grid = Grid(stages=stages)
    parts = [grid.layers(stage, total) for stage in range(stages)]
    assert [layer for part in parts for layer in part] == list(range(total))
    lengths = [*map(len, parts)]
    assert max(lengths) - min(lengths) <= 1 and lengths[-1] == min(lengths)
