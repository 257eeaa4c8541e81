"""Prompts that arrive in parts, at real workers and over both faces: the same tokens, some of them
computed before the last part, and nothing held whatever happens."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvrelay import AsyncClient, Client, Generated, InvalidRequest, Refused, RequestFailedError
from kvrelay.types import Role
from tests.integration.faces_kit import in_loop, served
from tests.integration.split_kit import (
    Cluster,
    RouterThread,
    WorkerHost,
    running_cluster,
    split_workers,
    wait_until,
    worker_settings,
)
from tests.models import VOCAB_SIZE
from tests.tokenizer_fixture import byte_level
from tests.unit.fake_dispatcher import FakeDispatcher

PROMPTS, TOKENS = 200, 4
EXACT: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def cluster(llama: Path, hosts: tuple[WorkerHost, WorkerHost]) -> Iterator[Cluster]:
    with running_cluster(llama, split_workers(hosts, llama)) as running:
        yield running


def prompt_of(draw: random.Random, tokens: int) -> list[int]:
    return [draw.randrange(2, VOCAB_SIZE) for _ in range(tokens)]


def parts_of(draw: random.Random, prompt: Sequence[int], most: int) -> list[Sequence[int]]:
    """The prompt, cut anywhere."""
    at = sorted({0, len(prompt), *(draw.randrange(len(prompt)) for _ in range(most))})
    return [prompt[i:k] for i, k in pairwise(at)]


def ids_of(answer: Generated) -> list[tuple[int, ...]]:
    return [choice.token_ids for choice in answer.choices]


def whole_of(client: Client, prompt: Sequence[int], **options: Any) -> list[tuple[int, ...]]:
    return ids_of(client.generate(prompt, **EXACT, **options))


def streamed(client: Client, parts: Iterator[Any], **options: Any) -> list[tuple[int, ...]]:
    chosen: dict[int, list[int]] = {}
    with client.stream_input(parts, **EXACT, **options) as stream:
        for chunk in stream:
            chosen.setdefault(chunk.index, []).extend(chunk.token_ids)
    return [tuple(chosen[i]) for i in sorted(chosen)]


class Hand:
    """Gives the next part when the test says so."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = list(parts)
        self._allowed = threading.Semaphore(0)
        self.given = 0

    def let_go(self, parts: int) -> None:
        for _ in range(parts):
            self._allowed.release()

    def __iter__(self) -> Iterator[Any]:
        for part in self._parts:
            self._allowed.acquire()
            self.given += 1
            yield part
        self._allowed.acquire()


def computed(cluster: Cluster) -> int:
    """Tokens of prompts, by all workers."""
    return sum(worker.counters.prompt_tokens for worker in cluster.router.workers())


def test_every_cut_of_random_prompts_is_exact(cluster: Cluster) -> None:
    """With prefix hits, ends within blocks and chunks, and several choices."""
    draw = random.Random(5)
    with Client(cluster.grpc_address) as client:
        prompt: list[int] = []
        for number in range(PROMPTS):
            kept = prompt[: draw.randrange(len(prompt) + 1)]
            prompt = (kept + prompt_of(draw, draw.choice([1, 17, 64, 130, 400])))[:600]
            n = draw.choice([1, 1, 1, 2])
            parts = parts_of(draw, prompt, draw.choice([1, 3, 9]))
            got = streamed(client, iter(parts), n=n)
            assert got == whole_of(client, prompt, n=n), f"prompt {number} of {len(prompt)} tokens"
    cluster.assert_clean()


def test_text_in_parts_is_the_whole_text(cluster: Cluster) -> None:
    draw = random.Random(6)
    with Client(cluster.grpc_address) as client:
        for _ in range(10):
            text = " ".join(f"w{draw.randrange(1000)}" for _ in range(150))
            cuts = sorted({0, len(text), *(draw.randrange(len(text)) for _ in range(7))})
            parts = [text[i:k] for i, k in pairwise(cuts)]
            assert streamed(client, iter(parts)) == ids_of(client.generate(text, **EXACT))


