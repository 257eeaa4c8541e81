"""Whole clusters of real processes: roles, preemption, sampling, refusals, a worker that dies."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from cluster.worker.process import WorkerProcess
from engine.family.build import load_model
from engine.model.checkpoint import open_checkpoint
from engine.model.model import Model
from kvrelay.errors import ModelError
from kvrelay.types import Role
from tests.integration.split_kit import (
    Cluster,
    WorkerHost,
    running_cluster,
    wait_until,
    worker_settings,
)
from tests.models import VOCAB_SIZE
from tests.reference import assert_same_tokens, generate_reference

TOKENS, LONG = 48, 300
LEDGERS = 8


def kv_bytes(model: Path, tokens: int) -> int:
    """fp32 KV of `tokens` tokens."""
    config = json.loads((model / "config.json").read_text())
    dim = config["hidden_size"] // config["num_attention_heads"]
    return tokens * 4 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * dim


def load(llama: Path) -> Model:
    return load_model(open_checkpoint(str(llama)), device="cpu", dtype="float32")


def prompts(count: int, longest: int, *, seed: int = 3) -> list[list[int]]:
    rng = random.Random(seed)
    return [
        [rng.randrange(2, VOCAB_SIZE) for _ in range(rng.randint(1, longest))] for _ in range(count)
    ]


def ask_all(cluster: Cluster, asked: list[list[int]], **fields: Any) -> list[list[int]]:
    def ask(prompt: list[int]) -> list[int]:
        plain = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        answer = cluster.completion(prompt, **{**plain, **fields})
        ids: list[int] = answer["choices"][0]["token_ids"]
        return ids

    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(ask, asked))


def test_staging_slabs_are_taken_from_the_memory(llama: Path) -> None:
    """Four of 4,096 tokens, at 512 bytes each, and a short header."""
    settings = worker_settings(
        "both-0",
        Role.BOTH,
        llama,
        memory_fraction=1e-9,
        kv_memory_bytes=None,
        staging_slabs=4,
        staging_bytes=4 * (128 + 4096 * 512),
    )
    with pytest.raises(ModelError, match=r"- staging 8 MiB, at 512 B per token"):
        asyncio.run(WorkerProcess(settings).start())


def test_a_router_needs_no_weights(llama: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(llama, tmp_path / "model"))
    (folder / "model.safetensors").unlink()
    with running_cluster(folder, []) as cluster:
        assert cluster.http.get("/health").status_code == 200


def test_role_both_equals_generate(llama: Path, hosts: tuple[WorkerHost, WorkerHost]) -> None:
    asked = prompts(8, 200)
    reference = load(llama)
    settings = worker_settings("both-0", Role.BOTH, llama)
    with running_cluster(llama, [(hosts[0], settings)]) as cluster:
        found = ask_all(cluster, asked)
    for ids, prompt in zip(found, asked, strict=True):
        assert_same_tokens(generate_reference(reference, prompt, tokens=TOKENS), ids)


@pytest.mark.parametrize("role", [Role.BOTH, Role.DECODE])
def test_preempted_requests_finish_with_the_same_tokens(
    llama: Path, hosts: tuple[WorkerHost, WorkerHost], role: Role
) -> None:
    """Blocks for 192 tokens, eight requests that want over 60 each; again while too few of them
    overlap."""
    small = {"kv_memory_bytes": kv_bytes(llama, 192), "max_model_len": 96}
    workers = [(hosts[1], worker_settings("small-0", role, llama, **small))]
    if role is Role.DECODE:
        workers.append((hosts[0], worker_settings("prefill-0", Role.PREFILL, llama)))
    reference = load(llama)
    with running_cluster(llama, workers) as cluster:
        for seed in range(5):
            asked = prompts(8, 30, seed=seed)
            found = ask_until_admitted(cluster, asked)
            if preemptions(cluster):
                break
        assert preemptions(cluster) > 0
    for ids, prompt in zip(found, asked, strict=True):
        assert_same_tokens(generate_reference(reference, prompt, tokens=TOKENS), ids)


def preemptions(cluster: Cluster) -> int:
    views = cluster.router.process.dispatcher.core.state.workers.values()
    return sum(view.counters.preemptions for view in views)


def ask_until_admitted(cluster: Cluster, asked: list[list[int]]) -> list[list[int]]:
    """As a client does that is told to come back."""

    def ask(prompt: list[int]) -> list[int]:
        body = {"model": "test-model", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        while True:
            response = cluster.http.post("/v1/completions", json=body)
            if response.status_code != 429:
                break
            threading.Event().wait(float(response.headers["retry-after-ms"]) / 1000)
        assert response.status_code == 200, response.text
        ids: list[int] = response.json()["choices"][0]["token_ids"]
        return ids

    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(ask, asked))


def test_same_seed_same_text_whatever_the_batch(split: Cluster) -> None:
    prompt = prompts(1, 100)[0]
    fields = {"temperature": 1.0, "seed": 11, "max_tokens": 32}
    alone = ask_all(split, [prompt], **fields)[0]
    crowd = ask_all(split, [prompt, *prompts(7, 150)], **fields)
    assert crowd[0] == alone
    other = ask_all(split, [prompt], **{**fields, "seed": 12})[0]
    assert other != alone


def test_n_choices_share_the_prompt_and_differ(split: Cluster) -> None:
    prompt = prompts(1, 100)[0]
    fields = {"temperature": 1.0, "seed": 5, "max_tokens": 24, "ignore_eos": True}
    answer = split.completion(prompt, n=4, **fields)
    texts = [tuple(choice["token_ids"]) for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    single = split.completion(prompt, n=1, **fields)
    assert tuple(single["choices"][0]["token_ids"]) == texts[0]
    greedy_choices = split.completion(prompt, n=3, **{**fields, "temperature": 0})["choices"]
    assert len({tuple(choice["token_ids"]) for choice in greedy_choices}) == 1


def test_a_full_cluster_refuses_at_once_and_says_when(
    long_llama: Path, hosts: tuple[WorkerHost, WorkerHost]
) -> None:
    settings = worker_settings("both-0", Role.BOTH, long_llama, max_running_requests=2)
    with running_cluster(long_llama, [(hosts[0], settings)]) as cluster:
        body = {"model": "test-model", "prompt": [5, 6, 7], "ignore_eos": True}
        long = {**body, "max_tokens": 8000, "stream": True}
        with ExitStack() as running:
            streams = [
                running.enter_context(cluster.http.stream("POST", "/v1/completions", json=long))
                for _ in range(2)
            ]
            lines = [stream.iter_lines() for stream in streams]  # a dropped one closes its stream
            for line in lines:
                next(line)
            refused = cluster.http.post("/v1/completions", json={**body, "max_tokens": 4})
        assert refused.status_code == 429, refused.text
        assert refused.json()["error"]["code"] == "slots_exhausted"
        assert int(refused.headers["retry-after"]) >= 1
        assert float(refused.headers["retry-after-ms"]) > 0


def test_what_can_never_fit_is_invalid_and_names_the_limit(split: Cluster) -> None:
    body = {"model": "test-model", "prompt": [5] * 1100, "max_tokens": 4}
    response = split.http.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "1024" in response.json()["error"]["message"]
    assert "retry-after" not in response.headers


def test_the_limit_is_what_the_workers_memory_holds(
    llama: Path, hosts: tuple[WorkerHost, WorkerHost]
) -> None:
    """KV for 192 tokens, in a model made for 1,024."""
    settings = worker_settings("tiny-0", Role.BOTH, llama, kv_memory_bytes=kv_bytes(llama, 192))
    with running_cluster(llama, [(hosts[0], settings)]) as cluster:
        body = {"model": "test-model", "prompt": [5] * 150, "ignore_eos": True}
        response = cluster.http.post("/v1/completions", json={**body, "max_tokens": 43})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert "192" in response.json()["error"]["message"]
        whole = cluster.completion([5] * 150, max_tokens=42, ignore_eos=True)
        assert whole["usage"]["total_tokens"] == 192


def test_the_ledger_sums_to_what_the_client_saw(split: Cluster) -> None:
    """Never more than that, and of one and the same request within 5 %: both the whole and the
    time to first token. A busy machine delays the client, which is in no phase."""
    ratios: list[tuple[float, float]] = []
    for i in range(LEDGERS):
        ratios.append(ledger_ratios(split, [11 + i] * 900))  # of which nothing is cached
        assert max(ratios[-1]) <= 1.0, "a phase is counted twice"
        if min(ratios[-1]) > 0.95:
            return
    raise AssertionError(f"of the whole, and to the first token: {ratios}")


def ledger_ratios(cluster: Cluster, prompt: list[int]) -> tuple[float, float]:
    """What the ledger tells of the whole time and of that to the first token, as parts of what
    the client saw."""
    body = {"model": "test-model", "prompt": prompt, "max_tokens": 100, "stream": True}
    body |= {"ignore_eos": True}
    headers = {"x-kvrelay-ledger": "1"}
    started_s = time.perf_counter()
    with cluster.http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        lines = response.iter_lines()
        next(line for line in lines if line.startswith("data: {"))
        ttft_ms = 1000 * (time.perf_counter() - started_s)
        ledger = ledger_in(lines)
    total_ms = 1000 * (time.perf_counter() - started_s)
    assert "other" not in ledger
    names = list(ledger)
    until_first = names[: names.index("first_token_return") + 1]
    return sum(ledger.values()) / total_ms, sum(ledger[name] for name in until_first) / ttft_ms


def ledger_in(lines: Iterator[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for line in lines:
        if line.startswith("data: {"):
            found = (
                json.loads(line.removeprefix("data: ")).get("kvrelay", {}).get("ledger_ms", found)
            )
    return found


def test_no_workers_is_no_capacity(llama: Path) -> None:
    with running_cluster(llama, []) as cluster:
        assert cluster.http.get("/health").status_code == 200
        assert cluster.http.get("/ready").status_code == 503
        body = {"model": "test-model", "prompt": [5], "max_tokens": 4}
        response = cluster.http.post("/v1/completions", json=body)
        assert response.status_code == 503, response.text
        assert response.json()["error"]["code"] == "no_capacity"


@pytest.mark.parametrize(
    ("role", "how"),
    [
        (Role.PREFILL, signal.SIGKILL),
        (Role.DECODE, signal.SIGKILL),
        (Role.DECODE, signal.SIGSTOP),
    ],
)
def test_a_worker_that_dies_or_hangs_costs_no_token(
    llama: Path, role: Role, how: signal.Signals
) -> None:
    """In mid-stream: the request goes on elsewhere, without a gap or a repeat."""
    prompt = prompts(1, 200)[0]
    other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
    with WorkerHost() as steady, WorkerHost() as doomed, WorkerHost() as spare:
        with running_cluster(llama, [(steady, worker_settings("steady", other, llama))]) as cluster:
            cluster.add(doomed, worker_settings("doomed", role, llama))
            found = stream_with_a_death(cluster, prompt, doomed, spare, role, llama, how)
            wait_until(lambda: len(cluster.kv()) == 2, "the dead worker is gone")
            doomed.kill()
            views = cluster.router.process.dispatcher.core.state.workers.values()
            drawn = sum(view.counters.generated_tokens for view in views)
        assert_same_tokens(generate_reference(load(llama), prompt, tokens=LONG), found)
        assert role is Role.PREFILL or drawn < LONG - 4, "what was delivered was drawn again"


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0, "seed": 11},
        {"temperature": 0.9, "seed": 2, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
        {"temperature": 0, "logprobs": 2},
    ],
    ids=["seeded", "penalised", "logprobs"],
)
def test_what_is_resumed_is_drawn_as_if_nothing_had_died(
    llama: Path, fields: dict[str, Any]
) -> None:
    prompt = prompts(1, 200)[0]
    with WorkerHost() as first, WorkerHost() as doomed, WorkerHost() as spare:
        workers = [(first, worker_settings("steady", Role.PREFILL, llama))]
        with running_cluster(llama, workers) as cluster:
            cluster.add(doomed, worker_settings("doomed", Role.DECODE, llama))
            undisturbed = ask_all(cluster, [prompt], **fields, max_tokens=LONG)[0]
            found = stream_with_a_death(
                cluster, prompt, doomed, spare, Role.DECODE, llama, **fields
            )
    assert found == undisturbed


def test_each_choice_goes_on_behind_its_own_tokens(llama: Path) -> None:
    """Three choices of one request, whose decode worker is killed in mid-stream."""
    prompt, fields = prompts(1, 200)[0], {"temperature": 1.0, "seed": 11, "n": 3}
    with WorkerHost() as first, WorkerHost() as doomed, WorkerHost() as spare:
        workers = [(first, worker_settings("steady", Role.PREFILL, llama))]
        with running_cluster(llama, workers) as cluster:
            cluster.add(doomed, worker_settings("doomed", Role.DECODE, llama))
            body = {"model": "test-model", "prompt": prompt, "max_tokens": LONG, **fields}
            body |= {"ignore_eos": True, "return_token_ids": True}
            answer = cluster.http.post("/v1/completions", json=body).json()["choices"]
            undisturbed = {one["index"]: one["token_ids"] for one in answer}
            found = choices_with_a_death(
                cluster, prompt, doomed, spare, Role.DECODE, llama, **fields
            )
            (view,) = [
                view
                for view in cluster.router.process.dispatcher.core.state.workers.values()
                if view.hello.name == "spare"
            ]
            drawn = view.counters.generated_tokens
    assert found == undisturbed
    assert 0 < drawn < 3 * LONG - 4, "what was delivered was drawn again"


def stream_with_a_death(
    cluster: Cluster,
    prompt: list[int],
    doomed: WorkerHost,
    spare: WorkerHost,
    role: Role,
    llama: Path,
    how: signal.Signals = signal.SIGKILL,
    **fields: Any,
) -> list[int]:
    return choices_with_a_death(cluster, prompt, doomed, spare, role, llama, how, **fields)[0]


def choices_with_a_death(
    cluster: Cluster,
    prompt: list[int],
    doomed: WorkerHost,
    spare: WorkerHost,
    role: Role,
    llama: Path,
    how: signal.Signals = signal.SIGKILL,
    **fields: Any,
) -> dict[int, list[int]]:
    """# choice |-> its tokens"""
    its_address = spare.start(worker_settings("spare", role, llama))
    body = {"model": "test-model", "prompt": prompt, "max_tokens": LONG, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True, "return_token_ids": True, **fields}
    found: dict[int, list[int]] = {}
    is_well = True
    with cluster.http.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            for choice, token_ids in tokens_of(line):
                found.setdefault(choice, []).extend(token_ids)
            if sum(map(len, found.values())) >= 5 and is_well:
                is_well = False
                cluster.join(its_address, "spare")
                os.kill(doomed.pid, how)
    return found


def tokens_of(line: str) -> list[tuple[int, list[int]]]:
    """(choice, tokens)"""
    if not line.startswith("data: {"):
        return []
    choices = json.loads(line.removeprefix("data: "))["choices"]
    return [(choice["index"], choice.get("token_ids") or []) for choice in choices]
