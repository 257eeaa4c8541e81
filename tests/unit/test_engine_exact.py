"""The engine's greedy tokens and logits against transformers, family by family, in fp32."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import transformers
from packaging.version import Version

from engine.attention import torch_paged, torch_plan
from engine.core.sizing import EngineLimits
from engine.load import load_engine
from engine.model.checkpoint import open_checkpoint
from engine.runner import Engine
from tests.drive import run_forced, run_mixed, start, step_forced
from tests.models import FAMILIES, VOCAB_SIZE, random_checkpoint
from tests.reference import Reference, assert_close_logits, assert_same_tokens, generate_reference

BLOCK_SIZE, CHUNK_TOKENS, TOKENS = 16, 64, 64
# Inside, at the end of and across blocks and chunks; LongRoPE's border (256) is crossed by 230.
LENGTHS = (1, 17, 63, 64, 230, 700)


@dataclass(frozen=True, slots=True)
class Case:
    family: str
    engine: Engine
    references: tuple[Reference, ...]


def load_case(
    tmp_path_factory: pytest.TempPathFactory,
    family: str,
    device: str = "cpu",
    *,
    attention: str = "auto",
    compiled: bool = True,
) -> Case:
    if family == "phi3_longrope" and Version(transformers.__version__) < Version("5.23"):
        pytest.skip("this transformers' own generate is wrong beyond LongRoPE's border")
    folder = random_checkpoint(tmp_path_factory.mktemp(family), family)
    limits = EngineLimits(
        max_model_len=None, prefill_chunk_tokens=CHUNK_TOKENS, max_running_requests=8
    )
    engine = load_engine(
        open_checkpoint(str(folder)),
        device=device,
        dtype="float32",
        block_size=BLOCK_SIZE,
        blocks=128,
        limits=limits,
        compiled=compiled,
        attention=attention,
    )
    letters = random.Random(5)
    prompts = [[letters.randrange(2, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
    references = [generate_reference(engine.model, p, tokens=TOKENS) for p in prompts]
    return Case(family, engine, tuple(references))


TORCH_FAMILIES = ("llama", "gemma2", "gpt_oss")
"""Served by torch's operations too: plain, with a window and a soft cap, with sinks."""


@pytest.fixture(
    scope="module",
    params=[*((f, "auto") for f in sorted(FAMILIES)), *((f, "sdpa") for f in TORCH_FAMILIES)],
    ids=" ".join,
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, attention = request.param
    return load_case(tmp_path_factory, family, attention=attention)


def check_alone(engine: Engine, reference: Reference) -> None:
    (one,) = start(engine, [reference.prompt], max_tokens=TOKENS)
    logits = run_forced(engine, one, reference.tokens, chunk_tokens=CHUNK_TOKENS)
    assert_close_logits(reference, logits)


def test_the_reference_says_something(case: Case) -> None:
    for reference in case.references:
        assert len(set(reference.tokens)) >= 20, case.family


def test_logits_of_sequences_alone(case: Case) -> None:
    for reference in case.references:
        check_alone(case.engine, reference)


def test_tokens_in_mixed_batches(case: Case) -> None:
    sequences = start(case.engine, [r.prompt for r in case.references], max_tokens=TOKENS)
    run_mixed(case.engine, sequences, chunk_tokens=CHUNK_TOKENS)
    for reference, one in zip(case.references, sequences, strict=True):
        assert_same_tokens(reference, one.emitted)


def test_tokens_of_a_model_that_is_not_compiled(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    plain = load_case(tmp_path_factory, "qwen3", compiled=False)
    test_logits_of_sequences_alone(plain)
    test_tokens_in_mixed_batches(plain)


@pytest.fixture(scope="module", params=["auto", "sdpa"])
def gemma(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return load_case(tmp_path_factory, "gemma2", attention=request.param)


@pytest.fixture(scope="module")
def torch_gemma(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return load_case(tmp_path_factory, "gemma2", attention="sdpa")


def test_dropping_the_window_is_noticed(gemma: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = gemma.engine.layout
    blind = replace(layout, groups=tuple(replace(g, window=None) for g in layout.groups))
    monkeypatch.setattr(gemma.engine, "_planner", replace(gemma.engine._planner, layout=blind))
    monkeypatch.setattr(gemma.engine.memory, "layout", blind)
    with pytest.raises(AssertionError, match="logits differ"):
        check_alone(gemma.engine, gemma.references[4])


def test_dropping_the_soft_cap_is_noticed(gemma: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    own = replace(gemma.engine.model, flat=None)  # the graph has its caps written in
    monkeypatch.setattr(gemma.engine, "model", own)
    for layer in own.module.model.layers:
        monkeypatch.setattr(layer.self_attn, "attn_logit_softcapping", None)
    with pytest.raises(AssertionError, match="logits differ"):
        check_alone(gemma.engine, gemma.references[4])


def test_dropping_a_block_is_noticed(gemma: Case) -> None:
    reference = gemma.references[4]
    (one,) = start(gemma.engine, [reference.prompt], max_tokens=TOKENS)
    while not one.emitted:
        step_forced(gemma.engine, one, reference.tokens, chunk_tokens=CHUNK_TOKENS)
    one.tables = tuple((table[0], table[0], *table[2:]) for table in one.tables)
    logits = run_forced(gemma.engine, one, reference.tokens, chunk_tokens=CHUNK_TOKENS)
    with pytest.raises(AssertionError, match="logits differ"):
        assert_close_logits(reference, logits)


def test_the_block_in_use_is_copied_before_writing(gemma: Case) -> None:
    """Copy-on-write: after `copy_blocks` a sequence goes on in other blocks as if nothing was."""
    reference = gemma.references[4]
    one, other = start(gemma.engine, [reference.prompt] * 2, max_tokens=TOKENS)
    while not one.emitted:
        step_forced(gemma.engine, one, reference.tokens, chunk_tokens=CHUNK_TOKENS)
    both = zip(one.tables, other.tables, strict=True)
    copies = tuple(tuple(zip(old, new, strict=True)) for old, new in both)
    one.tables = other.tables
    gemma.engine.copy_blocks(copies)
    logits = run_forced(gemma.engine, one, reference.tokens, chunk_tokens=CHUNK_TOKENS)
    assert_close_logits(reference, logits)


def test_bounded_memory_changes_nothing(torch_gemma: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Score matrices in pieces of a few queries, decode rows in buckets of a few blocks."""
    engine, references = torch_gemma.engine, torch_gemma.references
    monkeypatch.setattr(torch_paged, "_SCORES_BYTES", 1 << 13)
    monkeypatch.setattr(
        torch_plan, "GATHER_BYTES", 20 * torch_plan.layer_block_bytes(engine.layout, 0)
    )
    check_alone(engine, references[4])
    sequences = start(engine, [r.prompt for r in references], max_tokens=TOKENS)
    run_mixed(engine, sequences, chunk_tokens=CHUNK_TOKENS)
    for reference, one in zip(references, sequences, strict=True):
        assert_same_tokens(reference, one.emitted)
