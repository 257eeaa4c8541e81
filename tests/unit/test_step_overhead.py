"""The benches of a step's own Python run on the engine as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.engine import step_overhead
from bench.engine.ranks import host_side
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


def test_two_ranks_are_measured_beside_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are told, launched ahead and replayed on both."""
    monkeypatch.setattr(host_side, "_STEPS", 3)
    monkeypatch.setattr(host_side, "_WARM", 2)
    replayed: list[int] = []
    replay = host_side.DecodeGraphs.replay
    monkeypatch.setattr(
        host_side.DecodeGraphs,
        "replay",
        lambda graphs, count: (replayed.append(count), replay(graphs, count))[1],
    )
    rows = host_side.rounds(3, repeats=1)
    assert [row.ratio is None for row in rows] == [True, False, False]
    assert all(0 < row.value < 1000 for row in rows)
    assert "told" in rows[1].spread and "heard" in rows[2].spread
    assert replayed == [3] * (6 + 6 + 5), "one step more than is collected is in flight"
