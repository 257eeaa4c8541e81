"""A copy that moves nothing while all processes live is told, and made again another way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.family.build import load_model
from engine.model.checkpoint import open_checkpoint
from kvrelay.types import Role
from tests.integration.split_kit import Cluster, WorkerHost, running_cluster, worker_settings
from tests.integration.test_handoff_exact import TOKENS, ask, check, prompts
from tests.models import random_checkpoint
from tests.reference import generate_reference

LENGTHS = [65, 300, 16]
FAST_S = 2.0
"""Of a request that no copy holds up; a copy's limit is longer."""


@pytest.fixture
def own_hosts() -> Iterator[tuple[WorkerHost, WorkerHost]]:
    """Processes whose copies no other test needs."""
    with WorkerHost() as first, WorkerHost() as second:
        yield first, second


def transports(cluster: Cluster) -> set[str]:
    return {link.transport for worker in cluster.router.workers() for link in worker.links}


def test_a_stalled_copy_is_made_again_over_the_next_transport(
    own_hosts: tuple[WorkerHost, WorkerHost], tmp_path: Path
) -> None:
    """The first request waits for the limit of a copy, the next ones don't."""
    model = random_checkpoint(tmp_path / "llama", "llama")
    loaded = load_model(open_checkpoint(str(model)), device="cpu", dtype="float32")
    asked = prompts(LENGTHS)
    references = [generate_reference(loaded, prompt, tokens=TOKENS) for prompt in asked]
    prefill, decode = own_hosts
    both = ("nixl", "shm")
    workers = [
        (prefill, worker_settings("prefill-0", Role.PREFILL, model, transports=both)),
        (decode, worker_settings("decode-0", Role.DECODE, model, transports=both)),
    ]
    prefill.stall()
    with running_cluster(model, workers) as cluster:
        answers, took_s = [], []
        for prompt in asked:
            started_s = time.monotonic()
            answers.append(ask(cluster, prompt))
            took_s.append(time.monotonic() - started_s)
        check(answers, references)
        assert transports(cluster) == {"shm"}
        assert max(took_s[1:]) < FAST_S < took_s[0]
