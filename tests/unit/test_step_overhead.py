"""The bench of a step's own Python runs on the engine as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.engine import step_overhead
from engine.core.sizing import EngineLimits
from engine.load import load_engine
from engine.model.checkpoint import open_checkpoint
from tests.models import random_checkpoint


@pytest.mark.parametrize("attention", ["auto", "sdpa"])
def test_all_parts_are_measured(
    attention: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_overhead, "SEQUENCES", 3)
    limits = EngineLimits(max_model_len=64, prefill_chunk_tokens=16, max_running_requests=2)
    engine = load_engine(
        open_checkpoint(str(random_checkpoint(tmp_path))), device="cpu", dtype="auto",
        block_size=16, blocks=8, limits=limits, attention=attention, compiled=False,
    )  # fmt: skip
    row = step_overhead.measure(engine)
    assert 0 < row.value < 1000
    assert "3 sequences" in row.name
