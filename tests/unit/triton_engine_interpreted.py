"""Whole models over the Triton kernels, interpreted on the CPU, against transformers: run by
`test_triton` in a process of its own, where TRITON_INTERPRET=1 holds from the first import on."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention.choosing.choice import group_shapes, opener
from engine.attention.cuda.graphs import DecodeGraphs, StaticDecode
from engine.attention.triton.backend import TritonBackend, TritonState
from engine.checks import self_check
from engine.compiled import build
from engine.core.options import CudaOptions
from engine.core.sizing import EngineLimits
from engine.core.step import SequenceSlice, StepBatch
from engine.load import load_engine
from engine.model.checkpoint import open_checkpoint
from engine.model.kv_layout import layer_places, probe
from engine.model.model import Model
from engine.runner import Engine
from tests.drive import Running, run_mixed, start, step_forced
from tests.models import FAMILIES, VOCAB_SIZE, random_checkpoint
from tests.reference import assert_same_tokens, generate_reference
from tests.unit import fake_attention_libraries

assert os.environ.get("TRITON_INTERPRET") == "1", "run by tests/unit/test_triton.py"
_CHUNK_TOKENS, _TOKENS, _WINDOW = 16, 3, 12
_OTHERS = [pytest.param(name, marks=pytest.mark.long) for name in ("llama", "qwen3", "gemma2")]
"""What they rotate is in gemma3_text too: normed heads, windows, two kinds of angles."""


def _engine(
    folder: Path, family: str, attention: str = "triton", *, fp8_kv: bool = False
) -> Engine:
    limits = EngineLimits(
        max_model_len=128, prefill_chunk_tokens=_CHUNK_TOKENS, max_running_requests=4
    )
    windows = {"sliding_window": _WINDOW} if FAMILIES[family].get("sliding_window") else {}
    return load_engine(
        open_checkpoint(str(random_checkpoint(folder, family, num_hidden_layers=2, **windows))),
        device="cpu",
        dtype="float32",
        block_size=16,
        blocks=24,
        limits=limits,
        attention=attention,
        compiled=False,
        cuda=CudaOptions(fp8_kv=fp8_kv),
    )


def _prompts(*lengths: int) -> list[list[int]]:
    letters = random.Random(5)
    return [[letters.randrange(2, VOCAB_SIZE) for _ in range(n)] for n in lengths]


def _check(engine: Engine) -> None:
    prompts = _prompts(1, 9, 20)
    references = [generate_reference(engine.model, p, tokens=_TOKENS) for p in prompts]
    sequences = start(engine, prompts, max_tokens=_TOKENS)
    run_mixed(engine, sequences, chunk_tokens=_CHUNK_TOKENS)
    for reference, one in zip(references, sequences, strict=True):
        assert_same_tokens(reference, one.emitted)


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.long), "gpt_oss"])
def test_tokens_in_mixed_batches(family: str, tmp_path: Path) -> None:
    """Loading has compared the logits with the model's own already."""
    _check(_engine(tmp_path, family))


