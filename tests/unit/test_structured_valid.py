"""Random schemas, answered by the bundled model: what ends by itself is valid."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer

from bench.engine.structured import Answer, Batch, bundled_engine, check_schemas
from engine.bundled import checkpoint_path
from engine.runner import Engine
from kvrelay.types import FinishReason, Sampling
from router.text.grammar.grammars import grammar_of_choices, grammar_of_regex

EOS = (0, 2)
TOKENS = 300


@pytest.fixture(scope="module", name="engine")
def loaded_engine() -> Iterator[Engine]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    engine = bundled_engine(sequences=32, tokens=TOKENS)
    yield engine
    engine.close()
    torch.set_num_threads(threads)


def answer(engine: Engine, grammar: str, **fields: object) -> tuple[str, FinishReason | None]:
    asked = Sampling(max_tokens=40, seed=3, temperature=1.0, stop_token_ids=EOS, grammar=grammar)
    one = Answer(
        name=f"{grammar}{fields}",
        prompt=(5, 6, 7),
        sampling=replace(asked, **fields),  # type: ignore[arg-type]
        tables=(),
    )
    batch = Batch(engine, sequences=1, tokens=TOKENS)
    (ended,) = batch.answers(iter([one]))
    tokenizer = Tokenizer.from_file(f"{checkpoint_path()}/tokenizer.json")
    return tokenizer.decode(ended.emitted), ended.reason


def test_schemas(engine: Engine) -> None:
    counts = check_schemas(engine, range(64), sequences=32, most_tokens=160)
    assert not counts.wrong
    assert counts.valid > 32, counts


@pytest.mark.long
def test_many_schemas(engine: Engine) -> None:
    counts = check_schemas(engine, range(4_000), sequences=32)
    assert not counts.wrong
    assert counts.valid > 2_000, counts


def test_a_matched_grammar_ends_the_answer(engine: Engine) -> None:
    grammar = grammar_of_choices(["the lamb", "the lion"])
    for fields in ({}, {"min_tokens": 30}, {"stop_token_ids": ()}):
        text, reason = answer(engine, grammar, **fields)
        assert text in ("the lamb", "the lion") and reason is FinishReason.STOP


def test_min_tokens_and_an_ignored_end_make_it_longer(engine: Engine) -> None:
    grammar = grammar_of_regex("([a-z]{1,9} ?){1,60}")
    short, reason = answer(engine, grammar, logit_bias=tuple((one, 50.0) for one in EOS))
    assert reason is FinishReason.STOP and len(short) < 10
    for fields in ({"min_tokens": 39}, {"stop_token_ids": ()}):
        text, reason = answer(engine, grammar, **fields)
        assert len(text) > 39 and reason is FinishReason.LENGTH


def test_no_bias_and_no_penalty_leaves_the_grammar(engine: Engine) -> None:
    bias = tuple((token, 100.0) for token in range(100, 160))
    text, _ = answer(engine, grammar_of_regex("[0-9]{12}"), logit_bias=bias, presence_penalty=2.0)
    assert len(text) == 12 and text.isdigit()
