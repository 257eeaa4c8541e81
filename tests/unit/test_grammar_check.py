"""The process that tries grammars: its answers, what ends it, and that it comes back."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from engine.bundled import checkpoint_path
from kvrelay.errors import InvalidRequest
from router.text.grammar.check import GrammarCheck
from router.text.grammar.grammars import (
    JSON_OBJECT,
    grammar_of_lark,
    grammar_of_regex,
    grammar_of_schema,
)
from tests.integration.faces_kit import in_loop

CHAIN = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(4000)) + '\nr4000: "x"'
SLOW = grammar_of_schema({"type": "integer", "multipleOf": 9_999_999})


@asynccontextmanager
async def checking(tokenizer: Path | None = None) -> AsyncIterator[GrammarCheck]:
    check = GrammarCheck(tokenizer or Path(checkpoint_path()) / "tokenizer.json")
    try:
        yield check
    finally:
        await check.close()


async def refusal(check: GrammarCheck, grammar: str) -> str:
    with pytest.raises(InvalidRequest) as refused:
        await check.check(grammar)
    assert refused.value.code == "invalid_grammar"
    return refused.value.message


@in_loop
async def test_good_ones_pass_and_bad_ones_carry_the_words_of_llguidance() -> None:
    async with checking() as check:
        for good in (JSON_OBJECT, grammar_of_regex("[a-z]+"), 'start: "a" <|endoftext|>'):
            await check.check(good)
        assert "nowhere" in await refusal(check, grammar_of_lark("start: nowhere"))
        assert "uniqueItems" in await refusal(check, grammar_of_schema({"uniqueItems": True}))
        assert "no_such" in await refusal(check, "start: <|no_such|>")
        look_ahead = await refusal(check, grammar_of_regex("(?=a)b"))
        assert "regex" in look_ahead and "<state>" not in look_ahead


@in_loop
async def test_what_overflows_a_stack_or_takes_too_long_ends_that_process_alone() -> None:
    async with checking() as check:
        await check.check(JSON_OBJECT)
        assert "too deeply" in await refusal(check, CHAIN)
        assert "too long" in await refusal(check, SLOW)
        await check.check(grammar_of_regex("a*"))
        started_s = time.monotonic()
        assert "too long" in await refusal(check, SLOW), "and it is remembered"
        assert time.monotonic() - started_s < 1.0


@in_loop
async def test_the_loop_goes_on_meanwhile() -> None:
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.01)
            turns += 1

    async with checking() as check:
        turning = asyncio.create_task(turn())
        await refusal(check, SLOW)
        turning.cancel()
    assert turns > 5


@in_loop
async def test_a_process_that_is_gone_is_started_again() -> None:
    async with checking() as check:
        await check.check(JSON_OBJECT)
        assert check._process is not None
        check._process.send_signal(signal.SIGKILL)
        check._process.wait()
        await check.check(grammar_of_regex("c"))


@in_loop
async def test_a_caller_that_leaves_takes_no_answer_from_the_next() -> None:
    async with checking() as check:
        await check.check(JSON_OBJECT)
        leaving = asyncio.create_task(check.check(SLOW))
        while not check._turn.locked():
            await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert "nowhere" in await refusal(check, grammar_of_lark("start: nowhere"))


@in_loop
async def test_without_a_usable_tokenizer_the_answer_says_so(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    async with checking(tmp_path / "tokenizer.json") as check:
        assert "tokenizer can't be used" in await refusal(check, JSON_OBJECT)


@in_loop
async def test_one_tenants_many_grammars_delay_anothers_by_one_check() -> None:
    ended: list[str] = []

    async def ask(check: GrammarCheck, tenant: str, number: int) -> None:
        await check.check(grammar_of_regex(f"{tenant}{{{number}}}"), f"tenant-{tenant}")
        ended.append(tenant)

    async with checking() as check:
        await check.check(JSON_OBJECT)
        many = [asyncio.create_task(ask(check, "a", number)) for number in range(1, 21)]
        await asyncio.sleep(0)
        await ask(check, "b", 1)
        await asyncio.gather(*many)
    assert ended.index("b") <= 2
