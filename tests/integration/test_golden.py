"""Prefill and decode on two workers give the tokens of one worker that does both: over a covering
array of settings, and of what happens to requests meanwhile. Everything is computed in fp32."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvrelay.types import Incarnation, Role
from router.core import migration
from router.core.core import RouterCore
from router.core.policy.choice import Policies
from router.core.router_state import MoveCause
from tests.integration.covering import Row, all_pairs, covering_rows, pairs_of
from tests.integration.split_kit import (
    PATIENCE_S,
    Cluster,
    WorkerHost,
    running_cluster,
    wait_until,
    worker_settings,
)
from tests.integration.test_cluster_life import kv_bytes, load, preemptions
from tests.integration.test_handoff_exact import prompts
from tests.reference import assert_same_tokens, generate_reference

SEED = 1
"""Of the covering array: it is in each test's name."""
LENGTHS = [1, 31, 65, 200, 230]
TOKENS = 240
LONGEST = 1024
FEW_TOKENS = 800
"""The KV memory of a decode worker that some of the requests have to leave."""
ABORTED, SOME = 4, 8
LONG_PROMPT = 700


class Event(StrEnum):
    NONE = "nothing"
    ABORT_PREFILL = "abort in prefill"
    ABORT_DECODE = "abort in decode"
    PREEMPTION = "preemption"
    MOVE = "move"
    RESUME = "resume"


OVERFLOWS = (Event.PREEMPTION, Event.MOVE)


ENDLESS = {
    "type": "array",
    "items": {
        "anyOf": [{"type": "integer"}, {"enum": ["yes", "no"]}, {"type": "string", "maxLength": 9}]
    },
    "minItems": 400,
}
"""No answer ends by itself within its tokens."""
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 4, "frequency_penalty": 0.5},
    "grammar": {"temperature": 1.0, "seed": 4, "structured_outputs": {"json": ENDLESS}},
}
FACTORS: dict[str, Sequence[object]] = {
    "event": [*Event],
    "transport": ["shm", "nixl"],
    "handoff": ["push", "pull"],
    "chunk_tokens": [16, 96],
    "prefill_block": [8, 32],
    "decode_block": [16, 32],
    "choices": [1, 2],
    "sampling": [*SAMPLING],
    "prefix_caching": [True, False],
}
ROWS = covering_rows(FACTORS, SEED)
Answers = list[list[list[int]]]
"""# request |-> choice |-> token ids"""


def name_of(row: Row) -> str:
    return f"seed{SEED}-" + "-".join(f"{value}".replace(" ", "_") for value in row.values())


def test_every_pair_of_levels_is_in_some_row() -> None:
    found = set().union(*map(pairs_of, ROWS))
    assert found == all_pairs(FACTORS)
    assert len(ROWS) <= 24, "each row starts a cluster"


@dataclass(frozen=True, slots=True)
class Asked:
    """Requests that differ only by their prompts."""

    sampling: str
    choices: int

    @property
    def fields(self) -> dict[str, Any]:
        plain = {"max_tokens": TOKENS, "ignore_eos": True, "n": self.choices}
        return plain | SAMPLING[self.sampling]

    def of(self, cluster: Cluster, prompt: list[int]) -> list[list[int]]:
        """As a client asks that comes back when it is told to."""
        body = {"model": "test-model", "prompt": prompt, "return_token_ids": True, **self.fields}
        while True:
            response = cluster.http.post("/v1/completions", json=body)
            if response.status_code != 429:
                break
            threading.Event().wait(float(response.headers["retry-after-ms"]) / 1000)
        assert response.status_code == 200, response.text
        choices = sorted(response.json()["choices"], key=lambda choice: choice["index"])
        return [choice["token_ids"] for choice in choices]


@pytest.fixture(scope="module")
def golden(llama: Path, hosts: tuple[WorkerHost, WorkerHost]) -> dict[Asked, Answers]:
    """From one worker that does both, one request at a time."""
    settings = worker_settings("both-0", Role.BOTH, llama, prefix_caching=False)
    with running_cluster(llama, [(hosts[0], settings)]) as cluster:
        return {
            asked: [asked.of(cluster, prompt) for prompt in prompts(LENGTHS)]
            for sampling in SAMPLING
            for asked in (Asked(sampling, 1), Asked(sampling, 2))
        }


@pytest.fixture(scope="module")
def third_host() -> Iterator[WorkerHost]:
    with WorkerHost() as host:
        yield host


