"""An engine whose steps show in a trace; in place of the engine only while one is written."""

from __future__ import annotations

import time
from dataclasses import replace

from cluster.device import AheadEngine
from cluster.trace import Trace, Value
from engine.flight import Flight
from engine.layer_marks import LayerMarks
from engine.step import StepBatch, StepOutcome
from kvpool.copies import CopyPairs


class TracedEngine:
    """A step is a "prefill chunk" as soon as it computes any prompt, else a "decode step". Within a
    chunk each layer group is a range that ends when its KV is written."""

    def __init__(self, engine: AheadEngine, trace: Trace) -> None:
        self._engine = engine
        self._trace = trace

    def run(self, batch: StepBatch, marks: LayerMarks | None = None) -> StepOutcome:
        name, facts = _facts(batch)
        with self._trace.span(name, **facts):
            if marks is None:
                return self._engine.run(batch)
            groups = _Groups(self._trace, marks)
            outcome = self._engine.run(batch, groups.marks)
            groups.end("the last layer")
            return outcome

    def launch(
        self, batch: StepBatch, marks: LayerMarks | None = None, before: Flight | None = None
    ) -> Flight:
        """Its range ends when it is collected; layers are told as they come."""
        name, facts = _facts(batch)
        started_s = time.monotonic()
        flight = self._engine.launch(batch, marks, before)

        def finish(ended: Flight) -> StepOutcome:
            outcome = flight.finish(ended)
            self._trace.took(name, started_s, **facts)
            return outcome

        return replace(flight, finish=finish)

    def copy_blocks(self, pairs: CopyPairs) -> None:
        self._engine.copy_blocks(pairs)


class _Groups:
    """Of one step; each begins where the one before it ended."""

    def __init__(self, trace: Trace, marks: LayerMarks) -> None:
        self._trace = trace
        self._tell = marks.tell
        self._started_s = time.monotonic()
        self.marks = LayerMarks(marks.layers, self._told)

    def _told(self, layer: int) -> None:
        self.end(f"layer {layer}")
        self._tell(layer)

    def end(self, where: str) -> None:
        self._trace.took(f"layer group up to {where}", self._started_s)
        self._started_s = time.monotonic()


def _facts(batch: StepBatch) -> tuple[str, dict[str, Value]]:
    """The range's name, and what it says. `requests` are those whose prompt is computed, or in a
    decode step all."""
    prompts = [s for s in batch.slices if s.start < s.prompt_tokens]
    shown = prompts or batch.slices
    return "prefill chunk" if prompts else "decode step", {
        "requests": [s.key.request_id for s in shown],
        "tokens": batch.tokens,
        "from": min(s.start for s in shown),
        "sequences": len(batch.slices),
    }
