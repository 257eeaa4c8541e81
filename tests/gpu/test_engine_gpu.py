"""The same exactness on a CUDA device, by each backend that serves fp32, and with decode steps that
are recorded."""

from __future__ import annotations

import logging
from itertools import product

import pytest
import torch

from engine.attention.choosing import choice
from engine.checks import self_check
from engine.core.options import CudaOptions
from engine.core.sizing import STEP_BYTES, EngineLimits
from engine.device.cuda_memory import CudaMemory
from engine.load import load_engine
from engine.model.checkpoint import open_checkpoint
from tests.drive import run_mixed, start
from tests.models import FAMILIES, random_checkpoint
from tests.reference import assert_same_tokens
from tests.unit.test_engine_exact import (
    BLOCK_SIZE,
    CHUNK_TOKENS,
    TOKENS,
    Case,
    check_alone,
    load_case,
)
from tests.unit.test_prompt_logprobs import check_scores

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]
"""PyTorch's compiler uses it when it is imported."""
_CASES = [
    *product(sorted(FAMILIES), ("triton", "sdpa")),
]


@pytest.fixture(scope="module", params=_CASES, ids="-".join)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, attention = request.param
    return load_case(tmp_path_factory, family, "cuda", attention=attention)


def test_logits_of_sequences_alone(case: Case) -> None:
    for reference in case.references:
        check_alone(case.engine, reference)


def test_prompts_are_scored_beside_recorded_steps(case: Case) -> None:
    check_scores(case.engine, references=case.engine)


def test_kv_kept_in_fp8_takes_half(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tiny random model loses more by it than loading allows."""
    monkeypatch.setitem(self_check._FORMAT_LOSS, "float8_e4m3fn", 1.0)
    folder = random_checkpoint(tmp_path_factory.mktemp("fp8"), "llama")
    engines = [
        load_engine(
            open_checkpoint(str(folder)),
            device="cuda",
            dtype="bfloat16",
            block_size=BLOCK_SIZE,
            blocks=32,
            limits=EngineLimits(
                max_model_len=256, prefill_chunk_tokens=CHUNK_TOKENS, max_running_requests=2
            ),
            attention="triton",
            cuda=CudaOptions(fp8_kv=fp8_kv),
        )
        for fp8_kv in (False, True)
    ]
    whole, half = (engine.layout.bytes_per_token for engine in engines)
    assert whole == 2 * half


def test_tf32_is_taken_only_where_it_is_asked_for(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    case = load_case(tmp_path_factory, "llama", "cuda", attention="triton")
    reference = case.references[3]
    check_alone(case.engine, reference)
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(AssertionError, match="logits differ"):
            check_alone(case.engine, reference)
    finally:
        torch.set_float32_matmul_precision("highest")


def _check_mixed(case: Case) -> None:
    sequences = start(case.engine, [r.prompt for r in case.references], max_tokens=TOKENS)
    run_mixed(case.engine, sequences, chunk_tokens=CHUNK_TOKENS)
    for reference, one in zip(case.references, sequences, strict=True):
        assert_same_tokens(reference, one.emitted)


def test_tokens_in_mixed_batches(case: Case) -> None:
    _check_mixed(case)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_recorded_steps_change_no_token(
    family: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = load_case(tmp_path_factory, family, "cuda", attention="triton")
    assert case.engine.graphs is not None
    _check_mixed(case)
    monkeypatch.setattr(case.engine, "graphs", None)
    _check_mixed(case)


def test_auto_compares_whole_steps_and_gives_the_memory_back(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Recorded steps against plain torch, which no library is needed for."""
    monkeypatch.setattr(choice, "_ON_CUDA", ("triton", "sdpa"))
    checkpoint = open_checkpoint(str(random_checkpoint(tmp_path_factory.mktemp("auto"), "llama")))
    limits = EngineLimits(
        max_model_len=256, prefill_chunk_tokens=CHUNK_TOKENS, max_running_requests=4
    )

    def reserved(attention: str) -> int:
        CudaMemory(torch.device("cuda")).release()
        engine = load_engine(
            checkpoint,
            device="cuda",
            dtype="float32",
            block_size=BLOCK_SIZE,
            blocks=32,
            limits=limits,
            attention=attention,
        )
        assert engine.graphs is not None
        return torch.cuda.memory_reserved()

    alone = reserved("triton")
    with caplog.at_level(logging.INFO):
        assert reserved("auto") <= alone + STEP_BYTES
    assert "attention.backend: auto is triton: ms of a decode step of 1 and 4" in caplog.text
