"""A decode worker that would overflow, in real processes: a request leaves it, with its tokens."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from math import inf
from pathlib import Path
from typing import Any

import pytest

from kvrelay.types import Role
from router.core import migration
from router.core.policy.choice import Policies
from router.core.router_state import MoveCause
from tests.integration.split_kit import WorkerHost, running_cluster, wait_until, worker_settings
from tests.integration.test_cluster_life import ask_all, kv_bytes, prompts

MOVES = Policies(admission="none", move_hot_spots=True, local_prefill=False)


@pytest.mark.parametrize(
    "fields",
    [{"temperature": 0}, {"temperature": 1.0, "seed": 4, "frequency_penalty": 0.5}],
    ids=["greedy", "seeded"],
)
def test_a_moved_request_has_the_tokens_of_one_that_stayed(
    llama: Path,
    hosts: tuple[WorkerHost, WorkerHost],
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any],
) -> None:
    """Memory for 1,500 tokens, two that want 1,800: the other worker opens when both run. It is
    looked for early and often, and whatever the workers' times are."""
    monkeypatch.setattr(migration, "PRESSED", 0.1)
    monkeypatch.setattr(migration, "LOOK_S", 0.0)
    monkeypatch.setattr(migration, "WORTH", inf)
    asked = prompts(2, 60)
    fields = {**fields, "max_tokens": 900}
    small = worker_settings("small", Role.DECODE, llama, kv_memory_bytes=kv_bytes(llama, 1500))
    workers = [
        (hosts[0], worker_settings("prefill", Role.PREFILL, llama)),
        (hosts[1], small),
        (hosts[0], worker_settings("large", Role.DECODE, llama)),
    ]
    with running_cluster(llama, workers, policies=MOVES) as cluster:
        core = cluster.router.process.dispatcher.core
        views = {view.hello.name: view for view in core.state.workers.values()}
        stayed = [ask_all(cluster, [prompt], **fields)[0] for prompt in asked]
        assert not any(core.state.moves.moved.values())
        views["large"].draining = True
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(ask_all, cluster, asked, **fields)
            wait_until(lambda: views["small"].counters.decode_sequences == 2, "both decode")
            views["large"].draining = False
            assert found.result() == stayed
        assert core.state.moves.moved[MoveCause.HOT_SPOT] > 0
