"""Many requests at once on one CUDA device, against transformers' `generate_batch` over the same
weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import GenerationConfig

from bench.engine.paging import paging
from bench.report import Reading, Row, interleave
from engine.core.step import SampleRequest, SequenceSlice, StepBatch
from engine.model.interface import NAME
from engine.runner import Engine
from kvpool.core.layout.layout import BlockId, Tables
from kvrelay.types import RequestKey, Sampling

_REPEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """`step_tokens`: of prompts that are computed together."""

    requests: int = 64
    prompt_tokens: int = 512
    output_tokens: int = 64
    step_tokens: int = 8192

    @property
    def length(self) -> int:
        return self.prompt_tokens + self.output_tokens

    def prompts(self, vocab: int) -> list[list[int]]:
        return torch.randint(2, vocab, (self.requests, self.prompt_tokens)).tolist()


def batch_row(engine: Engine, batch: Batch, method: str) -> Row:
    prompts = batch.prompts(engine.facts.vocab_size)
    runs = {
        "kvrelay": _rate(lambda: _generate(engine, batch, prompts), batch),
        "peer": _rate(lambda: _generate_batch(engine, batch, prompts), batch),
    }
    found: dict[str, Reading] = interleave(runs, repeats=_REPEATS)
    sizes = f"{batch.requests} x ({batch.prompt_tokens} in, {batch.output_tokens} out)"
    return Row(
        name=f"output tokens/s, {sizes}",
        value=found["kvrelay"].median,
        unit="tokens/s",
        against="transformers generate_batch",
        against_value=found["peer"].median,
        goal=3.0,
        method=method,
        spread=f"{found['kvrelay'].spread()}; peer {found['peer'].spread()}",
    )


def _rate(run: Callable[[], object], batch: Batch) -> Callable[[], float]:
    run()

    def measured() -> float:
        begin = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return batch.requests * batch.output_tokens / (time.perf_counter() - begin)

    return measured


def _generate(engine: Engine, batch: Batch, prompts: Sequence[list[int]]) -> list[list[int]]:
    texts = [list(prompt) for prompt in prompts]
    together = batch.step_tokens // batch.prompt_tokens
    for first in range(0, batch.requests, together):
        _step(engine, batch, texts, range(first, first + together), 0)
    for _ in range(batch.output_tokens - 1):
        _step(engine, batch, texts, range(batch.requests), len(texts[0]) - 1)
    return texts


def _step(
    engine: Engine, batch: Batch, texts: list[list[int]], requests: range, start: int
) -> None:
    slices = tuple(_slice(engine, batch, i, texts[i], start) for i in requests)
    outcome = engine.run(StepBatch(slices=slices))
    for i, sampled in zip(requests, outcome.sampled, strict=True):
        texts[i].append(sampled[0].token_id)


def _slice(
    engine: Engine, batch: Batch, request: int, text: list[int], start: int
) -> SequenceSlice:
    blocks = engine.layout.blocks_for(batch.length)
    tables: Tables = (tuple(BlockId(request * blocks + i) for i in range(blocks)),)
    wanted = SampleRequest(
        sampling=Sampling(max_tokens=batch.output_tokens, seed=0),
        choice=0,
        prompt_ids=(),
        emitted_ids=(),
    )
    return SequenceSlice(
        key=RequestKey(str(request), 0),
        choice=0,
        token_ids=tuple(text[start:]),
        start=start,
        tables=tables,
        samples=(wanted,),
    )


def _generate_batch(engine: Engine, batch: Batch, prompts: list[list[int]]) -> object:
    module = engine.model.module
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=batch.output_tokens, eos_token_id=None, pad_token_id=0
    )
    pages = paging(sequences=batch.requests, tokens=batch.length, step_tokens=batch.step_tokens)
    module.set_attn_implementation("sdpa")
    try:
        return module.generate_batch(
            prompts, generation_config=settings, continuous_batching_config=pages
        )
    finally:
        module.set_attn_implementation(NAME)
