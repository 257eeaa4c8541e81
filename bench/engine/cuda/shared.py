"""A decode step beside prompts that are computed on the same device: what each keeps of its pace,
and whether their kernels ran at once."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bench.engine.cuda.kernel_times import StreamTimes, kernel_times
from bench.report import Row
from engine.attention.triton.backend import TritonBackend
from engine.core.step import SequenceSlice, StepBatch
from engine.model.kv_layout import layer_places
from engine.runner import Engine
from kvpool.core.layout.layout import BlockId
from kvpool.memory.kv_memory import KvMemory
from kvrelay.types import RequestKey

_PROMPTS = 20
_STEPS = 50


def shared_rows(engine: Engine, batch: StepBatch, context: int, method: str) -> list[Row]:
    """Both in one process, over the same weights, each with KV of its own; sequences and prompts
    have `context` tokens each. The profiler looks at steps of their own: it costs time."""
    other = _beside(engine, context)
    steps_alone_s, prompts_alone_s = _step_s(engine, batch), _alone_s(other, context)
    times: list[StreamTimes] = []
    with _prompts(other, context) as prompts:
        steps_s = _step_s(engine, batch)
    with _prompts(other, context), kernel_times(times):
        _step_s(engine, batch, 5)
    name = f"decode step, {len(batch.slices)} x {context:,} tokens, beside prompts of {context:,}"
    step = _step_row(name, steps_s, steps_alone_s, method, str(times[0]))
    return [step, _sum_row(steps_s, steps_alone_s, prompts, prompts_alone_s, method)]


def _step_row(name: str, beside_s: float, alone_s: float, method: str, seen: str) -> Row:
    return Row(
        name=name,
        value=1e3 * beside_s,
        unit="ms",
        against="the step alone",
        against_value=1e3 * alone_s,
        goal=1.3,
        lower_is_better=True,
        method=method,
        spread=f"median of {_STEPS}; {seen}",
    )


def _sum_row(
    steps_s: float, steps_alone_s: float, beside: _Prompts, prompts_alone_s: float, method: str
) -> Row:
    """1: as if they took turns."""
    steps, prompts = steps_alone_s / steps_s, prompts_alone_s / beside.each_s
    tokens = f"{beside.tokens / beside.each_s:.0f} of {beside.tokens / prompts_alone_s:.0f}"
    return Row(
        name="paces of both beside each other, as shares of those alone, together",
        value=steps + prompts,
        unit="",
        against="in turns",
        against_value=1.0,
        method=method,
        spread=f"steps {steps:.2f}, prompts {prompts:.2f} ({tokens} tokens/s)",
    )


def _alone_s(engine: Engine, tokens: int) -> float:
    with _prompts(engine, tokens) as prompts:
        prompts.wait(_PROMPTS)
    return prompts.each_s


def _step_s(engine: Engine, batch: StepBatch, count: int = _STEPS) -> float:
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        engine.run(batch)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _beside(engine: Engine, tokens: int) -> Engine:
    layout = engine.layout
    memory = KvMemory(layout, layout.blocks_for(tokens), engine.model.device)
    backend = None
    if isinstance(engine.backend, TritonBackend):
        backend = TritonBackend(memory, engine.backend.shapes, layer_places(layout))
    return Engine(engine.model, memory, engine.facts, engine.sizing, backend=backend)


@contextmanager
def _prompts(engine: Engine, tokens: int) -> Iterator[_Prompts]:
    """Beside what is done within, from its first one on."""
    running = _Prompts(engine, tokens)
    running.start()
    try:
        yield running
    finally:
        running.stop()


class _Prompts:
    """One prompt of `tokens` tokens after another, in a thread of its own."""

    def __init__(self, engine: Engine, tokens: int) -> None:
        self._engine = engine
        self.tokens = tokens
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.done, self.seconds = 0, 0.0

    @property
    def each_s(self) -> float:
        return self.seconds / self.done

    def start(self) -> None:
        self._thread.start()
        self.wait(1)

    def wait(self, count: int) -> None:
        while self.done < count and self._thread.is_alive():
            time.sleep(0.01)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        blocks = self._engine.layout.blocks_for(self.tokens)
        whole = SequenceSlice(
            key=RequestKey("prompt", 0),
            choice=0,
            token_ids=tuple(
                torch.randint(2, self._engine.facts.vocab_size, (self.tokens,)).tolist()
            ),
            start=0,
            tables=(tuple(map(BlockId, range(blocks))),),
        )
        self._engine.run(StepBatch(slices=(whole,)))  # the first of its kind compiles
        begin = time.perf_counter()
        while not self._stopped.is_set():
            self._engine.run(StepBatch(slices=(whole,)))
            self.seconds = time.perf_counter() - begin
            self.done += 1
