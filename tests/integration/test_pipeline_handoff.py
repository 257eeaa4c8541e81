"""Prefill workers of two stages in a live cluster: their KV goes to ranks that share heads. Aborts
leave nothing behind, and a stage that dies takes only its worker along."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from engine.family.build import load_model
from engine.model.checkpoint import open_checkpoint
from kvrelay import Client
from kvrelay.types import Role
from tests.integration.plain_kit import RouterAddresses, start_router
from tests.integration.ray_head import Marked, marked, until
from tests.integration.split_kit import (
    Cluster,
    WorkerHost,
    running_cluster,
    wait_until,
    worker_settings,
)
from tests.integration.test_handoff_exact import ask, check, prompts
from tests.integration.test_parallel_handoff import busy, rank_of, ranks_of, servers, start_worker
from tests.models import random_checkpoint
from tests.reference import generate_reference

TOKENS = 32
LENGTHS = [1, 16, 65, 200, 700]
CHUNK = 64
"""So the longest prompt has eleven chunks."""


@pytest.mark.parametrize(
    ("family", "prefill", "decode", "changes"),
    [
        ("llama", {"pipeline": 2}, {"tensor": 2}, {}),
        ("gemma2", {"pipeline": 2}, {}, {"handoff": "pull"}),
        pytest.param(
            *("llama", {"pipeline": 2, "tensor": 2}, {"pipeline": 2}, {}), marks=pytest.mark.long
        ),
    ],
    ids=["stages to ranks", "stages to one, pulled", "stages of ranks to stages"],
)
def test_stages_differ_and_tokens_do_not(
    family: str,
    prefill: dict[str, int],
    decode: dict[str, int],
    changes: dict[str, Any],
    hosts: tuple[WorkerHost, WorkerHost],
    tmp_path: Path,
) -> None:
    turns = ["sliding_attention", "full_attention"] * 2
    layers = {"layer_types": turns} if family == "gemma2" else {}
    model = random_checkpoint(tmp_path / family, family, num_hidden_layers=4, **layers)
    loaded = load_model(open_checkpoint(str(model)), device="cpu", dtype="float32")
    asked = prompts(LENGTHS)
    references = [generate_reference(loaded, prompt, tokens=TOKENS) for prompt in asked]
    common = {"prefill_chunk_tokens": CHUNK, "compile": "off", **changes}
    workers = [
        (hosts[0], worker_settings("prefill-0", Role.PREFILL, model, **threads(prefill), **common)),
        (hosts[1], worker_settings("decode-0", Role.DECODE, model, **threads(decode), **common)),
    ]
    with running_cluster(model, workers) as cluster:
        with ThreadPoolExecutor(len(asked)) as pool:
            together = list(pool.map(lambda prompt: ask(cluster, prompt, tokens=TOKENS), asked))
        again = ask(cluster, asked[-1], tokens=TOKENS)  # its beginning is cached now
        assert hits(cluster) >= 640
    check(together, references)
    check([again], references[-1:])
    assert not ranks_of(hosts), "they end with their workers"


def threads(grid: dict[str, int]) -> dict[str, int]:
    """One for each process."""
    return grid | {"cpu_threads": grid.get("pipeline", 1) * grid.get("tensor", 1)}


def hits(cluster: Cluster) -> float:
    """Prompt tokens that were in the prefill worker's cache."""
    of = r"(?m)^kvrelay:prefix_cache_hits_total\{.*prefill-0.*\} (\S+)$"
    return sum(map(float, re.findall(of, cluster.metrics())))


def test_aborts_leave_nothing_behind(hosts: tuple[WorkerHost, WorkerHost], tmp_path: Path) -> None:
    """Clients leave while some chunks of their prompts are in both stages."""
    model = random_checkpoint(tmp_path, "llama", num_hidden_layers=4)
    loaded = load_model(open_checkpoint(str(model)), device="cpu", dtype="float32")
    asked = prompts([700, 650, 600, 500])
    reference = generate_reference(loaded, asked[0], tokens=TOKENS)
    common = {"prefill_chunk_tokens": 16, "compile": "off", "prefix_caching": False}
    stages, ranks = threads({"pipeline": 2}), threads({"tensor": 2})
    workers = [
        (hosts[0], worker_settings("prefill-0", Role.PREFILL, model, **stages, **common)),
        (hosts[1], worker_settings("decode-0", Role.DECODE, model, **ranks, **common)),
    ]
    with running_cluster(model, workers) as cluster:
        for _ in range(5):
            leave(cluster, asked)
            cluster.assert_clean()
        check([ask(cluster, asked[0], tokens=TOKENS)], [reference])


def leave(cluster: Cluster, asked: list[list[int]]) -> None:
    """As soon as the prefill worker has begun one of them."""
    with ExitStack() as open_sockets:
        for prompt in asked:
            open_sockets.enter_context(send(cluster, prompt))
        wait_until(
            lambda: any(one["held"] for one in cluster.kv() if one["worker"] == "prefill-0"),
            "a prompt is being computed",
        )


def send(cluster: Cluster, prompt: list[int]) -> socket.socket:
    """Asks, and waits for no answer."""
    fields = {"model": "test-model", "prompt": prompt, "max_tokens": TOKENS}
    body = json.dumps(fields).encode()
    client = socket.create_connection(("127.0.0.1", cluster.router.address.public.http))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    client.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
    return client


@pytest.fixture
def here() -> Iterator[Marked]:
    with marked() as environment:
        yield environment
        until(lambda: not environment.processes())


def generate(router: RouterAddresses, number: int) -> tuple[int, ...]:
    text = " ".join(f"It was {number} and then {i}." for i in range(60))
    with Client(router.grpc, timeout_s=60) as client:
        answer = client.generate(text, max_tokens=20, ignore_eos=True, temperature=0.0)
    return answer.token_ids


def test_a_stage_that_dies_takes_its_worker_along_and_no_request(
    here: Marked, tmp_path: Path
) -> None:
    router, address = start_router(here, tmp_path / "router")
    logs = [tmp_path / f"prefill-{i}" for i in (0, 1)]
    prefill = [start_worker(here, address, "prefill", log, stages=2) for log in logs]
    decode = start_worker(here, address, "decode", tmp_path / "decode", tensor=2)
    until(lambda: len(servers(address)) == 3)
    expected = [generate(address, number) for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(generate, address, 4 + number) for number in range(12)]
        name = until(lambda: busy(address, "prefill"))
        (doomed,) = [number for number, one in enumerate(prefill) if name == f"prefill-{one.pid}"]
        rank_of(prefill[doomed]).kill()
        found = [one.result() for one in asked]
    assert prefill[doomed].wait(30) != 0
    said = logs[doomed].read_text()
    assert re.search("rank 1 has ended with exit code -9|a rank is gone", said), said
    assert [generate(address, number) for number in range(4)] == expected
    assert [generate(address, 4 + number) for number in range(12)] == found
    for process in (prefill[1 - doomed], decode, router):
        process.terminate()
        assert process.wait(30) == 0
