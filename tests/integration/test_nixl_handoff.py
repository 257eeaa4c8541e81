"""Token-exact through the handoff over NIXL, whose peers share no memory."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.family.build import load_model
from engine.model.checkpoint import open_checkpoint
from kvrelay.types import Role
from tests.integration.split_kit import WorkerHost, running_cluster, worker_settings
from tests.integration.test_handoff_exact import TOKENS, ask, check, mapped_slabs, prompts
from tests.models import random_checkpoint
from tests.reference import generate_reference

LENGTHS = [1, 16, 65, 300]


@pytest.fixture
def own_hosts() -> Iterator[tuple[WorkerHost, WorkerHost]]:
    """Processes in which no other cluster has slabs."""
    with WorkerHost() as first, WorkerHost() as second:
        yield first, second


def test_split_equals_generate(own_hosts: tuple[WorkerHost, WorkerHost], tmp_path: Path) -> None:
    model = random_checkpoint(tmp_path / "llama", "llama")
    loaded = load_model(open_checkpoint(str(model)), device="cpu", dtype="float32")
    asked = prompts(LENGTHS)
    references = [generate_reference(loaded, prompt, tokens=TOKENS) for prompt in asked]
    workers = [
        (own_hosts[0], worker_settings("prefill-0", Role.PREFILL, model, transports=("nixl",))),
        (own_hosts[1], worker_settings("decode-0", Role.DECODE, model, transports=("nixl",))),
    ]
    with running_cluster(model, workers) as cluster, ThreadPoolExecutor(len(asked)) as pool:
        together = list(pool.map(lambda prompt: ask(cluster, prompt), asked))
        assert not mapped_slabs(own_hosts[0].pid) | mapped_slabs(own_hosts[1].pid)
    check(together, references)
