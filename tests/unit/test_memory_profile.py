"""What is measured of a step's memory before the rest of it is filled with KV."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.core.sizing import EngineLimits
from engine.core.step import MOST_SCORED_TOKENS, StepBatch
from engine.family.build import load_model
from engine.memory_profile import profile_memory
from engine.model.checkpoint import open_checkpoint
from engine.model.kv_layout import derive_layout, probe
from tests.models import random_checkpoint


@pytest.mark.parametrize("chunk_tokens", [64, 2 * MOST_SCORED_TOKENS])
def test_the_measured_step_is_the_largest_that_there_may_be(
    chunk_tokens: int, tmp_path: Path
) -> None:
    """Each token that is scored takes a row of logits, as one that samples does."""
    checkpoint = open_checkpoint(str(random_checkpoint(tmp_path)))
    model = load_model(checkpoint, device="cpu", dtype="float32")
    layout = derive_layout(probe(model), dtype="float32", block_size=16)
    limits = EngineLimits(
        max_model_len=None, prefill_chunk_tokens=chunk_tokens, max_running_requests=3
    )
    batches: list[StepBatch] = []
    profile_memory(model, layout, limits, 4096, lambda _, batch: batches.append(batch))
    (batch,) = batches
    assert [len(piece.token_ids) for piece in batch.slices] == [chunk_tokens, 1, 1, 1]
    assert all(piece.samples for piece in batch.slices)
    scored = [len(piece.scoring.next_ids) for piece in batch.slices if piece.scoring is not None]
    assert scored == [min(chunk_tokens, MOST_SCORED_TOKENS)]
