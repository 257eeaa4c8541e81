"""Several ranks against one: the same logits and tokens, for families with a plan."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from engine.checkpoint import open_checkpoint
from engine.layer_marks import LayerMarks
from engine.model import load_model
from engine.parallel import leader
from engine.parallel.leader import Leader
from engine.parallel.load import load_split
from engine.parallel.split import check_plan
from engine.runner import Engine
from engine.sizing import EngineLimits
from engine.step import StepBatch
from kvrelay.errors import ModelError, PeerError
from tests.drive import run_forced, run_mixed, start
from tests.models import VOCAB_SIZE, random_checkpoint
from tests.reference import (
    Reference,
    assert_close_logits,
    assert_same_tokens,
    generate_reference,
)

CHUNK_TOKENS, TOKENS = 64, 24
LENGTHS = (1, 17, 64, 130)
LIMITS = EngineLimits(max_model_len=None, prefill_chunk_tokens=CHUNK_TOKENS, max_running_requests=8)


@dataclass(frozen=True, slots=True)
class Case:
    engine: Engine
    references: list[Reference]


def ranks(folder: Path, size: int, *, device: str = "cpu", compiled: bool = False) -> Engine:
    return load_split(
        open_checkpoint(str(folder)),
        size,
        threads=1,
        device=device,
        dtype="float32",
        block_size=16,
        blocks=48,
        limits=LIMITS,
        compiled=compiled,
    )


def references(folder: Path) -> list[Reference]:
    letters = random.Random(5)
    prompts = [[letters.randrange(2, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
    model = load_model(open_checkpoint(str(folder)), device="cpu", dtype="float32")
    return [generate_reference(model, p, tokens=TOKENS) for p in prompts]


FAMILIES = {
    "llama": {"vocab_size": 511},  # no rank count divides it
    "mistral": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma2": {},
    "mixtral": {},
}
COMPILED = {"llama"}
"""The others run their modules: captures take seconds."""


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp(request.param)
    random_checkpoint(folder, request.param, **FAMILIES[request.param])
    engine = ranks(folder, 2, compiled=request.param in COMPILED)
    assert (engine.model.flat is not None) == (request.param in COMPILED)
    yield Case(engine, references(folder))
    engine.close()


def test_each_rank_has_its_heads_of_the_pool(case: Case) -> None:
    assert len(case.engine.memory.parts) == 2
    for group in case.engine.layout.groups:
        assert {plane.heads for plane in group.planes} == {2}


def test_logits_are_those_of_one_rank(case: Case) -> None:
    for reference in case.references:
        (one,) = start(case.engine, [reference.prompt], max_tokens=TOKENS)
        logits = run_forced(case.engine, one, reference.tokens, chunk_tokens=CHUNK_TOKENS)
        assert_close_logits(reference, logits)


def test_tokens_in_mixed_batches(case: Case) -> None:
    sequences = start(case.engine, [r.prompt for r in case.references], max_tokens=TOKENS)
    run_mixed(case.engine, sequences, chunk_tokens=CHUNK_TOKENS)
    for reference, one in zip(case.references, sequences, strict=True):
        assert_same_tokens(reference, one.emitted)


def refused(folder: Path, message: str, size: int = 2, **kind: str) -> None:
    before = children()
    with pytest.raises(ModelError, match=message):
        ranks(folder, size, **kind)
    assert children() == before, "no rank is left"


def children() -> set[psutil.Process]:
    return set(psutil.Process().children())


def test_a_plan_that_leaves_attention_whole_is_refused(tmp_path: Path) -> None:
    refused(random_checkpoint(tmp_path, "gpt_oss"), "gpt_oss family .* leaves attention whole")


def test_a_plan_that_needs_more_than_cuts_is_refused(tmp_path: Path) -> None:
    refused(random_checkpoint(tmp_path, "phi3"), "its plan asks for rowwise_split_input")


def test_a_family_without_a_plan_is_refused() -> None:
    config = AutoConfig.for_model("gpt2", n_layer=1, n_embd=8, n_head=2, vocab_size=32)
    with pytest.raises(ModelError, match=r"gpt2 family .* has no tensor parallel plan"):
        check_plan(AutoModelForCausalLM.from_config(config))


def test_a_rank_that_can_not_load_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = random_checkpoint(tmp_path, "llama")
    orders = Leader.in_turn

    def spoil(self: Leader, work: Callable[[], object]) -> object:
        self._orders["dtype"] = "float1"
        return orders(self, work)

    monkeypatch.setattr(Leader, "in_turn", spoil)
    refused(folder, "float1")


def test_heads_that_can_not_be_shared_are_refused(tmp_path: Path) -> None:
    refused(random_checkpoint(tmp_path, "llama"), r"parallel\.tensor 4 .* choose 1 or 2", 4)


def test_layers_that_can_not_be_cut_are_refused(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path, "llama", intermediate_size=97)
    refused(folder, r"parallel\.tensor 2 can't split .*mlp\.gate_proj of this llama model: .* 97")


def test_ranks_are_refused_on_other_devices(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path, "llama")
    refused(folder, "parallel.tensor 2 on cuda:0", device="cuda:0")


def test_a_rank_that_dies_while_it_loads_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader.sys, "executable", "/bin/false")
    refused(random_checkpoint(tmp_path, "llama"), "rank 1 has ended with exit code 1 while")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = ranks(random_checkpoint(tmp_path_factory.mktemp("pair"), "llama"), 2)
    assert not list(Path(tempfile.gettempdir()).glob(f"kvrelay-ranks-{os.getpid()}-*"))
    yield engine
    engine.close()


def test_layers_are_told_of_once_all_ranks_have_them(pair: Engine) -> None:
    (one,) = start(pair, [[5] * 40], max_tokens=1)
    told: list[tuple[int, bool]] = []

    def tell(layer: int) -> None:
        parts = [part.layer(0, layer)[0] for part in pair.memory.parts]
        rows = [part[one.tables[0][0] * 16] for part in parts]
        told.append((layer, all(bool(row.any()) for row in rows)))

    pair.run(StepBatch(slices=(one.next_slice(64),)), LayerMarks(frozenset({0, 1}), tell))
    assert told == [(0, True), (1, True)]


def test_a_rank_that_dies_is_told_of_and_ends_the_step(pair: Engine) -> None:
    lost: Future[PeerError] = Future()
    pair.watch(lost.set_result)
    assert isinstance(pair._ranks, Leader)
    pair._ranks._followers[0].process.kill()
    assert "rank 1 has ended with exit code -9" in str(lost.result(30))
    (one,) = start(pair, [[5] * 40], max_tokens=1)
    with pytest.raises(PeerError):
        pair.run(StepBatch(slices=(one.next_slice(64),)))
