"""Several ranks against one: the same logits and tokens, for families with a plan."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine import assembly, follower
from engine.core.sizing import EngineLimits, MemoryProfile
from engine.core.step import SequenceSlice, StepBatch
from engine.device.layer_marks import LayerMarks
from engine.family.build import bare_model, fill, load_model
from engine.family.split_check import check_split, first_layers
from engine.load import load_engine
from engine.load_ranks import load_split
from engine.memory_profile import profile_memory
from engine.model.checkpoint import open_checkpoint
from engine.parallel import leader
from engine.parallel.grid import Grid
from engine.parallel.leader import Leader
from engine.parallel.message import StepKind
from engine.parallel.split import _Cutter, check_plan
from engine.runner import Engine
from kvpool.core.layout.shards import Shard, ShardLayout
from kvpool.core.transfer.plan import cut
from kvpool.core.transfer.write import Side, TokenSpan
from kvpool.memory.collate import gather_write, scatter_write
from kvrelay.errors import ModelError, PeerError
from tests.drive import Running, run_forced, run_mixed, start, step_forced
from tests.forked_ranks import Follow, fork_ranks
from tests.forks import start_server
from tests.models import VOCAB_SIZE, random_checkpoint
from tests.reference import Reference, assert_close_logits, assert_same_tokens, generate_reference
from tests.unit.test_prompt_logprobs import check_scores

CHUNK_TOKENS, TOKENS = 64, 24
LENGTHS = (1, 17, 64, 130)
LIMITS = EngineLimits(max_model_len=None, prefill_chunk_tokens=CHUNK_TOKENS, max_running_requests=8)


def ranks(
    folder: Path,
    size: int,
    *,
    stages: int = 1,
    device: str = "cpu",
    compiled: bool = False,
    blocks: int | None = 48,
    limits: EngineLimits = LIMITS,
    follow: Follow = follower.main,
) -> Engine:
    """`follow`: the main function of the other ranks."""
    with pytest.MonkeyPatch.context() as patched:
        fork_ranks(patched, follow)
        return load_split(
            open_checkpoint(str(folder)),
            Grid(tensor=size, stages=stages),
            threads=1,
            device=device,
            dtype="float32",
            block_size=16,
            blocks=blocks,
            limits=limits,
            compiled=compiled,
        )


def references(folder: Path) -> list[Reference]:
    letters = random.Random(5)
    prompts = [[letters.randrange(2, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
    model = load_model(open_checkpoint(str(folder)), device="cpu", dtype="float32")
    return [generate_reference(model, p, tokens=TOKENS) for p in prompts]


@dataclass(frozen=True, slots=True)
class Kind:
    """`heads` for KV that each rank has."""

    family: str
    size: int = 2
    heads: int = 1
    compiled: bool = False  # captures take seconds: the others run their modules
    changes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Case:
    kind: Kind
    folder: Path
    engine: Engine
    references: list[Reference]


KINDS = {
    "llama": Kind("llama", compiled=True, changes={"vocab_size": 511}),  # no rank count divides it
    "llama, one head twice": Kind("llama", compiled=True, changes={"num_key_value_heads": 1}),
    "qwen2, two heads twice": Kind("qwen2", size=4),
    "qwen3": Kind("qwen3", changes={"tie_word_embeddings": True}),
    "mistral": Kind("mistral"),
    "gemma2": Kind("gemma2"),
    "gemma3, one head twice": Kind("gemma3_text", changes={"num_key_value_heads": 1}),
    "mixtral": Kind("mixtral"),
    "qwen3_moe": Kind("qwen3_moe"),
}


@pytest.fixture(scope="module", params=sorted(KINDS))
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    kind, folder = KINDS[request.param], tmp_path_factory.mktemp("model")
    random_checkpoint(folder, kind.family, **kind.changes)
    engine = ranks(folder, kind.size, compiled=kind.compiled)
    assert (engine.model.flat is not None) == kind.compiled
    yield Case(kind, folder, engine, references(folder))
    engine.close()


def test_each_rank_has_its_heads_of_the_pool(case: Case) -> None:
    assert len(case.engine.memory.parts) == case.kind.size
    for part in case.engine.memory.parts:
        for group in part.layout.groups:
            assert {plane.heads for plane in group.planes} == {case.kind.heads}


def test_logits_are_those_of_one_rank(case: Case) -> None:
    assert_logits(case.engine, case.references)


def assert_logits(engine: Engine, expected: list[Reference]) -> None:
    for reference in expected:
        (one,) = start(engine, [reference.prompt], max_tokens=TOKENS)
        logits = run_forced(engine, one, reference.tokens, chunk_tokens=CHUNK_TOKENS)
        assert_close_logits(reference, logits)


def test_tokens_in_mixed_batches(case: Case) -> None:
    assert_tokens_in_mixed_batches(case.engine, case.references)


def assert_tokens_in_mixed_batches(engine: Engine, expected: list[Reference]) -> None:
    sequences = start(engine, [r.prompt for r in expected], max_tokens=TOKENS)
    run_mixed(engine, sequences, chunk_tokens=CHUNK_TOKENS)
    for reference, one in zip(expected, sequences, strict=True):
        assert_same_tokens(reference, one.emitted)


def test_a_prompt_goes_to_one_rank_and_back(case: Case) -> None:
    """Computed by one engine, decoded by the other."""
    one = load_engine(
        open_checkpoint(str(case.folder)),
        device="cpu",
        dtype="float32",
        block_size=16,
        blocks=48,
        limits=LIMITS,
        compiled=False,
    )
    for first, second in ((case.engine, one), (one, case.engine)):
        for reference in case.references:
            handed = handed_over(first, second, reference.prompt)
            assert_same_tokens(reference, handed.emitted)


def handed_over(first: Engine, second: Engine, prompt: list[int]) -> Running:
    (here,) = start(first, [prompt], max_tokens=1)
    run_mixed(first, [here], chunk_tokens=CHUNK_TOKENS)
    (there,) = start(second, [prompt], max_tokens=TOKENS)
    there.emitted, there.done_tokens = list(here.emitted), len(prompt)
    whole = ShardLayout(model=first.layout, shard=Shard())
    span = TokenSpan(start=0, tokens=len(prompt), next_position=len(prompt))
    for write in cut(whole, whole, span=span, staging_bytes=20_000):
        slab = torch.empty(write.nbytes, dtype=torch.uint8)
        gather_write(first.memory, Side(tables=here.tables, block_size=16), write, slab)
        scatter_write(second.memory, Side(tables=there.tables, block_size=16), write, slab)
    run_mixed(second, [there], chunk_tokens=CHUNK_TOKENS)
    return there


def test_the_pool_is_as_large_as_asked_however_often_heads_are_kept(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path, "llama", num_key_value_heads=1)
    limits = replace(LIMITS, kv_memory_bytes=1 << 20)
    engine = ranks(folder, 2, blocks=None, limits=limits)
    engine.close()
    assert 0.9 * (1 << 20) < engine.memory.flat.numel() <= 1 << 20
    assert engine.sizing.kv_bytes == engine.memory.flat.numel()


@pytest.mark.processes
def test_no_rank_has_room_beside_the_weights_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process alone would have: the host's memory and its own needs are made up."""
    figures = MemoryProfile(total_bytes=40 << 10, weight_bytes=0, activation_bytes=0)

    def measured(*args: Any, **named: Any) -> MemoryProfile:
        profile_memory(*args, **named)  # all ranks run its step
        return figures

    monkeypatch.setattr(assembly, "profile_memory", measured)
    folder = random_checkpoint(tmp_path, "llama")
    refused(folder, r"tokens of KV fit: 0\.9 x .* - weights 3\d\d\.", blocks=None)