def test_most_of_it_is_computed_before_the_last_part(cluster: Cluster) -> None:
    """By the prefill worker, where the prompt finds it, also under a tenant's own names."""
    draw = random.Random(7)
    prompt = prompt_of(draw, 640)
    before = computed(cluster)
    hand = Hand([prompt[:600], prompt[600:]])
    with Client(cluster.grpc_address) as client, ThreadPoolExecutor(1) as pool:
        stream = client.stream_input(hand, tenant="t", **EXACT)
        chunks = pool.submit(list, stream)
        hand.let_go(1)
        wait_until(lambda: computed(cluster) >= before + 592, "all whole blocks are there")
        hand.let_go(2)
        answer = chunks.result()
        assert answer[-1].prompt_tokens == 640
        assert answer[-1].cached_tokens == 592
        assert "kvrelay:prompt_tokens_ahead_total" in cluster.metrics()
        assert [i for chunk in answer for i in chunk.token_ids] == list(whole_of(client, prompt)[0])


def lines(*objects: dict[str, Any]) -> list[bytes]:
    return [json.dumps(one).encode() + b"\n" for one in objects]


def post(cluster: Cluster, body: Iterator[bytes] | bytes) -> httpx.Response:
    return cluster.http.post("/v1/completions/stream", content=body)