@pytest.mark.parametrize("family", ["gemma3_text", *_OTHERS])
def test_tokens_of_a_graph_whose_attention_rotates(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rotated: list[int] = []
    own = TritonState.attend_rotating

    def noted(state: TritonState, layer: int, *tensors: Any) -> torch.Tensor:
        rotated.append(layer)
        return own(state, layer, *tensors)

    monkeypatch.setattr(TritonState, "attend_rotating", noted)
    engine = _engine(tmp_path, family)
    with monkeypatch.context() as patched:
        patched.setattr(Model, "on_cpu", property(lambda _: False))
        patched.setattr(build, "_LENGTHS", (1, 2, 5))
        engine.model = build.compile_model(engine.model)
    _check(engine)
    assert set(rotated) == set(range(engine.model.config.num_hidden_layers))


def test_kv_kept_in_fp8_takes_a_quarter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny random model loses more by it than loading allows (0.41 of its logits' range)."""
    monkeypatch.setitem(self_check._FORMAT_LOSS, "float8_e4m3fn", 1.0)
    engine = _engine(tmp_path, "llama", fp8_kv=True)
    elements = 2 * 2 * 2 * 16  # layers, planes, heads, dims
    assert engine.layout.bytes_per_token == elements
    assert engine.memory.planes[0][0].dtype is torch.float8_e4m3fn


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return _engine(tmp_path_factory.mktemp("gemma2"), "gemma2", attention="sdpa")


@pytest.mark.parametrize("name", ["triton", "flash", "flashinfer"])
def test_backends_serve_windows_and_soft_caps(
    name: str, gemma: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The libraries' calls are checked against stand-ins that do what their pages say."""
    for module, stand_in in fake_attention_libraries.modules().items():
        monkeypatch.setitem(sys.modules, module, stand_in)
    shapes = group_shapes(gemma.layout, probe(gemma.model))
    backend = opener(name)(gemma.memory, shapes, layer_places(gemma.layout))
    monkeypatch.setattr(gemma, "backend", backend)
    _check(gemma)


def test_a_plan_of_flashinfer_stays_while_the_next_step_is_launched(
    gemma: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, stand_in in fake_attention_libraries.modules().items():
        monkeypatch.setitem(sys.modules, module, stand_in)
    wrapper, planned = sys.modules["flashinfer"].BatchPrefillWithPagedKVCacheWrapper, []
    plan = wrapper.plan

    def noted(one: object, *args: Any, **options: Any) -> None:
        planned.append(one)
        plan(one, *args, **options)

    monkeypatch.setattr(wrapper, "plan", noted)
    shapes = group_shapes(gemma.layout, probe(gemma.model))
    backend = opener("flashinfer")(gemma.memory, shapes, layer_places(gemma.layout))
    monkeypatch.setattr(gemma, "backend", backend)
    run_mixed(gemma, start(gemma, _prompts(5), max_tokens=3), chunk_tokens=_CHUNK_TOKENS)
    steps = [{*planned[at : at + 2]} for at in range(0, len(planned), 2)]  # of two layer groups
    assert len(steps) == 3
    assert not any(first & second for first, second in pairwise(steps))


class _Counted(DecodeGraphs):
    replayed = 0

    def logits(
        self, slices: Sequence[SequenceSlice], token_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.replayed += 1
        return super().logits(slices, token_ids)


def test_replayed_steps_give_the_same_tokens(
    gemma: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replaying is running here: what counts is that all inputs are found at the same place."""
    shapes = group_shapes(gemma.layout, probe(gemma.model))
    backend = TritonBackend(gemma.memory, shapes, layer_places(gemma.layout))
    monkeypatch.setattr(gemma, "backend", backend)
    graphs = _Counted(gemma.model, StaticDecode(backend, 4, 128), 4, lambda run: run)
    monkeypatch.setattr(gemma, "graphs", graphs)
    _check(gemma)
    assert graphs.replayed >= _TOKENS - 1


def test_padded_rows_write_nothing(gemma: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = group_shapes(gemma.layout, probe(gemma.model))
    backend = TritonBackend(gemma.memory, shapes, layer_places(gemma.layout))
    sequences = start(gemma, _prompts(5, 9, 3), max_tokens=3)
    for one in sequences:
        step_forced(gemma, one, [7, 7, 7], chunk_tokens=16)
    graphs = DecodeGraphs(gemma.model, StaticDecode(backend, 4, 128), 4, lambda run: run)
    pieces = [one.next_slice(16) for one in sequences]
    plain = gemma.logits(StepBatch(slices=tuple(pieces)))
    for plane in (plane for group in gemma.memory.planes for plane in group):
        before = plane.clone()
        found = graphs.logits(pieces)
        assert torch.allclose(found, plain, atol=1e-4)
        changed = (plane != before).flatten(2).any(2).any(0).nonzero()[:, 0].tolist()
        assert set(changed) <= {_slot(one, g) for one in sequences for g in range(2)}


@pytest.mark.parametrize("recorded", [True, False])
def test_tokens_that_stay_on_the_device(
    recorded: bool, gemma: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slices' own are of no meaning then."""
    shapes = group_shapes(gemma.layout, probe(gemma.model))
    backend = TritonBackend(gemma.memory, shapes, layer_places(gemma.layout))
    sequences = start(gemma, _prompts(5, 9, 3), max_tokens=3)
    for one in sequences:
        step_forced(gemma, one, [7, 7, 7], chunk_tokens=16)
    monkeypatch.setattr(gemma, "backend", backend)
    if recorded:
        graphs = DecodeGraphs(gemma.model, StaticDecode(backend, 4, 128), 4, lambda run: run)
        monkeypatch.setattr(gemma, "graphs", graphs)
    pieces = [one.next_slice(16) for one in sequences]
    plain = gemma.logits(StepBatch(slices=tuple(pieces)))
    unknown = StepBatch(slices=tuple(replace(piece, token_ids=(3,)) for piece in pieces))
    assert not torch.allclose(gemma.logits(unknown), plain, atol=1e-2)
    found = gemma.logits(unknown, None, torch.tensor([7, 7, 7]))
    assert torch.allclose(found, plain, atol=1e-6)


def _slot(one: Running, group: int) -> int:
    return one.tables[group][one.done_tokens // 16] * 16 + one.done_tokens % 16


def test_other_steps_are_not_replayed(gemma: Engine) -> None:
    shapes = group_shapes(gemma.layout, probe(gemma.model))
    backend = TritonBackend(gemma.memory, shapes, layer_places(gemma.layout))
    graphs = DecodeGraphs(gemma.model, StaticDecode(backend, 2, 128), 2, lambda run: run)
    short, long = (one.next_slice(16) for one in start(gemma, _prompts(1, 2), max_tokens=3))
    assert graphs.has([short] * 2)
    assert not graphs.has([short, long])
    assert not graphs.has([short] * 3)