def refused(folder: Path, message: str, size: int = 2, **kind: Any) -> None:
    start_server()
    before = children()
    with pytest.raises(ModelError, match=message):
        ranks(folder, size, **kind)
    assert children() == before, "no rank is left"


def children() -> set[psutil.Process]:
    """Forked ones are the fork server's."""
    return set(psutil.Process().children(recursive=True))


@pytest.mark.processes
def test_a_plan_that_leaves_attention_whole_is_refused(tmp_path: Path) -> None:
    refused(random_checkpoint(tmp_path, "gpt_oss"), "gpt_oss family .* leaves attention whole")


@pytest.mark.processes
def test_a_plan_that_needs_more_than_cuts_is_refused(tmp_path: Path) -> None:
    refused(random_checkpoint(tmp_path, "phi3"), "its plan asks for rowwise_split_input")


def test_a_family_without_a_plan_is_refused() -> None:
    config = AutoConfig.for_model("gpt2", n_layer=1, n_embd=8, n_head=2, vocab_size=32)
    with pytest.raises(ModelError, match=r"gpt2 family .* has no tensor parallel plan"):
        check_plan(AutoModelForCausalLM.from_config(config))


@pytest.mark.processes
def test_a_rank_that_can_not_load_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = random_checkpoint(tmp_path, "llama")
    orders = Leader.together

    def spoil(self: Leader, work: Callable[[], object]) -> object:
        self._orders["dtype"] = "float1"
        return orders(self, work)

    monkeypatch.setattr(Leader, "together", spoil)
    refused(folder, "float1")


