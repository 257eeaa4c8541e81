"""A request that kills each worker that computes it: it is refused, and no other one is harmed."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from engine.family.build import load_model
from engine.model.checkpoint import open_checkpoint
from kvrelay import Client
from kvrelay.errors import InvalidRequest
from kvrelay.types import Role
from tests.integration.split_kit import (
    Cluster,
    WorkerHost,
    running_cluster,
    wait_until,
    worker_settings,
)
from tests.integration.streams_kit import Streams
from tests.models import VOCAB_SIZE
from tests.reference import assert_same_tokens, generate_reference

TOKENS = 120
POISON = VOCAB_SIZE - 1
"""A token that no other prompt has."""
WORKERS = 3


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(4)
    return [[rng.randrange(2, POISON) for _ in range(40)] for _ in range(count)]


class Fleet:
    """Workers of one role that die of the poison."""

    def __init__(
        self, model: Path, cluster: Cluster, opened: ExitStack, role: Role, how: str
    ) -> None:
        self._model, self._cluster, self._opened = model, cluster, opened
        self._role, self._how = role, how
        self.hosts: list[WorkerHost] = []

    def add(self) -> None:
        host = self._opened.enter_context(WorkerHost())
        name = f"{self._role}-{len(self.hosts)}"
        address = host.start(worker_settings(name, self._role, self._model))
        host.poison(address, token=POISON, how=self._how)
        self._cluster.join(address, name)
        self._opened.callback(host.stop, address)
        self.hosts.append(host)

    @property
    def dead(self) -> int:
        return sum(not host.process.is_alive() for host in self.hosts)


@pytest.fixture
def fleet(llama: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Cluster, Fleet]]:
    role, how = request.param
    with ExitStack() as opened:
        decode = worker_settings("decode", Role.DECODE, llama)
        others = [(opened.enter_context(WorkerHost()), decode)] if role is Role.PREFILL else []
        cluster = opened.enter_context(running_cluster(llama, others))
        made = Fleet(llama, cluster, opened, role, how)
        for _ in range(WORKERS):
            made.add()
        yield cluster, made


DEATHS = [(Role.BOTH, "raises"), (Role.BOTH, "segfault"), (Role.PREFILL, "raises")]


@pytest.mark.parametrize("fleet", DEATHS, indirect=True)
def test_poison_kills_two_workers_and_its_neighbours_lose_nothing(
    fleet: tuple[Cluster, Fleet], llama: Path
) -> None:
    cluster, workers = fleet
    with Streams(cluster, prompts(9), TOKENS) as running:
        running.wait_for(5)
        began_s = time.monotonic()
        body = {"model": "test-model", "prompt": [7] * 20 + [POISON], "max_tokens": 20}
        response = cluster.http.post("/v1/completions", json=body)
        took_s = time.monotonic() - began_s
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (422, "poison"), response.text
    assert error["type"] == "invalid_request_error"
    assert "this request kills workers" in error["message"]
    wait_until(lambda: workers.dead == 2, "two have died")
    assert [one.error for one in running.streams] == [""] * len(running.streams)
    model = load_model(open_checkpoint(str(llama)), device="cpu", dtype="float32")
    for one in running.streams:
        expected = generate_reference(model, one.prompt, tokens=TOKENS)
        assert_same_tokens(expected, one.token_ids)
    metrics = cluster.metrics()
    assert 'kvrelay:requests_poison_total{model_name="test-model"} 1.0' in metrics
    assert workers.dead == 2
    pause_s = max(one.longest_pause_s for one in running.streams)
    print(f"refused after {took_s:.2f} s, longest pause of a neighbour {pause_s:.2f} s")


@pytest.mark.parametrize("fleet", [(Role.BOTH, "killed")], indirect=True)
def test_poison_that_looks_like_lack_of_memory_kills_three(fleet: tuple[Cluster, Fleet]) -> None:
    """Over gRPC."""
    cluster, workers = fleet
    workers.add()
    with Streams(cluster, prompts(4), TOKENS) as running:
        running.wait_for(5)
        with Client(cluster.grpc_address) as client, pytest.raises(InvalidRequest) as refused:
            client.generate([7] * 20 + [POISON], max_tokens=20)
    assert refused.value.code == "poison"
    assert workers.dead == 3
    assert [one.error for one in running.streams] == [""] * len(running.streams)
