"""Whole decode steps by every attention backend that works here, against those of triton that are
recorded: whether `attention.backend: auto` is right to take them.

    python -m bench.engine.backends [--device cuda]

One engine, some layers of Llama-3.1-8B's shape, in which only attention is exchanged. Steps are
prepared, launched and drawn as a worker does it, launched behind one another and one at a time, so
what a backend plans for each step and launches from Python counts.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from transformers import LlamaConfig

from bench.engine.cuda.ahead import APART, BEHIND
from bench.engine.cuda.random_engine import (
    LLAMA_8B,
    TINY,
    decode_batch,
    device_name,
    random_engine,
)
from bench.engine.cuda.speed import wanted_by
from bench.report import Reading, Row, print_table
from engine.attention.backend import Backend, Replays
from engine.attention.choosing.choice import TORCH, opener
from engine.attention.choosing.needs import NEEDS
from engine.core.step import StepBatch
from engine.model.kv_layout import layer_places
from engine.runner import Engine
from engine.step_comparison import run_apart, run_behind

RECORDED = "triton, recorded"
_NAMES = ("triton", TORCH, "flashinfer", "flash")
_WARM = 3
_Kind = tuple[int, str]
"""Sequences, and how they are launched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """`layers`: what launching, planning and attention cost grows with them alike."""

    config: LlamaConfig = field(default_factory=lambda: LLAMA_8B)
    layers: int = 8
    sequences: tuple[int, ...] = (1, 64)
    context: int = 2000
    steps: int = 30
    repeats: int = 3


SMALL = Work(config=TINY, layers=2, sequences=(1, 2), context=32, steps=2, repeats=1)


@dataclass(frozen=True, slots=True)
class Attention:
    """What an engine computes with. `backend` None: plain torch operations."""

    backend: Backend | None
    graphs: Replays | None = None

    @contextmanager
    def of(self, engine: Engine) -> Iterator[None]:
        before = engine.backend, engine.graphs
        engine.backend, engine.graphs = self.backend, self.graphs
        try:
            yield
        finally:
            engine.backend, engine.graphs = before


def opened(engine: Engine, name: str) -> Attention:
    """The engine's own is triton's."""
    if name == RECORDED:
        return Attention(engine.backend, engine.graphs)
    if name == TORCH:
        return Attention(None)
    places, shapes = layer_places(engine.layout), wanted_by(engine).groups
    return Attention(opener(name)(engine.memory, shapes, places))


def serving(engine: Engine) -> list[str]:
    """Libraries come last: what fails on a device may take the rest of the process with it."""
    wanted = wanted_by(engine)
    names = [name for name in _NAMES if NEEDS[name](wanted) is None]
    return names if engine.graphs is None else [RECORDED, *names]


def step_rows(engine: Engine, work: Work, method: str) -> Iterator[list[Row]]:
    """Of a backend each, in ms a step. One that fails is left out, with its traceback."""
    recorded: dict[_Kind, Reading] = {}
    for name in serving(engine):
        try:
            found = _readings(engine, opened(engine, name), work)
        except Exception:
            traceback.print_exc()
            continue
        recorded = found if name == RECORDED else recorded
        yield [_row(name, kind, found[kind], recorded.get(kind), work, method) for kind in found]


def _readings(engine: Engine, attention: Attention, work: Work) -> dict[_Kind, Reading]:
    found = {}
    with attention.of(engine):
        for sequences in work.sequences:
            batch = decode_batch(engine.layout, (work.context,) * sequences)
            for how in (BEHIND, APART):
                _step_ms(engine, batch, _WARM, how)
                values = [_step_ms(engine, batch, work.steps, how) for _ in range(work.repeats)]
                found[sequences, how] = Reading(values=tuple(values))
    return found


def _row(
    name: str, kind: _Kind, own: Reading, recorded: Reading | None, work: Work, method: str
) -> Row:
    sequences, how = kind
    return Row(
        name=f"{name}: decode step, {sequences} x {work.context:,} tokens, {how}",
        value=own.median,
        unit="ms",
        against=RECORDED,
        against_value=None if recorded is None else recorded.median,
        lower_is_better=True,
        method=method,
        spread=own.spread(),
    )


def _step_ms(engine: Engine, batch: StepBatch, steps: int, how: str) -> float:
    """All at the same positions: only the tokens come from the step before."""
    slices = tuple(replace(piece, follows=i) for i, piece in enumerate(batch.slices))
    begin = time.perf_counter()
    if how == BEHIND:
        run_behind(engine, [batch, *[StepBatch(slices=slices)] * (steps - 1)])
    else:
        run_apart(engine, [batch] * steps)
    return 1e3 * (time.perf_counter() - begin) / steps


def measure(device: str, work: Work) -> None:
    """Prints a backend's rows as they come."""
    engine, _ = random_engine(
        device,
        tokens=max(work.sequences) * work.context,
        batch=max(work.sequences),
        backend="triton",
        graphs=True,
        config=work.config,
        layers=work.layers,
    )
    method = (
        f"random Llama, {work.layers} layers of {work.config.hidden_size}, bf16, "
        f"{device_name(device)}, means of {work.steps} steps in a row"
    )
    for rows in step_rows(engine, work, method):
        print_table("Backends", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model, short contexts")
    args = parser.parse_args()
    measure(args.device, SMALL if args.rehearse else Work())


if __name__ == "__main__":
    main()