def test_one_process_has_the_tokens_of_transformers(
    llama: Path, golden: dict[Asked, Answers]
) -> None:
    model = load(llama)
    for prompt, (ids,) in zip(prompts(LENGTHS), golden[Asked("greedy", 1)], strict=True):
        assert_same_tokens(generate_reference(model, prompt, tokens=TOKENS), ids)


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_split_equals_one_process(
    row: Row,
    llama: Path,
    hosts: tuple[WorkerHost, WorkerHost],
    third_host: WorkerHost,
    golden: dict[Asked, Answers],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    event, asked = Event(str(row["event"])), Asked(str(row["sampling"]), int(str(row["choices"])))
    policies = _moving(monkeypatch) if event is Event.MOVE else Policies(local_prefill=False)
    plain = {
        "transports": (row["transport"],),
        "handoff": row["handoff"],
        "prefill_chunk_tokens": row["chunk_tokens"],
        "prefix_caching": row["prefix_caching"],
        "max_model_len": LONGEST,
    }
    prefill = plain | {"block_size": row["prefill_block"]}
    decode = plain | {"block_size": row["decode_block"]}
    small = decode
    if event in OVERFLOWS:
        small = decode | {"kv_memory_bytes": kv_bytes(llama, FEW_TOKENS), "max_model_len": 480}
    workers = [(hosts[0], worker_settings("prefill", Role.PREFILL, llama, **prefill))]
    if event in (Event.MOVE, Event.RESUME):
        workers.append((third_host, worker_settings("other", Role.DECODE, llama, **decode)))
    with running_cluster(llama, workers, policies=policies) as cluster:
        worker = worker_settings("decode", Role.DECODE, llama, **small)
        with WorkerHost() if event is Event.RESUME else nullcontext(hosts[1]) as host:
            address = cluster.add(host, worker)
            found = _ask_during(event, cluster, asked, host)
            cluster.assert_clean()
            host.stop(address)
    assert found == golden[asked]


def _moving(monkeypatch: pytest.MonkeyPatch) -> Policies:
    """They are looked for early and often, and whatever the workers' times are."""
    monkeypatch.setattr(migration, "PRESSED", 0.1)
    monkeypatch.setattr(migration, "LOOK_S", 0.0)
    monkeypatch.setattr(migration, "WORTH", inf)
    return Policies(admission="none", move_hot_spots=True, local_prefill=False)


def _ask_during(event: Event, cluster: Cluster, asked: Asked, host: WorkerHost) -> Answers:
    """The answers to all prompts, which are asked for at once."""
    core = cluster.router.process.dispatcher.core
    views = {view.hello.name: view for view in core.state.workers.values()}
    if event is Event.MOVE:
        views["other"].draining = True
    with ThreadPoolExecutor(len(LENGTHS)) as pool:
        running = [pool.submit(asked.of, cluster, prompt) for prompt in prompts(LENGTHS)]
        if event in (Event.ABORT_PREFILL, Event.ABORT_DECODE):
            _abort(cluster, asked, after_token=event is Event.ABORT_DECODE)
        elif event is Event.MOVE:
            wait_until(lambda: views["decode"].counters.decode_sequences > 2, "some decode")
            views["other"].draining = False
        elif event is Event.RESUME:
            doomed = views["decode"].incarnation
            wait_until(lambda: cluster.router.read(lambda: _decodes(core, doomed)), "one decodes")
            host.kill()
            wait_until(lambda: cluster.router.read(lambda: _has_resumed(core)), "one goes on")
        found = [one.result() for one in running]
    if event is Event.PREEMPTION:
        assert preemptions(cluster) > 0
    if event is Event.MOVE and asked.choices == 1:
        assert core.state.moves.moved[MoveCause.HOT_SPOT] > 0
    return found


def _decodes(core: RouterCore, worker: Incarnation) -> bool:
    """A request has some of its tokens from this worker."""
    requests = core.state.requests.values()
    there = (one for one in requests if one.placement and one.placement.decode == worker)
    return any(len(choice.delivered) > SOME for one in there for choice in one.choices)


def _has_resumed(core: RouterCore) -> bool:
    return any(one.emitted_ids or any(one.resumed) for one in core.state.requests.values())


def _abort(cluster: Cluster, asked: Asked, *, after_token: bool) -> None:
    """Clients that go away, with long prompts of their own."""
    requests = cluster.router.process.dispatcher.core.state.requests
    url = httpx.URL(cluster.http_url)
    for prompt in prompts([LONG_PROMPT] * ABORTED):
        known = {*cluster.router.read(lambda: [*requests])}
        with socket.create_connection((url.host, url.port)) as client:
            client.sendall(_post({"prompt": prompt, "stream": True, **asked.fields}))
            if after_token:
                _read_until(client, b"data: {")
            else:
                _wait_for_another(cluster, known)


def _wait_for_another(cluster: Cluster, known: set[str]) -> None:
    requests = cluster.router.process.dispatcher.core.state.requests
    wait_until(lambda: bool({*cluster.router.read(lambda: [*requests])} - known), "it is known")


def _post(fields: dict[str, Any]) -> bytes:
    body = json.dumps({"model": "test-model", **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + b"content-type: application/json\r\n\r\n" + body


def _read_until(client: socket.socket, wanted: bytes) -> None:
    client.settimeout(PATIENCE_S)
    found = b""
    while wanted not in found:
        more = client.recv(65536)
        assert more, found
        found += more
