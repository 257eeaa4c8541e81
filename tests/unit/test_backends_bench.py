"""bench/engine/backends.py: attention alone is exchanged, and compared with recorded steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bench.engine import backends
from bench.engine.backends import RECORDED, SMALL, opened, step_rows
from bench.engine.cuda.ahead import APART, BEHIND
from bench.engine.cuda.random_engine import TINY, random_engine
from engine.core.step import SequenceSlice
from engine.runner import Engine


class Graphs:
    """Recorded steps, without a device."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        self.steps: list[int] = []

    def has(self, slices: tuple[SequenceSlice, ...]) -> bool:
        return True

    def logits(
        self, slices: tuple[SequenceSlice, ...], token_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.steps.append(len(slices))
        return torch.zeros(len(slices), self.vocab)

    def replay(self, sequences: int) -> torch.Tensor:
        raise AssertionError("steps are whole")


@pytest.fixture
def engine() -> Engine:
    made, _ = random_engine(
        "cpu", tokens=64, batch=2, backend="sdpa", graphs=False, config=TINY, layers=1
    )
    made.graphs = Graphs(TINY.vocab_size)
    return made


def need(reason: str | None) -> Callable[[object], str | None]:
    return lambda wanted: reason


def test_what_serves_is_compared_with_the_recorded_steps(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that can't serve is left out, and so is one that fails; those after it are measured."""
    for name, reason in {"triton": None, "flashinfer": None, "flash": "not here"}.items():
        monkeypatch.setitem(backends.NEEDS, name, need(reason))

    def open_fake(name: str) -> Callable[..., Any]:
        if name == "triton":
            raise RuntimeError("its kernel is not there")
        return lambda memory, shapes, places: None

    graphs = engine.graphs
    assert isinstance(graphs, Graphs)
    monkeypatch.setattr(backends, "opener", open_fake)
    tables = list(step_rows(engine, SMALL, "how"))
    assert [rows[0].name.split(":")[0] for rows in tables] == [RECORDED, "sdpa", "flashinfer"]
    kinds = [f"{count} x 32 tokens, {how}" for count in (1, 2) for how in (BEHIND, APART)]
    recorded = [row.value for row in tables[0]]
    for rows in tables:
        assert [row.name.split("step, ")[1] for row in rows] == kinds
        assert [row.against_value for row in rows] == recorded
    of_each = backends._WARM + SMALL.steps * SMALL.repeats
    assert graphs.steps == [1] * 2 * of_each + [2] * 2 * of_each, "the others replay none"
    assert engine.graphs is graphs, "each gives the engine back as it was"


def test_recorded_steps_are_the_engines_own(engine: Engine) -> None:
    own = opened(engine, RECORDED)
    assert (own.backend, own.graphs) == (engine.backend, engine.graphs)
    assert opened(engine, "sdpa").graphs is None