@pytest.mark.processes
def test_heads_that_can_not_be_shared_are_refused(tmp_path: Path) -> None:
    refused(random_checkpoint(tmp_path, "llama"), r"parallel\.tensor 3 .* choose 1 or 2 or 4$", 3)


@pytest.mark.processes
def test_layers_that_can_not_be_cut_are_refused(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path, "llama", intermediate_size=97)
    refused(folder, r"parallel\.tensor 2 can't split .*mlp\.gate_proj of this llama model: .* 97")


@pytest.mark.processes
def test_ranks_are_refused_on_devices_that_are_not_there(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path, "llama")
    refused(folder, "2 ranks on cuda:0: .* CUDA_VISIBLE_DEVICES", device="cuda:0")
    refused(
        folder, "2 ranks on cuda: each rank needs a GPU, 2 in all, and torch sees 0", device="cuda"
    )


@pytest.mark.processes
def test_a_rank_that_dies_while_it_loads_ends_the_start(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path, "llama")
    refused(folder, "rank 1 has ended with exit code 1 while", follow=_ends)


def _ends() -> None:
    sys.exit(1)


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


def test_ranks_score_a_prompt_alike(pair: Engine, tmp_path: Path) -> None:
    """All of them compute as many rows of logits."""
    one = load_engine(
        open_checkpoint(str(random_checkpoint(tmp_path, "llama"))),
        device="cpu",
        dtype="float32",
        block_size=16,
        blocks=48,
        limits=LIMITS,
    )
    check_scores(pair, references=one)
    one.close()


