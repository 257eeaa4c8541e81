"""Structured output: what masks cost beside a decode step, and whether all answers are valid.

`cost`: a random Llama of SmolLM-135M's shape with a vocabulary of 128,000 tokens decodes under a
schema, and freely, in turns. `valid`: the bundled model answers random schemas, sampled at
temperature 1; what ends by itself must be valid for jsonschema.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
from jsonschema import Draft202012Validator
from tokenizers import Tokenizer
from tqdm import tqdm

from bench.engine.schemas import random_schema
from bench.models import SMOLLM_135M, write_random_llama
from bench.report import Row, print_table, write_json
from engine.bundled import checkpoint_path
from engine.core.sizing import EngineLimits
from engine.core.step import SampleRequest, SequenceSlice, StepBatch, finish_reason
from engine.load import load_engine
from engine.model.checkpoint import open_checkpoint
from engine.runner import Engine
from kvpool.core.layout.layout import BlockId, Tables
from kvrelay.types import FinishReason, RequestKey, Sampling
from router.text.grammar.grammars import grammar_of_schema

VOCAB = 128_000
LIMIT = 0.05
EOS = 0
_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
_PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 10}, "minItems": 2},
        "kind": {"enum": ["alpha", "beta", "gamma"]},
        "at": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
    },
    "required": ["name", "age", "tags", "kind", "at"],
}
PEOPLE = {"type": "array", "items": _PERSON, "minItems": 1000}
"""No answer ends before it is cut."""


@dataclass(slots=True, kw_only=True)
class Answer:
    """One sequence, from its prompt on."""

    name: str
    prompt: tuple[int, ...]
    sampling: Sampling
    tables: Tables
    emitted: list[int] = field(default_factory=list)
    reason: FinishReason | None = None

    def slice(self) -> SequenceSlice:
        text = (*self.prompt, *self.emitted)
        start = len(text) - 1 if self.emitted else 0
        request = SampleRequest(
            sampling=self.sampling,
            choice=0,
            prompt_ids=self.prompt,
            emitted_ids=tuple(self.emitted),
        )
        return SequenceSlice(
            key=RequestKey(self.name, 0),
            choice=0,
            token_ids=text[start:],
            start=start,
            tables=self.tables,
            samples=(request,),
            index=len(self.emitted),
        )


class Batch:
    """Sequences that decode together, each in a stretch of the KV pool of its own."""

    def __init__(self, engine: Engine, *, sequences: int, tokens: int) -> None:
        blocks = engine.layout.blocks_for(tokens)
        self._engine = engine
        self._free: list[Tables] = [
            tuple(
                tuple(BlockId(i) for i in range(r * blocks, (r + 1) * blocks))
                for _ in engine.layout.groups
            )
            for r in range(sequences)
        ]

    def answers(self, wanted: Iterator[Answer]) -> Iterator[Answer]:
        """Each as it ends; then another one takes its place."""
        running: list[Answer] = []
        while True:
            while self._free and (one := next(wanted, None)) is not None:
                one.tables = self._free.pop()
                running.append(one)
            if not running:
                return
            self.step(running)
            for ended in [one for one in running if one.reason is not None]:
                running.remove(ended)
                self._free.append(ended.tables)
                yield ended

    def step(self, running: Sequence[Answer]) -> None:
        outcome = self._engine.run(StepBatch(slices=tuple(one.slice() for one in running)))
        assert not outcome.failed, outcome.failed
        for one, (drawn,) in zip(running, outcome.sampled, strict=True):
            one.reason = finish_reason(one.sampling, drawn, emitted=len(one.emitted) + 1)
            if one.reason is not FinishReason.STOP:
                one.emitted.append(drawn.token_id)


# --- valid ----------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Counts:
    """`cut` had too few tokens to end."""

    valid: int = 0
    cut: int = 0
    wrong: list[str] = field(default_factory=list)


def bundled_engine(sequences: int, tokens: int) -> Engine:
    limits = EngineLimits(
        max_model_len=None, prefill_chunk_tokens=512, max_running_requests=sequences
    )
    return load_engine(
        open_checkpoint(str(checkpoint_path())),
        device="cpu",
        dtype="float32",
        block_size=32,
        blocks=sequences * -(-tokens // 32) + 1,
        limits=limits,
    )


def check_schemas(
    engine: Engine, seeds: Sequence[int], *, sequences: int, most_tokens: int = 200
) -> Counts:
    """Answers a random schema for each seed, `sequences` at a time."""
    tokenizer = Tokenizer.from_file(str(Path(checkpoint_path()) / "tokenizer.json"))
    prompt = tuple(tokenizer.encode("He wrote it down like this: ").ids)
    batch = Batch(engine, sequences=sequences, tokens=len(prompt) + most_tokens)
    counts = Counts()
    asked = (_asked(seed, prompt, most_tokens) for seed in tqdm(seeds, mininterval=10))
    for answer in batch.answers(asked):
        _count(counts, answer, tokenizer.decode(answer.emitted))
    return counts


def _asked(seed: int, prompt: tuple[int, ...], most_tokens: int) -> Answer:
    sampling = Sampling(
        max_tokens=most_tokens,
        seed=seed,
        temperature=1.0,
        stop_token_ids=(0, 2),
        grammar=grammar_of_schema(random_schema(seed), compact=seed % 2 == 0),
    )
    return Answer(name=str(seed), prompt=prompt, sampling=sampling, tables=())


def _count(counts: Counts, answer: Answer, text: str) -> None:
    if answer.reason is not FinishReason.STOP:
        counts.cut += 1
        return
    schema = random_schema(int(answer.name))
    try:
        found = json.loads(text)
        errors = [error.message for error in Draft202012Validator(schema).iter_errors(found)]
    except ValueError as error:
        errors = [str(error)]
    if errors:
        counts.wrong.append(f"seed {answer.name}: {errors[0]}: {text!r}")
    else:
        counts.valid += 1


# --- cost -----------------------------------------------------------------------------------------


def write_wide(folder: Path) -> Path:
    """A random checkpoint whose tokenizer has 128,000 tokens: words, numbers, punctuation."""
    config = deepcopy(SMOLLM_135M)
    config.vocab_size = VOCAB
    write_random_llama(folder, config)
    path = folder / "tokenizer.json"
    state = json.loads(path.read_text())
    vocab, rng = state["model"]["vocab"], Random(0)
    while len(vocab) < VOCAB:
        vocab.setdefault(_token(rng), len(vocab))
    path.write_text(json.dumps(state))
    return folder


def _token(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.05:
        return "".join(rng.choices("0123456789", k=rng.randint(2, 3)))
    if kind < 0.12:
        return "".join(rng.choices('{}[]":,.;()<>=/\\_-!', k=rng.randint(2, 4)))
    word = "".join(rng.choices(_LETTERS, range(26, 0, -1), k=rng.randint(2, 10)))
    word = word.capitalize() if rng.random() < 0.2 else word
    return ("Ġ" if rng.random() < 0.6 else "") + word


def _wide_engine(folder: Path, sequences: int) -> Engine:
    limits = EngineLimits(
        max_model_len=1024, prefill_chunk_tokens=512, max_running_requests=sequences
    )
    return load_engine(
        open_checkpoint(str(folder)),
        device="cpu",
        dtype="float32",
        block_size=32,
        blocks=2 * sequences * 8 + 1,
        limits=limits,
    )


def _sequences(engine: Engine, count: int, grammar: str, first: int) -> list[Answer]:
    """In blocks from `first` on."""
    blocks = engine.layout.blocks_for(256)
    return [
        Answer(
            name=f"{first}-{i}",
            prompt=tuple(range(2, 34)),
            sampling=Sampling(
                max_tokens=200, seed=i, temperature=1.0, grammar=grammar, stop_token_ids=(EOS,)
            ),
            tables=(tuple(BlockId(first + i * blocks + j) for j in range(blocks)),),
        )
        for i in range(count)
    ]


def cost_rows(engine: Engine, count: int, steps: int) -> list[Row]:
    """Steps of `count` structured and of as many free sequences, in turns; and of the structured
    ones the time that their masks take."""
    blocks = engine.layout.blocks_for(256)
    batch = Batch(engine, sequences=0, tokens=256)
    grammar = grammar_of_schema(PEOPLE)
    bound = _sequences(engine, count, grammar, 0)
    free = _sequences(engine, count, "", count * blocks)
    masks = _timed_masks(engine)
    batch.step(bound)
    batch.step(free)
    masks.clear()
    times: dict[str, list[float]] = {"bound": [], "free": []}
    for _ in range(steps):
        for name, running in (("bound", bound), ("free", free)):
            started_s = time.perf_counter()
            batch.step(running)
            times[name].append(time.perf_counter() - started_s)
    spent = [one for one in masks if one > 0.0]
    return [
        _row(f"masks of {count} in a step, mean", sum(spent) / steps, times["free"], LIMIT),
        _row(f"step of {count}, mean", sum(times["bound"]) / steps, times["free"], 1 + LIMIT),
        Row(
            name=f"masks of {count}, median",
            value=1e3 * median(spent),
            unit="ms",
            spread=f"up to {1e3 * max(spent):.3g} ms",
        ),
    ]


def _row(name: str, seconds: float, free: Sequence[float], goal: float) -> Row:
    return Row(
        name=name,
        value=1e3 * seconds,
        unit="ms",
        against="free step, mean",
        against_value=1e3 * sum(free) / len(free),
        goal=goal,
        lower_is_better=True,
        method=f"{len(free)} steps of each in turns, {torch.get_num_threads()} threads, fp32",
    )


def _timed_masks(engine: Engine) -> list[float]:
    """The seconds of each later call of `Grammars.masks`."""
    found: list[float] = []
    masks = engine.grammars.masks

    def timed(*args: Any) -> Any:
        started_s = time.perf_counter()
        result = masks(*args)
        found.append(time.perf_counter() - started_s if result is not None else 0.0)
        return result

    engine.grammars.masks = timed  # type: ignore[method-assign]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["cost", "valid"])
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--schemas", type=int, default=10_000)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.what == "valid":
        engine = bundled_engine(sequences=32, tokens=400)
        seeds = range(args.first, args.first + args.schemas)
        counts = check_schemas(engine, seeds, sequences=32)
        engine.close()
        print(f"{counts.valid} valid, {counts.cut} cut, {len(counts.wrong)} wrong")
        print("\n".join(counts.wrong))
        return
    with tempfile.TemporaryDirectory() as folder:
        engine = _wide_engine(write_wide(Path(folder)), max(args.batch))
        rows = [row for count in args.batch for row in cost_rows(engine, count, args.steps)]
        engine.close()
    print_table("Structured output", rows)
    if args.json:
        write_json(args.json, rows)


if __name__ == "__main__":
    main()
