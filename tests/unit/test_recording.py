"""Whether decode steps are recorded, and rehearsed for their size. Nothing is recorded here: there
is no device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from engine import assembly, load, recording
from engine.core.options import CudaOptions
from engine.core.sizing import EngineLimits, MemoryProfile
from engine.memory_profile import profile_memory
from engine.model.checkpoint import open_checkpoint
from engine.recording import record_decode, rehearse_recording
from engine.runner import Engine
from kvrelay.errors import ModelError
from tests.models import random_checkpoint

LIMITS = EngineLimits(max_model_len=64, prefill_chunk_tokens=16, max_running_requests=3)


def engine(
    device: str, *, longrope: object = None, can_record: bool = False, stages: int = 1
) -> Engine:
    group = SimpleNamespace(can_record=can_record, size=2, sum=lambda part: 2 * part)
    model = SimpleNamespace(device=torch.device(device), longrope=longrope, group=group)
    return cast(Engine, SimpleNamespace(model=model, backend=None, stages=stages))


@pytest.mark.parametrize("graphs", [True, False])
def test_graphs_are_rehearsed_where_they_are_recorded(
    graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearsed: list[tuple[int, int]] = []
    monkeypatch.setattr(
        assembly,
        "rehearse_recording",
        lambda one, most: rehearsed.append((one.memory.blocks, most)),
    )

    def profile(*args: Any, record: Any = None, **others: Any) -> MemoryProfile:
        if record is not None:
            record(assembly.KvMemory(args[1], 5, "cpu"))
        return profile_memory(*args, **others)

    monkeypatch.setattr(assembly, "profile_memory", profile)
    load.load_engine(
        open_checkpoint(str(random_checkpoint(tmp_path))),
        device="cpu",
        dtype="auto",
        block_size=16,
        blocks=None,
        limits=LIMITS,
        cuda=CudaOptions(graphs=graphs),
        compiled=False,
    )
    assert rehearsed == ([(5, 3)] if graphs else [])


def test_what_can_not_be_recorded_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorded: list[int] = []
    monkeypatch.setattr(recording, "_record", lambda _, most: recorded.append(most))
    split, long = engine("cuda:0"), engine("cuda:0", longrope=object())
    staged = engine("cuda:0", can_record=True, stages=2)
    with caplog.at_level(logging.WARNING):
        assert rehearse_recording(split, 3) is split
        assert rehearse_recording(long, 3) is long
        rehearse_recording(engine("cpu"), 3)
        assert not caplog.records
        record_decode(split, 3)
        record_decode(long, 3)
        record_decode(staged, 3)
    assert [record.args for record in caplog.records] == [
        ("the sums of ranks go through the host",),
        ("the model treats short and long sequences differently",),
        ("stages of a pipeline hand over hidden states in between",),
    ]
    monkeypatch.setattr(recording, "unfit", lambda _: None)
    rehearse_recording(split, 7)
    rehearse_recording(engine("cpu"), 8)
    assert recorded == [7]


@pytest.mark.parametrize("record", [record_decode, rehearse_recording])
def test_ranks_that_can_not_record_alike_do_not_start(
    record: Callable[[Engine, int], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that goes on without its graphs would wait for the others' sums for ever."""
    monkeypatch.setattr(recording, "unfit", lambda _: None)
    monkeypatch.setattr(recording, "_record", lambda _, most: "no stream")
    with pytest.raises(ModelError, match=r"no stream.*set engine.cuda_graphs to off"):
        record(engine("cuda:0", can_record=True), 4)


@pytest.mark.parametrize("record", [record_decode, rehearse_recording])
@pytest.mark.parametrize("reason", [None, "only triton reads from fixed memory"])
def test_ranks_of_which_some_do_not_fit_do_not_start(
    reason: str | None,
    record: Callable[[Engine, int], object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They hear of each other before one of them waits for another's first sum."""
    one = engine("cuda:0", can_record=True)
    monkeypatch.setattr(one.model.group, "sum", lambda part: part + (reason is not None))
    monkeypatch.setattr(recording, "unfit", lambda _: reason)
    monkeypatch.setattr(recording, "_record", lambda _, most: pytest.fail("it waits for ever"))
    told = reason or "another rank"
    with pytest.raises(ModelError, match=f"1 of 2 ranks can record.*{told}"):
        record(one, 4)
