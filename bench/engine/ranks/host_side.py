"""The host's part of a decode step, with the device's taken away: of a rank alone, and of two.

A worker's core decides, and its engine launches each step behind the one before and collects it, as
in production. Recorded steps replay as nothing, and sums of ranks are their first part.
"""

from __future__ import annotations

import argparse
import socket
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import torch

from bench.report import Row, print_table, write_json
from cluster.config.load import load_config
from cluster.core.plan import worker_settings
from cluster.core.resolve import resolve
from cluster.core.worker.build import build_worker_core
from cluster.core.worker.core import WorkerCore
from cluster.core.worker.events import FromRouter, RouterJoined, RouterStream, WorkerCommand
from cluster.sim.simulation import NOWHERE
from engine.attention.backend import GroupShape
from engine.attention.cuda.graphs import DecodeGraphs, StaticDecode
from engine.attention.triton.backend import TritonBackend
from engine.core.sizing import KvSizing
from engine.core.step import RunStep, Sampled, SequenceSlice, StepDone, StepOutcome
from engine.core.step_times import LinearTimes
from engine.flight import Flight
from engine.model.kv_layout import layer_places
from engine.model.model import Model
from engine.parallel.channel import Channel
from engine.parallel.grid import Grid
from engine.parallel.message import StepHearer, StepKind, StepTeller
from engine.parallel.opening import OwnRank
from engine.parallel.ranks import Alone, Ranks
from engine.runner import Engine, EngineFacts
from kvpool.core.layout.block_names import BlockNames
from kvpool.core.layout.layout import KvLayout, LayerGroup, Plane
from kvpool.core.transfer.slabs import HEADER_BYTES, Staging
from kvpool.memory.kv_memory import KvMemory
from kvrelay.gc_pauses import freeze
from kvrelay.messages import Generate
from kvrelay.types import RequestKey, RequestSpec, Role, Sampling

BATCHES = (64, 256)
CONTEXT = 512
_STEPS, _WARM = 96, 16
_BLOCK, _VOCAB = 16, 1
_LONGEST = 2048
_QUERY_HEADS, _KV_HEADS, _DIM = 32, 8, 16
_PROCESSORS = 132
"""Of an H100: so many programs share the attention of a step."""
_SAMPLING = Sampling(max_tokens=_LONGEST, seed=7, temperature=1.0)
_TIMES = LinearTimes(
    prefill_overhead_s=1e-3,
    prefill_token_s=1e-5,
    prefill_pair_s=0.0,
    decode_knots=((1, 1e-3), (256, 2e-3)),
    decode_kv_token_s=0.0,
)


Parts = dict[str, float]
"""# what |-> ms a step"""


@dataclass(slots=True)
class Clock:
    """CPU time of this thread, by what it went to."""

    spent_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    steps: list[dict[str, float]] = field(default_factory=list)

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        began_s = time.thread_time()
        yield
        self.spent_s[what] += time.thread_time() - began_s

    def end_step(self) -> None:
        self.steps.append(dict(self.spent_s))
        self.spent_s.clear()

    def medians_ms(self) -> Parts:
        """Without the first steps."""
        steps = self.steps[_WARM:]
        return {what: 1e3 * median(one[what] for one in steps) for what in steps[-1]}


class _Sums:
    """Implements what a step needs of Group."""

    can_record = True
    size = 2

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        return part


def _own(rank: int) -> OwnRank:
    return OwnRank(rank=rank, grid=Grid(tensor=2), group=cast(Any, _Sums()), line=None)


class _First(Alone):
    """Rank 0's side, which tells the other as Leader does."""

    own = _own(0)  # type: ignore[assignment]

    def __init__(self, other: Channel, clock: Clock) -> None:
        self._teller, self._other, self._clock = StepTeller(), other, clock

    def tell(self, slices: Sequence[SequenceSlice], kind: StepKind) -> None:
        with self._clock.on("told"):
            self._other.send(self._teller.encode(slices, kind))


class _Other(Alone):
    own = _own(1)  # type: ignore[assignment]


def _layout(kv_heads: int) -> KvLayout:
    planes = tuple(Plane(name=name, heads=kv_heads, dim=_DIM) for name in ("k", "v"))
    return KvLayout(
        groups=(LayerGroup(layers=(0,), planes=planes),), dtype="bfloat16", block_size=_BLOCK
    )


