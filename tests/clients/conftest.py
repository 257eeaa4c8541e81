"""One real cluster with the bundled model, whose tokenizer and chat template are real ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.bundled import checkpoint_path
from tests.integration.split_kit import Cluster, WorkerHost, running_cluster, split_workers


@pytest.fixture(scope="session")
def bundled() -> Iterator[Cluster]:
    model = checkpoint_path()
    with WorkerHost() as first, WorkerHost() as second:
        workers = split_workers((first, second), model, compile="off")
        with running_cluster(model, workers) as cluster:
            yield cluster
