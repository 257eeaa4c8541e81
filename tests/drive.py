"""A tiny driver of the engine for tests: chunked prefill and ragged decode on scattered blocks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.core.step import SampleRequest, SequenceSlice, StepBatch
from engine.runner import Engine
from kvpool.core.layout.layout import BlockId, Tables
from kvrelay.types import RequestKey, Sampling


@dataclass(slots=True)
class Running:
    """One sequence: its prompt, what it emitted, and how much of it is in the KV memory.

    As with the scheduler, one that outgrows LongRoPE's border is computed anew."""

    name: str
    prompt: list[int]
    tables: Tables
    sampling: Sampling
    emitted: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    done_tokens: int = 0
    rope_border_tokens: int | None = None

    @property
    def text(self) -> list[int]:
        return self.prompt + self.emitted

    @property
    def finished(self) -> bool:
        return len(self.emitted) >= self.sampling.max_tokens

    def next_slice(self, chunk_tokens: int) -> SequenceSlice:
        if self.done_tokens == self.rope_border_tokens and len(self.prompt) <= self.done_tokens:
            self.done_tokens, self.rope_border_tokens = 0, None
        end = min(len(self.text), self.done_tokens + chunk_tokens)
        return SequenceSlice(
            key=RequestKey(self.name, 0),
            choice=0,
            token_ids=tuple(self.text[self.done_tokens : end]),
            start=self.done_tokens,
            tables=self.tables,
            samples=(self._request(),) if end == len(self.text) else (),
            index=len(self.emitted),
            prompt_tokens=len(self.text),
        )

    def _request(self) -> SampleRequest:
        return SampleRequest(
            sampling=self.sampling,
            choice=0,
            prompt_ids=tuple(self.prompt),
            emitted_ids=tuple(self.emitted),
        )


def scattered(engine: Engine, lengths_tokens: Sequence[int], *, seed: int = 0) -> list[Tables]:
    """Block tables for sequences of these lengths, in no order and different in every group."""
    shuffled = random.Random(seed)
    pools = []
    for _ in engine.layout.groups:
        ids = [BlockId(i) for i in range(engine.memory.blocks)]
        shuffled.shuffle(ids)
        pools.append(ids)
    counts = [engine.layout.blocks_for(length) for length in lengths_tokens]
    return [tuple(tuple(ids.pop() for _ in range(count)) for ids in pools) for count in counts]


def start(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    sampling: Sampling | None = None,
) -> list[Running]:
    sampling = sampling or Sampling(max_tokens=max_tokens, seed=0)
    tables = scattered(engine, [len(p) + max_tokens for p in prompts])
    rope = engine.model.longrope
    border = None if rope is None else rope.border_tokens
    return [
        Running(str(i), list(prompt), table, sampling, rope_border_tokens=border)
        for i, (prompt, table) in enumerate(zip(prompts, tables, strict=True))
    ]


def run_forced(
    engine: Engine, one: Running, tokens: Sequence[int], *, chunk_tokens: int
) -> list[torch.Tensor]:
    """Teacher forcing: the logits `[vocab]` before each of `tokens`, which are fed in turn."""
    while not one.finished:
        step_forced(engine, one, tokens, chunk_tokens=chunk_tokens)
    return one.logits


def step_forced(engine: Engine, one: Running, tokens: Sequence[int], *, chunk_tokens: int) -> None:
    piece = one.next_slice(chunk_tokens)
    logits = engine.logits(StepBatch(slices=(piece,)))
    one.done_tokens += len(piece.token_ids)
    if piece.samples:
        one.logits.append(logits[0])
        one.emitted.append(tokens[len(one.emitted)])


def run_mixed(engine: Engine, sequences: Sequence[Running], *, chunk_tokens: int) -> None:
    """All to their end: a new sequence joins at every second step, among those that decode."""
    waiting, active, step = list(sequences), [], 0
    while waiting or active:
        if waiting and step % 2 == 0:
            active.append(waiting.pop())
        pieces = [one.next_slice(chunk_tokens) for one in active]
        outcome = engine.run(StepBatch(slices=tuple(pieces)))
        for one, piece, sampled in zip(active, pieces, outcome.sampled, strict=True):
            one.done_tokens += len(piece.token_ids)
            one.emitted += [s.token_id for s in sampled]
        active = [one for one in active if not one.finished]
        step += 1