def _engine(ranks: Ranks, sequences: int) -> Engine:
    """Its recorded steps do nothing but yield logits."""
    size = 1 if ranks.own is None else 2
    layout = _layout(_KV_HEADS // size)
    memory = KvMemory(layout, _blocks(sequences), "cpu")
    shape = GroupShape(
        query_heads=_QUERY_HEADS // size, kv_heads=_KV_HEADS // size, dim=_DIM, value_dim=_DIM,
        window=None,
    )  # fmt: skip
    backend = TritonBackend(memory, (shape,), layer_places(layout))
    backend._processors = _PROCESSORS
    config = SimpleNamespace(num_hidden_layers=1)
    model = Model(None, config, torch.device("cpu"), torch.bfloat16)
    facts = EngineFacts(
        architecture="", vocab_size=_VOCAB, max_model_len=_LONGEST, fingerprint="", device="cpu",
        dtype="bfloat16",
    )  # fmt: skip
    sizing = KvSizing(blocks=memory.blocks, tokens=0, max_model_len=_LONGEST, kv_bytes=0, reason="")
    engine = Engine(model, memory, facts, sizing, backend=backend, ranks=ranks)
    inputs = StaticDecode(backend, sequences, _LONGEST)
    engine.graphs = DecodeGraphs(model, inputs, sequences, _recorded(sequences))
    return engine


def _recorded(sequences: int) -> Any:
    logits = torch.randn(sequences, _VOCAB, dtype=torch.bfloat16)
    return lambda run: lambda: logits


def _blocks(sequences: int) -> int:
    return sequences * (CONTEXT + _WARM + _STEPS + 3 * _BLOCK) // _BLOCK


class _Router:
    """Hears nothing."""


class Worker:
    """All requests decode: their prompts are taken to be computed."""

    def __init__(self, engine: Engine, sequences: int, clock: Clock) -> None:
        self._engine, self._clock = engine, clock
        self._core = _core(engine.layout, sequences)
        self._steps: list[RunStep] = []
        self._flights: list[Flight] = []
        self._now_s = 0.0
        router = cast(RouterStream, _Router())
        self._core.handle(RouterJoined(router), 0.0)
        for number in range(sequences):
            self._core.handle(FromRouter(router, Generate(spec=_spec(number))), 0.0)
        self._prefill()

    def _prefill(self) -> None:
        self._execute(self._core.proceed(0.0))
        while self._steps[0].batch.work.prefill_tokens:
            slices = self._steps.pop(0).batch.slices
            drawn = tuple(tuple(Sampled(token_id=5) for _ in one.samples) for one in slices)
            self._turn(StepDone(outcome=StepOutcome(sampled=drawn), seconds=0.1))
        self._launch()

    def step(self) -> None:
        """The next one is launched; the one before is collected, and the core hears of it."""
        self._launch()
        with self._clock.on("collected"):
            outcome = self._flights.pop(0).collect()
        with self._clock.on("decided"):
            self._turn(StepDone(outcome=outcome, seconds=0.01))

    def _launch(self) -> None:
        step = self._steps.pop(0)
        before = self._flights[-1] if self._flights else None
        with self._clock.on("launched"):
            flight = self._engine.launch(step.batch, None, before)
        self._flights.append(cast(Flight, flight))

    def _turn(self, done: StepDone) -> None:
        self._now_s += done.seconds
        self._execute(self._core.handle(done, self._now_s))
        self._execute(self._core.proceed(self._now_s))
        self._execute(self._core.report((), self._now_s))

    def _execute(self, commands: list[WorkerCommand]) -> None:
        self._steps += [one for one in commands if isinstance(one, RunStep)]


def _core(layout: KvLayout, sequences: int) -> WorkerCore:
    config = resolve(load_config(None), NOWHERE)
    settings = replace(
        worker_settings(config, config.workers[0], "w"),
        role=Role.BOTH,
        prefill_chunk_tokens=1 << 20,
        max_running_requests=sequences,
        pool_address=None,
    )
    return build_worker_core(
        settings, layout, _blocks(sequences), BlockNames(), _TIMES,
        Staging(slabs=0, slab_bytes=HEADER_BYTES + 1024, reason=""), {},
        max_model_len=_LONGEST, launches_ahead=True,
    )  # fmt: skip


def _spec(number: int) -> RequestSpec:
    """Sequences fill their blocks at different steps, and share none."""
    prompt = (number, *[7] * (CONTEXT + number % _BLOCK))
    return RequestSpec(
        key=RequestKey(str(number), 0), prompt_ids=prompt, sampling=replace(_SAMPLING, seed=number)
    )


def alone(sequences: int) -> Parts:
    clock = Clock()
    worker = Worker(_engine(Alone(), sequences), sequences, clock)
    for _ in range(_WARM + _STEPS):
        worker.step()
        clock.end_step()
    return clock.medians_ms()


def two(sequences: int) -> tuple[Parts, Parts]:
    """Of rank 0, and of the other. What is told is part of what is launched."""
    ours, theirs = Clock(), Clock()
    to_other, from_first = (Channel(end) for end in socket.socketpair())
    with closing(to_other), closing(from_first):
        first = Worker(_engine(_First(to_other, ours), sequences), sequences, ours)
        other, hearer = _engine(_Other(), sequences), StepHearer()
        for _ in range(_WARM + _STEPS):
            first.step()
            _follow(other, hearer, from_first, theirs)
            ours.end_step()
            theirs.end_step()
    return ours.medians_ms(), theirs.medians_ms()


def _follow(other: Engine, hearer: StepHearer, channel: Channel, clock: Clock) -> None:
    with clock.on("heard"):
        told = hearer.decode(channel.receive())
    with clock.on("launched"):
        other.follow(*told)


def rounds(sequences: int, repeats: int) -> list[Row]:
    """In turn; the medians of the rounds."""
    found = [(alone(sequences), *two(sequences)) for _ in range(repeats)]
    one, first, other = (_middle(parts) for parts in zip(*found, strict=True))
    return [
        _row(f"a rank alone, {sequences} sequences", one, None),
        _row(f"rank 0 of two, {sequences} sequences", first, _total(one)),
        _row(f"the other, {sequences} sequences", other, _total(one)),
    ]


def _middle(parts: Sequence[Parts]) -> Parts:
    return {what: median(one[what] for one in parts) for what in parts[0]}


def _total(parts: Parts) -> float:
    return sum(ms for what, ms in parts.items() if what != "told")


def _row(name: str, parts: Parts, peer: float | None) -> Row:
    return Row(
        name=f"the host's part of a decode step: {name}",
        value=_total(parts),
        unit="ms",
        against="" if peer is None else "a rank alone",
        against_value=peer,
        lower_is_better=True,
        method=f"CPU time of a thread, contexts of {CONTEXT} tokens, median of {_STEPS} steps",
        spread=", ".join(f"{what} {ms:.2f}" for what, ms in parts.items()),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    freeze()
    rows = [row for count in BATCHES for row in rounds(count, args.repeats)]
    print_table("The host's part of a decode step", rows)
    if args.json:
        write_json(args.json, rows)


if __name__ == "__main__":
    main()
