"""Prompts whose KV another worker has, in a real cluster of two prefill workers."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine.family.build import load_model
from engine.model.checkpoint import open_checkpoint
from kvrelay.types import RequestKey, Role
from router.core.load.prefill_queue import Ahead
from tests.integration.split_kit import (
    Cluster,
    WorkerHost,
    running_cluster,
    wait_until,
    worker_settings,
)
from tests.models import VOCAB_SIZE, random_checkpoint
from tests.reference import assert_same_tokens, generate_reference

TOKENS = 20
ELSEWHERE = RequestKey("elsewhere", 0)
Workers = list[tuple[WorkerHost, Any]]


@pytest.fixture(scope="module")
def third() -> Iterator[WorkerHost]:
    with WorkerHost() as host:
        yield host


def _prompt(seed: int, tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(2, VOCAB_SIZE) for _ in range(tokens)]


def _workers(
    folder: Path, hosts: tuple[WorkerHost, WorkerHost], third: WorkerHost, **changes: Any
) -> Workers:
    """Only prefill workers cache, so only they have anything to give."""
    return [
        (hosts[0], worker_settings("prefill-0", Role.PREFILL, folder, **changes)),
        (third, worker_settings("prefill-1", Role.PREFILL, folder, **changes)),
        (
            hosts[1],
            worker_settings("decode-0", Role.DECODE, folder, prefix_caching=False, **changes),
        ),
    ]


def _ask(cluster: Cluster, prompt: list[int]) -> tuple[list[int], int]:
    answer = cluster.completion(prompt, max_tokens=TOKENS, temperature=0, ignore_eos=True)
    details = answer["usage"]["prompt_tokens_details"]
    return answer["choices"][0]["token_ids"], details["cached_tokens"]


def _prefer(cluster: Cluster, name: str) -> None:
    """The router places all prompts there: the other prefill worker seems busy."""

    async def book() -> None:
        for view in cluster.router.process.dispatcher.core.state.workers.values():
            if view.hello.role is Role.PREFILL:
                view.queue.remove(ELSEWHERE, 0.0)
                if view.hello.name != name:
                    view.queue.add(ELSEWHERE, Ahead(seconds=1e9, tokens=10**6), 0.0)

    cluster.router.call(book())


def _sources(cluster: Cluster, worker: str) -> dict[str, int]:
    """# source |-> prompts that the worker began with it"""
    text = cluster.metrics()
    rows = [
        line
        for line in text.splitlines()
        if line.startswith("kvrelay:prefix_source_total{") and f'"{worker}"' in line
    ]
    counts = {r.split('source="')[1].split('"')[0]: int(float(r.rsplit(" ", 1)[1])) for r in rows}
    return {source: count for source, count in counts.items() if count}


def _waiting(cluster: Cluster, name: str) -> int:
    (worker,) = [w for w in cluster.router.workers() if w.name == name]
    return worker.counters.waiting


@pytest.mark.parametrize(
    ("family", "transport"),
    [("llama", "shm"), ("llama", "nixl"), ("gemma3_text", "shm")],
)
def test_a_prefix_asked_for_on_two_workers_ends_up_on_both(
    family: str,
    transport: str,
    tmp_path: Path,
    hosts: tuple[WorkerHost, WorkerHost],
    third: WorkerHost,
) -> None:
    folder = random_checkpoint(tmp_path, family)
    model = load_model(open_checkpoint(str(folder)), device="cpu", dtype="float32")
    workers = _workers(folder, hosts, third, transports=(transport,))
    prompt = _prompt(1, 150)
    expected = generate_reference(model, prompt, tokens=TOKENS)
    with running_cluster(folder, workers) as cluster:
        found = []
        for name in ("prefill-0", "prefill-1", "prefill-1"):
            _prefer(cluster, name)
            tokens, cached = _ask(cluster, prompt)
            assert_same_tokens(expected, tokens)
            found.append(cached)
        assert found == [0, 144, 144]
        wait_until(
            lambda: _sources(cluster, "prefill-1") == {"peer": 1, "device": 1}, "it is counted"
        )
        assert _sources(cluster, "prefill-0") == {"computed": 1}
        cluster.assert_clean()


def test_a_holder_that_falls_silent_or_dies_is_not_needed(
    llama: Path, hosts: tuple[WorkerHost, WorkerHost]
) -> None:
    """It is stopped, and asked: it comes back after it was given up. The next time it is killed."""
    model = load_model(open_checkpoint(str(llama)), device="cpu", dtype="float32")
    with WorkerHost() as holder:
        workers = _workers(llama, (holder, hosts[1]), hosts[0])
        patient = running_cluster(llama, workers, detect_s=60.0)
        with patient as cluster, ThreadPoolExecutor(1) as pool:
            prompts = [_prompt(seed, 150) for seed in (2, 3, 4)]
            _prefer(cluster, "prefill-0")
            for prompt in prompts:
                _ask(cluster, prompt)
            _prefer(cluster, "prefill-1")
            assert _ask(cluster, prompts[0])[1] == 144  # by now they are connected
            for prompt, end in zip(prompts[1:], (signal.SIGCONT, signal.SIGKILL), strict=True):
                os.kill(holder.pid, signal.SIGSTOP)
                answer = pool.submit(_ask, cluster, prompt)
                if end is signal.SIGKILL:
                    wait_until(lambda: _waiting(cluster, "prefill-1") == 1, "it waits for them")
                    holder.kill()
                tokens, cached = answer.result()
                if end is signal.SIGCONT:
                    os.kill(holder.pid, end)
                assert cached == 0
                assert_same_tokens(generate_reference(model, prompt, tokens=TOKENS), tokens)
            assert _sources(cluster, "prefill-1") == {"peer": 1, "computed": 2}
