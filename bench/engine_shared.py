"""A decode step beside prompts that are computed on the same device."""

from __future__ import annotations

import statistics
import threading
import time

import torch

from bench.report import Row
from engine.backends.triton import TritonBackend
from engine.layer_places import layer_places
from engine.runner import Engine
from engine.step import SequenceSlice, StepBatch
from kvpool.layout import BlockId
from kvpool.memory.kv_memory import KvMemory
from kvrelay.types import RequestKey

_PROMPT_TOKENS = 2048
_STEPS = 50


def shared_row(engine: Engine, batch: StepBatch, method: str) -> Row:
    """Both in one process, over the same weights, each with KV of its own."""
    alone = _step_s(engine, batch)
    prompts = _Prompts(_beside(engine))
    prompts.start()
    try:
        beside = _step_s(engine, batch)
    finally:
        per_s = prompts.stop()
    return Row(
        name="decode step, 64 x 2,048 tokens, beside prompts of 2,048",
        value=1e3 * beside,
        unit="ms",
        against="the step alone",
        against_value=1e3 * alone,
        goal=1.3,
        lower_is_better=True,
        method=method,
        spread=f"median of {_STEPS}; {per_s * _PROMPT_TOKENS:.0f} prompt tokens/s beside it",
    )


def _step_s(engine: Engine, batch: StepBatch) -> float:
    times = []
    for _ in range(_STEPS):
        begin = time.perf_counter()
        engine.run(batch)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _beside(engine: Engine) -> Engine:
    layout = engine.layout
    memory = KvMemory(layout, layout.blocks_for(_PROMPT_TOKENS), engine.model.device)
    backend = None
    if isinstance(engine.backend, TritonBackend):
        backend = TritonBackend(memory, engine.backend.shapes, layer_places(layout))
    return Engine(engine.model, memory, engine.facts, engine.sizing, backend=backend)


class _Prompts:
    """One prompt after another, in a thread of its own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.done, self.seconds = 0, 0.0

    def start(self) -> None:
        self._thread.start()
        while self.done == 0 and self._thread.is_alive():
            time.sleep(0.01)

    def stop(self) -> float:
        """Prompts a second."""
        self._stopped.set()
        self._thread.join()
        return self.done / self.seconds

    def _run(self) -> None:
        blocks = self._engine.layout.blocks_for(_PROMPT_TOKENS)
        whole = SequenceSlice(
            key=RequestKey("prompt", 0),
            choice=0,
            token_ids=tuple(
                torch.randint(2, self._engine.facts.vocab_size, (_PROMPT_TOKENS,)).tolist()
            ),
            start=0,
            tables=(tuple(map(BlockId, range(blocks))),),
        )
        begin = time.perf_counter()
        while not self._stopped.is_set():
            self._engine.run(StepBatch(slices=(whole,)))
            self.seconds = time.perf_counter() - begin
            self.done += 1
