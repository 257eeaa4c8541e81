"""A worker that fills its part of a GPU stays within it. Has not run on a device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.core.sizing import EngineLimits
from engine.core.step import StepBatch
from engine.load import load_engine
from engine.memory_profile import _largest_batch
from engine.model.checkpoint import open_checkpoint
from tests.models import random_checkpoint

pytestmark = pytest.mark.gpu
FRACTION = 0.5


def test_the_largest_step_and_its_graphs_stay_within_the_fraction(tmp_path: Path) -> None:
    limits = EngineLimits(
        max_model_len=None,
        prefill_chunk_tokens=512,
        max_running_requests=100_000,
        memory_fraction=FRACTION,
    )
    free, total = torch.cuda.mem_get_info()
    others = total - free - torch.cuda.memory_reserved()
    engine = load_engine(
        open_checkpoint(str(random_checkpoint(tmp_path))),
        device="cuda",
        dtype="bfloat16",
        block_size=16,
        blocks=None,
        limits=limits,
        attention="triton",
    )
    for _ in range(3):
        engine.run(_largest(engine.layout, limits))
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    assert total - free - others <= FRACTION * total
    assert "CUDA graphs" in engine.sizing.reason
    engine.close()


def _largest(layout: object, limits: EngineLimits) -> StepBatch:
    return _largest_batch(layout, limits.prefill_chunk_tokens, 64)  # type: ignore[arg-type]
