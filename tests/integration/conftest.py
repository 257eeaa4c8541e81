"""One real split cluster for all tests that only send requests to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.split_kit import Cluster, WorkerHost, running_cluster, split_workers
from tests.models import random_checkpoint

LONGEST = 8192


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="session")
def long_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights, for answers that last as long as a test looks at them."""
    folder = tmp_path_factory.mktemp("long-llama")
    return random_checkpoint(folder, "llama", max_position_embeddings=LONGEST)


@pytest.fixture(scope="session")
def hosts() -> Iterator[tuple[WorkerHost, WorkerHost]]:
    """Two processes that host whatever workers a test starts in them."""
    with WorkerHost() as first, WorkerHost() as second:
        yield first, second


@pytest.fixture(scope="session")
def split(llama: Path, hosts: tuple[WorkerHost, WorkerHost]) -> Iterator[Cluster]:
    """One prefill and one decode worker, in two processes."""
    with running_cluster(llama, split_workers(hosts, llama)) as cluster:
        yield cluster
