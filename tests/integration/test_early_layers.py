"""Early layers of a prompt's last chunk leave while later ones are still being computed."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import cluster.worker.mover
from cluster.worker.device import StepEngine
from engine.core.step import StepBatch, StepOutcome
from engine.device.layer_marks import LayerMarks
from engine.family.build import load_model
from engine.model.checkpoint import open_checkpoint
from kvpool.core.blocks.holding import CopyPairs
from kvpool.core.transfer import piece
from kvrelay.types import Role
from tests.integration.local_kit import USE_SLABS, LocalHost, unmeasured
from tests.integration.split_kit import PATIENCE_S, running_cluster, worker_settings
from tests.integration.test_handoff_exact import ask, check, prompts
from tests.models import random_checkpoint
from tests.reference import generate_reference


class Held:
    """An engine that ends no step that has marks before something was written into a slab."""

    def __init__(self, engine: StepEngine, written: threading.Event) -> None:
        self._engine = engine
        self._written = written
        self.in_time: list[bool] = []

    def copy_blocks(self, pairs: CopyPairs) -> None:
        self._engine.copy_blocks(pairs)

    def run(self, batch: StepBatch, marks: LayerMarks | None = None) -> StepOutcome:
        if marks is None:
            return self._engine.run(batch)
        self._written.clear()

        def tell(layer: int) -> None:
            marks.tell(layer)
            if layer == max(marks.layers):
                self.in_time.append(self._written.wait(PATIENCE_S))

        return self._engine.run(batch, LayerMarks(marks.layers, tell))


def test_the_first_write_starts_before_the_step_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_checkpoint(tmp_path / "llama", "llama", num_hidden_layers=4)
    loaded = load_model(open_checkpoint(str(model)), device="cpu", dtype="float32")
    asked = prompts([40, 100])
    monkeypatch.setattr(piece, "LAYER_GROUP_BYTES", 1024)
    piece.cut_span.cache_clear()
    written, write_slab = threading.Event(), cluster.worker.mover.write_slab

    def noticed(*args: object, **options: object) -> int:
        written.set()
        return write_slab(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(cluster.worker.mover, "write_slab", noticed)
    with unmeasured(), LocalHost() as first, LocalHost() as second:
        workers = [
            (first, worker_settings("prefill-0", Role.PREFILL, model)),
            (second, worker_settings("decode-0", Role.DECODE, model)),
        ]
        with running_cluster(model, workers) as running:  # type: ignore[arg-type]
            second.knows(first, USE_SLABS)
            ask(running, asked[0], tokens=2)  # connects
            device = first.device
            held = Held(device._engine, written)
            device._engine = held
            found = [ask(running, prompt, tokens=16) for prompt in asked]
            device._engine = held._engine
    piece.cut_span.cache_clear()
    assert held.in_time == [True, True]
    check(found, [generate_reference(loaded, prompt, tokens=16) for prompt in asked])
