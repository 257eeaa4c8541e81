"""A client's x-request-id leads to its request; workers' activity gets to `kvrelay status`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.cli.status import kv
from kvrelay import Client
from tests.access import ACCESS
from tests.integration.split_kit import (
    Cluster,
    WorkerHost,
    running_cluster,
    split_workers,
    wait_until,
)

BODY = {"prompt": list(range(2, 60)), "max_tokens": 4000, "ignore_eos": True, "stream": True}
HEADERS = {"x-request-id": "my-trace-7"}
PREFIX = "cmpl-my-trace-7-"


def held(cluster: Cluster) -> set[str]:
    """Requests of this client that hold blocks."""
    found = kv.of_router(cluster.internal_grpc, ACCESS)
    ids = {held.request_id for worker in found.workers for held in worker.held}
    return {one for one in ids if one.startswith(PREFIX)}


@pytest.fixture
def cluster(long_llama: Path, hosts: tuple[WorkerHost, WorkerHost]) -> Iterator[Cluster]:
    with running_cluster(long_llama, split_workers(hosts, long_llama)) as cluster:
        yield cluster


def test_the_clients_request_id_is_in_the_kv_report_and_in_logs(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="router")
    first = cluster.http.stream("POST", "/v1/completions", json=BODY, headers=HEADERS)
    second = cluster.http.stream("POST", "/v1/completions", json=BODY, headers=HEADERS)
    with first as one, second as other:
        streams = [answer.iter_lines() for answer in (one, other)]
        for answer, lines in zip((one, other), streams, strict=True):
            assert answer.headers["x-request-id"] == "my-trace-7"
            next(lines)
        wait_until(lambda: len(held(cluster)) == 2, "both requests of this id hold blocks")

    def logged() -> set[str]:
        return {getattr(record, "request_id", "") for record in caplog.records}

    wait_until(lambda: len({i for i in logged() if i.startswith(PREFIX)}) == 2, "both are logged")


def test_status_tells_what_workers_do(cluster: Cluster) -> None:
    cluster.completion(list(range(2, 200)), max_tokens=64, ignore_eos=True)
    with Client(cluster.grpc_address) as client:

        def all_told() -> bool:
            prefill, decode = sorted(client.server_info().workers, key=lambda w: w.role)[::-1]
            return min(prefill.prompt_tokens_per_s, decode.generated_tokens_per_s) > 0

        wait_until(all_told, "both tell of their tokens")
        moved = [worker.transfer_bytes_per_s for worker in client.server_info().workers]
        assert min(moved) > 0
        for worker in client.server_info().workers:
            assert worker.kv_token_bytes > 0
            memory = {one.part: one.nbytes for one in worker.memory}
            assert memory.keys() >= {"weights", "staging", "KV"}
            tokens = worker.total_blocks * worker.block_size
            assert memory["KV"] == tokens * worker.kv_token_bytes
