"""Prompts that arrive in parts: putting them together, their tokens so far, and computing ahead."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from kvrelay.errors import InvalidRequest, Refused
from router.arriving.parts import PartsSoFar, PromptPart
from router.arriving.pieces import LEAST_TOKENS, MOST_TOKENS
from router.arriving.prompt import Arriving, start_arriving
from router.arriving.stable_tokens import UNSTABLE_TOKENS, StableTokens
from router.live.metrics import RouterMetrics
from router.text.request import TextRequest
from router.text.sampling import GenerationDefaults, RequestedSampling
from router.text.service import TextService
from router.text.tokenizer import TextTokenizer
from tests.integration.faces_kit import in_loop
from tests.tokenizer_fixture import TEXTS, byte_level
from tests.unit.fake_dispatcher import FACTS, FakeDispatcher

BLOCK = FakeDispatcher().block_size()
LONG_CONTEXT = replace(FACTS, max_model_len=8192)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return TextTokenizer.load(byte_level(tmp_path_factory.mktemp("checkpoint")))


def part(content: str | Sequence[int], offset: int | None = None) -> PromptPart:
    return PromptPart(
        content=content if isinstance(content, str) else tuple(content), offset=offset
    )


def so_far(most: int = 100) -> PartsSoFar:
    return PartsSoFar(most_characters=most, most_tokens=most)


def test_what_was_sent_twice_counts_once_and_a_gap_is_refused() -> None:
    text = so_far()
    assert text.add(part("the heaven")) == "the heaven"
    assert text.add(part("heaven and", offset=4)) == " and"
    assert text.add(part("the", offset=0)) == ""
    with pytest.raises(InvalidRequest, match="begins at 20, but only 14 characters have come"):
        text.add(part("earth", offset=20))
    assert text.add(part(" the earth")) == " the earth"
    assert text.whole() == "the heaven and the earth"


def test_parts_of_two_kinds_and_too_long_ones_are_refused_and_not_kept() -> None:
    ids = so_far(4)
    ids.add(part([1, 2, 3]))
    with pytest.raises(InvalidRequest, match="one kind only"):
        ids.add(part("text"))
    with pytest.raises(InvalidRequest, match="more than 4 tokens"):
        ids.add(part([4, 5]))
    ids.add(part([4]))
    assert ids.whole() == (1, 2, 3, 4)
    text = so_far(4)
    text.add(part("four"))
    with pytest.raises(InvalidRequest, match="more than 4 characters"):
        text.add(part("s"))
    with pytest.raises(InvalidRequest, match="one kind only"):
        text.add(part([1]))


def cuts(text: str, draw: random.Random, most: int) -> list[str]:
    at = sorted({0, len(text), *(draw.randrange(len(text)) for _ in range(most))})
    return [text[i:k] for i, k in itertools.pairwise(at)]


@pytest.mark.parametrize("seed", range(20))
def test_stable_tokens_are_those_of_the_whole_text(tokenizer: TextTokenizer, seed: int) -> None:
    """Whatever was cut where: only the last tokens so far may differ."""
    draw = random.Random(seed)
    text = " ".join(draw.choice(TEXTS) for _ in range(40))
    stable = StableTokens(tokenizer.backend, add_special_tokens=True)
    whole = tokenizer.encode(text)
    for piece in cuts(text, draw, 30):
        stable.grow(piece)
        ids = stable.stable_ids()
        assert ids == whole[: len(ids)]
    assert len(stable.stable_ids()) == len(whole) - UNSTABLE_TOKENS


def test_only_the_end_of_a_long_text_is_tokenized_again(tokenizer: TextTokenizer) -> None:
    class Counting:
        characters = 0

        def encode_batch(self, texts: list[str], *, add_special_tokens: bool) -> object:
            self.characters += sum(map(len, texts))
            return tokenizer.backend.encode_batch(texts, add_special_tokens=add_special_tokens)

    counting = Counting()
    stable = StableTokens(counting, add_special_tokens=True)  # type: ignore[arg-type]
    words = TEXTS[0] * 200
    for at in range(0, len(words), 500):
        stable.grow(words[at : at + 500])
    assert counting.characters < 2 * len(words)


def service_over(dispatcher: FakeDispatcher, tokenizer: TextTokenizer) -> TextService:
    return TextService(
        dispatcher,
        tokenizer,
        model_name="tiny",
        defaults=GenerationDefaults(),
        metrics=RouterMetrics("tiny"),
    )


def request(**changes: object) -> TextRequest:
    plain = {"request_id": "r", "prompt": "", "sampling": RequestedSampling(max_tokens=8)}
    return TextRequest(**(plain | changes))  # type: ignore[arg-type]


class Feed:
    """Parts that come when the test says so."""

    def __init__(self) -> None:
        self._parts: asyncio.Queue[PromptPart | None] = asyncio.Queue()

    def say(self, content: str | Sequence[int]) -> None:
        self._parts.put_nowait(part(content))

    def end(self) -> None:
        self._parts.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[PromptPart]:
        while (one := await self._parts.get()) is not None:
            yield one


def long_context(**changes: object) -> FakeDispatcher:
    return FakeDispatcher(facts=LONG_CONTEXT, **changes)  # type: ignore[arg-type]


def arriving(feed: Feed, **changes: object) -> Arriving:
    plain = {"request": request(), "parts": aiter(feed), "most_characters": 10**6}
    return Arriving(**(plain | changes))  # type: ignore[arg-type]


async def until_asked(dispatcher: FakeDispatcher, count: int) -> None:
    while len(dispatcher.requests) < count:
        await asyncio.sleep(0)


PROMPT = [2 + i % 500 for i in range(900)]


@in_loop
async def test_whole_blocks_are_computed_ahead_and_the_prompt_is_the_whole(
    tokenizer: TextTokenizer,
) -> None:
    dispatcher, feed = long_context(), Feed()
    service = service_over(dispatcher, tokenizer)
    starting = asyncio.ensure_future(
        start_arriving(service, arriving(feed, request=request(tenant="t")))
    )
    feed.say(PROMPT[: LEAST_TOKENS - 1])
    feed.say(PROMPT[LEAST_TOKENS - 1 : 300])
    await until_asked(dispatcher, 1)
    feed.say(PROMPT[300:])
    await until_asked(dispatcher, 2)
    feed.end()
    generation = await starting
    first, second, last = dispatcher.requests
    assert [len(first.prompt_ids), len(second.prompt_ids)] == [
        300 // BLOCK * BLOCK,
        900 // BLOCK * BLOCK,
    ]
    for ahead in (first, second):
        assert ahead.is_ahead and ahead.tenant == "t" and not ahead.sampling.max_tokens
        assert list(ahead.prompt_ids) == PROMPT[: len(ahead.prompt_ids)]
    assert list(last.prompt_ids) == PROMPT and not last.is_ahead and last.tenant == "t"
    assert len({one.request_id for one in dispatcher.requests}) == 3
    assert [one async for one in generation.deltas()]
    assert not dispatcher.running


@in_loop
async def test_one_request_ahead_is_no_longer_than_others_may_wait(
    tokenizer: TextTokenizer,
) -> None:
    dispatcher, feed = long_context(gates={"submit"}), Feed()
    starting = asyncio.ensure_future(
        start_arriving(service_over(dispatcher, tokenizer), arriving(feed))
    )
    feed.say([7] * (MOST_TOKENS + 500))
    await until_asked(dispatcher, 1)
    assert len(dispatcher.requests[0].prompt_ids) == MOST_TOKENS
    starting.cancel()
    await asyncio.wait({starting})
    assert await dispatcher.aborted.get() == "r-ahead-1"


@in_loop
async def test_who_says_nothing_holds_nothing_and_is_given_up(tokenizer: TextTokenizer) -> None:
    dispatcher, feed = long_context(), Feed()
    feed.say(PROMPT)
    with pytest.raises(InvalidRequest, match=r"no part of the prompt has come for 0\.05 s"):
        await start_arriving(service_over(dispatcher, tokenizer), arriving(feed, idle_s=0.05))
    assert not dispatcher.running and len(dispatcher.requests) == 1


@in_loop
async def test_a_refusal_at_the_end_tells_what_it_has_cost(tokenizer: TextTokenizer) -> None:
    dispatcher, feed = long_context(), Feed()
    service = service_over(dispatcher, tokenizer)
    starting = asyncio.ensure_future(start_arriving(service, arriving(feed)))
    feed.say(PROMPT[:300])
    await until_asked(dispatcher, 1)
    while dispatcher.running:
        await asyncio.sleep(0)
    dispatcher.refusal = Refused("ttft_unreachable", "too late", retry_after_s=2.0)
    feed.end()
    with pytest.raises(Refused) as caught:
        await starting
    assert (
        caught.value.message
        == f"too late; {300 // BLOCK * BLOCK} tokens of its prompt were computed ahead"
    )
    assert caught.value.retry_after_s == 2.0


@in_loop
async def test_refusals_of_what_is_ahead_do_not_end_the_request(tokenizer: TextTokenizer) -> None:
    refusal = Refused("slots_exhausted", "full", retry_after_s=60.0)
    dispatcher, feed = long_context(refusal=refusal, refusals_left=1), Feed()
    starting = asyncio.ensure_future(
        start_arriving(service_over(dispatcher, tokenizer), arriving(feed))
    )
    feed.say(PROMPT)
    await until_asked(dispatcher, 1)
    feed.end()
    await starting
    assert list(dispatcher.requests[-1].prompt_ids) == PROMPT


@in_loop
async def test_a_prompt_that_could_never_be_served_is_refused_at_once(
    tokenizer: TextTokenizer,
) -> None:
    dispatcher = long_context()
    service, feed = service_over(dispatcher, tokenizer), Feed()
    with pytest.raises(InvalidRequest, match=r"expected_tokens is \d+, but the model's context"):
        await start_arriving(service, arriving(feed, expected_tokens=LONG_CONTEXT.max_model_len))
    dispatcher.appraised = Refused("ttft_unreachable", "never", retry_after_s=None)
    with pytest.raises(Refused, match="never"):
        await start_arriving(service, arriving(feed, expected_tokens=100))
    dispatcher.appraised = Refused("ttft_unreachable", "not now", retry_after_s=1.0)
    feed.say(PROMPT[:10])
    feed.end()
    await start_arriving(service, arriving(feed, expected_tokens=100))
    assert list(dispatcher.requests[-1].prompt_ids) == PROMPT[:10]


@in_loop
async def test_an_empty_prompt_is_refused(tokenizer: TextTokenizer) -> None:
    feed = Feed()
    feed.end()
    with pytest.raises(InvalidRequest, match="the prompt is empty"):
        await start_arriving(service_over(FakeDispatcher(), tokenizer), arriving(feed))
