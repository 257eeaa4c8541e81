"""Many requests at once on one CUDA device, against transformers' `generate_batch` over the same
weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from transformers import GenerationConfig

from bench.engine.paging import paging
from bench.report import Reading, Row, interleave
from engine.core.step import SampleRequest, SequenceSlice, StepBatch
from engine.model.interface import NAME
from engine.runner import Engine
from kvpool.core.layout.layout import BlockId, Tables
from kvrelay.types import RequestKey, Sampling

_REQUESTS, _PROMPT_TOKENS, _OUTPUT_TOKENS = 64, 512, 64
_STEP_TOKENS = 8192
_REPEATS = 3


def batch_row(engine: Engine, method: str) -> Row:
    prompts = torch.randint(2, 30_000, (_REQUESTS, _PROMPT_TOKENS)).tolist()
    runs = {
        "kvrelay": _rate(lambda: _generate(engine, prompts)),
        "peer": _rate(lambda: _generate_batch(engine, prompts)),
    }
    found: dict[str, Reading] = interleave(runs, repeats=_REPEATS)
    return Row(
        name=f"output tokens/s, {_REQUESTS} x ({_PROMPT_TOKENS} in, {_OUTPUT_TOKENS} out)",
        value=found["kvrelay"].median,
        unit="tokens/s",
        against="transformers generate_batch",
        against_value=found["peer"].median,
        goal=3.0,
        method=method,
        spread=f"{found['kvrelay'].spread()}; peer {found['peer'].spread()}",
    )


def _rate(run: Callable[[], object]) -> Callable[[], float]:
    run()

    def measured() -> float:
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        return _REQUESTS * _OUTPUT_TOKENS / (time.perf_counter() - begin)

    return measured


def _generate(engine: Engine, prompts: Sequence[list[int]]) -> list[list[int]]:
    texts = [list(prompt) for prompt in prompts]
    together = _STEP_TOKENS // _PROMPT_TOKENS
    for first in range(0, _REQUESTS, together):
        _step(engine, texts, range(first, first + together), 0)
    for _ in range(_OUTPUT_TOKENS - 1):
        _step(engine, texts, range(_REQUESTS), len(texts[0]) - 1)
    return texts


def _step(engine: Engine, texts: list[list[int]], requests: range, start: int) -> None:
    slices = tuple(_slice(engine, i, texts[i], start) for i in requests)
    outcome = engine.run(StepBatch(slices=slices))
    for i, sampled in zip(requests, outcome.sampled, strict=True):
        texts[i].append(sampled[0].token_id)


def _slice(engine: Engine, request: int, text: list[int], start: int) -> SequenceSlice:
    blocks = engine.layout.blocks_for(_PROMPT_TOKENS + _OUTPUT_TOKENS)
    tables: Tables = (tuple(BlockId(request * blocks + i) for i in range(blocks)),)
    wanted = SampleRequest(
        sampling=Sampling(max_tokens=_OUTPUT_TOKENS, seed=0),
        choice=0,
        index=0,
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


def _generate_batch(engine: Engine, prompts: list[list[int]]) -> object:
    module = engine.model.module
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=_OUTPUT_TOKENS, eos_token_id=None, pad_token_id=0
    )
    pages = paging(
        sequences=_REQUESTS, tokens=_PROMPT_TOKENS + _OUTPUT_TOKENS, step_tokens=_STEP_TOKENS
    )
    module.set_attn_implementation("sdpa")
    try:
        return module.generate_batch(
            prompts, generation_config=settings, continuous_batching_config=pages
        )
    finally:
        module.set_attn_implementation(NAME)