def test_over_http_a_body_of_lines_ends_the_prompt(cluster: Cluster) -> None:
    draw = random.Random(8)
    prompt = prompt_of(draw, 300)
    first = {"model": "test-model", "prompt": prompt[:10], "expected_tokens": 300, **EXACT}
    first |= {"return_token_ids": True}
    pieces = b"".join(
        lines(first, {"token_ids": prompt[10:200]}, {"token_ids": prompt[190:], "offset": 190})
    )
    whole = cluster.completion(prompt, **EXACT)["choices"][0]["token_ids"]
    for size in (1, 7, 1000, len(pieces)):
        chunks = iter([pieces[i : i + size] for i in range(0, len(pieces), size)])
        answer = post(cluster, chunks)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["token_ids"] == whole
        assert answer.json()["usage"]["prompt_tokens"] == 300
    response = post(cluster, b"".join(lines(first | {"stream": True}, {"token_ids": prompt[10:]})))
    events = [line for line in response.text.splitlines() if line.startswith("data: {")]
    ids = [json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"] for line in events]
    assert [i for some in ids for i in some] == whole


@pytest.mark.parametrize(
    ("further", "message"),
    [
        (b"nonsense\n", "the body is not valid JSON"),
        (b'{"text": "a", "token_ids": [1]}\n', "either text or token_ids"),
        (b'{"text": "a"}\n', "one kind only"),
        (b'{"token_ids": [5], "offset": 99}\n', "begins at 99"),
        (b'{"token_ids": [5], "offset": -1}\n', "offset must be at least 0"),
        (b'{"token_ids": [-5]}\n', "greater than or equal to 0"),
        (b'{"words": [5]}\n', "unknown field 'words'"),
        (b" " * (1 << 20) + b"x\n", "a line exceeds the limit of"),
    ],
)
def test_bad_lines_are_named(cluster: Cluster, further: bytes, message: str) -> None:
    answer = post(cluster, lines({"prompt": [5, 6], **EXACT})[0] + further)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_bad_beginnings_are_named(cluster: Cluster) -> None:
    for body, message in (
        (b"", "the body is empty"),
        (b"\n \n", "the body is empty"),
        (b'{"prompt": ["a", "b"]}\n', "prompt must be"),
        (b'{"prompt": "a", "expected_tokens": 100000}\n', "expected_tokens is 100000"),
        (b'{"max_tokens": 3}\n', "the prompt is empty"),
    ):
        answer = post(cluster, body)
        assert answer.status_code == 400, body
        assert message in answer.json()["error"]["message"]


def test_a_client_that_goes_away_leaves_a_cache_and_nothing_else(cluster: Cluster) -> None:
    draw = random.Random(9)
    prompt = prompt_of(draw, 500)
    dispatcher = cluster.router.process.dispatcher
    before = computed(cluster)

    def body() -> Iterator[bytes]:
        yield lines({"prompt": prompt, **EXACT})[0]
        wait_until(lambda: computed(cluster) >= before + 496, "all whole blocks are there")
        raise ConnectionAbortedError("gone")

    with pytest.raises(ConnectionAbortedError):
        post(cluster, body())
    wait_until(lambda: not dispatcher.running_requests(), "the router has forgotten it")
    cluster.assert_clean()
    with Client(cluster.grpc_address) as client:
        answer = client.generate(prompt, **EXACT)
    assert answer.cached_tokens == 496


def test_a_prefill_worker_that_dies_loses_no_prompt(llama: Path) -> None:
    """What was computed ahead is computed again."""
    draw = random.Random(10)
    prompt = prompt_of(draw, 500)
    with WorkerHost() as doomed, WorkerHost() as decode, WorkerHost() as other:
        workers = split_workers((doomed, decode), llama)
        with running_cluster(llama, workers) as cluster, ThreadPoolExecutor(1) as pool:
            hand = Hand([prompt[:300], prompt[300:490], prompt[490:]])
            with Client(cluster.grpc_address) as client:
                chunks = pool.submit(list, client.stream_input(hand, **EXACT))
                hand.let_go(1)
                wait_until(lambda: computed(cluster) > 0, "it is ahead")
                address = other.start(worker_settings("prefill-1", Role.PREFILL, llama))
                cluster.join(address, "prefill-1")
                os.kill(doomed.pid, signal.SIGKILL)
                hand.let_go(3)
                got = [i for chunk in chunks.result() for i in chunk.token_ids]
                assert got == list(whole_of(client, prompt)[0])
            other.stop(address)


def test_the_next_router_gets_all_parts_again(llama: Path) -> None:
    """A router is gone between two parts; the same stream goes on at the other one."""
    draw = random.Random(11)
    prompt = prompt_of(draw, 400)
    with WorkerHost() as prefill, WorkerHost() as decode:
        workers = split_workers((prefill, decode), llama)
        with running_cluster(llama, workers) as cluster, ThreadPoolExecutor(1) as pool:
            addresses = [worker.address for worker in cluster.router.workers()]
            lost = RouterThread(llama)
            for address in addresses:
                lost.call(lost.process.add_worker(address))
            wait_until(lambda: len(lost.workers()) == 2, "it knows the workers")
            hand = Hand([prompt[:200], prompt[200:390], prompt[390:]])
            known = [f"127.0.0.1:{lost.address.public.grpc}", cluster.grpc_address]
            with Client(known) as client:
                chunks = pool.submit(list, client.stream_input(hand, **EXACT))
                hand.let_go(1)
                wait_until(lambda: computed(cluster) > 0, "the first router is ahead")
                lost.close()
                hand.let_go(3)
                got = [i for chunk in chunks.result() for i in chunk.token_ids]
            with Client(cluster.grpc_address) as client:
                assert got == list(whole_of(client, prompt)[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level(tmp_path_factory.mktemp("checkpoint"))


async def each(*parts: Any) -> AsyncIterator[Any]:
    for part in parts:
        yield part


@in_loop
async def test_the_async_client_and_what_its_own_parts_raise(folder: Path) -> None:
    async def broken() -> AsyncIterator[str]:
        yield "a"
        raise OSError("the microphone is gone")

    async with served(folder) as here, AsyncClient(here.grpc_address) as client:
        async with client.stream_input(each("a b", " c"), max_tokens=9) as stream:
            assert "".join([chunk.text async for chunk in stream]) == "a b c"
        async with client.stream_input(["a b", " c"], max_tokens=9) as stream:
            assert "".join([chunk.text async for chunk in stream]) == "a b c"
        with pytest.raises(OSError, match="microphone"):
            async with client.stream_input(broken()) as stream:
                await anext(stream)
        with pytest.raises(InvalidRequest, match="wrong type"):
            async with client.stream_input([3]) as stream:  # type: ignore[list-item]
                await anext(stream)
        assert not here.dispatcher.running


@in_loop
async def test_threads_hear_what_their_own_parts_raise_and_what_is_refused(folder: Path) -> None:
    def broken() -> Iterator[str]:
        yield "a"
        raise OSError("the microphone is gone")

    refusal = Refused("slots_exhausted", "full", retry_after_s=0.01)
    dispatcher = FakeDispatcher(refusal=refusal, refusals_left=1)
    async with served(folder, dispatcher) as here:
        with Client(here.grpc_address) as client:

            def run(parts: Any, **options: Any) -> str:
                return "".join(chunk.text for chunk in client.stream_input(parts, **options))

            with pytest.raises(OSError, match="microphone"):
                await asyncio.to_thread(run, broken())
            assert await asyncio.to_thread(run, ["a b", " c"], retries=1) == "a b c"
            dispatcher.refusals_left = 1
            with pytest.raises(Refused, match="full"):
                await asyncio.to_thread(run, ["a b", " c"])
            with pytest.raises(InvalidRequest, match="the prompt is empty"):
                await asyncio.to_thread(run, [])


@in_loop
async def test_nobody_answers(folder: Path) -> None:
    async with served(folder) as here:
        address = here.grpc_address
    async with AsyncClient(address) as client:
        with pytest.raises(RequestFailedError, match="onnect"):
            async with client.stream_input(["a"]) as stream:
                await anext(stream)