class _Replays:
    """Implements engine.attention.backend.Replays: it only notes what it is given."""

    def __init__(self) -> None:
        self.given: list[torch.Tensor | None] = []

    def has(self, slices: Sequence[SequenceSlice]) -> bool:
        return all(len(one.token_ids) == 1 for one in slices)

    def logits(
        self, slices: Sequence[SequenceSlice], token_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.given.append(token_ids)
        return torch.zeros(len(slices), VOCAB_SIZE)

    def replay(self, sequences: int) -> torch.Tensor:
        raise NotImplementedError


def test_all_ranks_replay_what_rank_0_replays(
    pair: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 tells which steps these are. Other ranks get the tokens that it alone has drawn."""
    told: list[StepKind] = []
    replays, (one,) = _Replays(), start(pair, [[3, 5]], max_tokens=4)
    step_forced(pair, one, [7], chunk_tokens=CHUNK_TOKENS)
    monkeypatch.setattr(pair, "graphs", replays)
    monkeypatch.setattr(pair._ranks, "tell", lambda slices, kind: told.append(kind))
    assert pair._ranks.own is not None and pair._ranks.own.group is not None
    monkeypatch.setattr(pair._ranks.own.group, "sum", lambda part: part + 7)
    batch = StepBatch(slices=(one.next_slice(1),))
    pair.logits(batch)
    pair.logits(batch, None, torch.tensor([4]))
    assert told == [StepKind(is_recorded=True), StepKind(is_recorded=True, follows=True)]
    for kind in told:
        pair.follow(batch.slices, kind)
    first, second, third, fourth = replays.given
    assert first is None and third is None
    assert second is not None and second.tolist() == [11]
    assert fourth is not None and fourth.tolist() == [7], "it brings nothing itself"


def test_graphs_are_gone_before_ranks_end(pair: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL would wait for them."""
    seen: list[object] = []
    monkeypatch.setattr(pair, "graphs", _Replays())
    monkeypatch.setattr(pair, "grammars", SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(pair._ranks, "close", lambda: seen.append(pair.graphs))
    pair.close()
    assert seen == [None]


def test_a_rank_that_dies_is_told_of_and_ends_the_step(pair: Engine) -> None:
    lost: Future[PeerError] = Future()
    pair.watch(lost.set_result)
    assert isinstance(pair._ranks, Leader)
    pair._ranks._followers[0].process.kill()
    assert "rank 1 has ended with exit code -9" in str(lost.result(30))
    (one,) = start(pair, [[5] * 40], max_tokens=1)
    with pytest.raises(PeerError):
        pair.run(StepBatch(slices=(one.next_slice(64),)))


@pytest.mark.processes
def test_no_rank_is_left_where_another_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def only_one(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        if begun:
            raise OSError("no room")
        begun.append(popen(*arguments, **options))
        return begun[0]

    monkeypatch.setattr(leader.subprocess, "Popen", only_one)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(OSError, match="no room"):
        Leader(Grid(tensor=3), ["cpu"] * 3, 1, {}, 1.0)
    assert begun[0].poll() is not None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
def test_ranks_with_wrong_parts_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have the second half of the feed-forward layers, and their heads."""
    own = _Cutter._own

    def second(self: _Cutter, name: str, rows: int) -> range:
        return range(rows // 2, rows) if ".mlp." in name else own(self, name, rows)

    monkeypatch.setattr(_Cutter, "_own", second)
    folder = random_checkpoint(tmp_path, "llama")
    refused(folder, r"the llama family can't be served \(split check\): the logits of its ranks")


def test_rank_0_knows_the_first_layers_of_each_kind(tmp_path: Path) -> None:
    """A sparse layer and one with full attention come after others."""
    kinds = ["sliding_attention"] * 3 + ["full_attention"] * 3
    folder = random_checkpoint(
        tmp_path, "gemma3_text", num_hidden_layers=6, layer_types=kinds, sliding_window=8
    )
    checkpoint = open_checkpoint(str(folder))
    bare = bare_model(checkpoint.path, device="cpu", dtype="float32")
    first = first_layers(bare, checkpoint, is_leader=True)
    whole = fill(bare, checkpoint)
    assert first.count == 4 and first.reference is not None
    check_split(whole, first)  # the whole model is right, and stays whole
    assert len(whole.module.model.layers) == 6
    last = whole.module.model.layers[3].self_attn.o_proj
    last.weight.data = last.weight.data.flip(0)
    with pytest.raises(ModelError, match="split check"):
        check_split(whole, first)


def test_a_sparse_layer_is_a_kind_of_its_own(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path, "qwen3_moe", num_hidden_layers=5, mlp_only_layers=[0, 1])
    checkpoint = open_checkpoint(str(folder))
    bare = bare_model(checkpoint.path, device="cpu", dtype="float32")
    assert first_layers(bare, checkpoint, is_leader=False).count == 3
