"""A device that hangs: its worker ends by itself, and its requests go on elsewhere."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from cluster.worker.watchdog import EXIT_HUNG_STEP
from engine.family.build import load_model
from engine.model.checkpoint import open_checkpoint
from kvrelay.types import Role
from tests.integration.split_kit import WorkerHost, running_cluster, wait_until, worker_settings
from tests.integration.streams_kit import Streams
from tests.models import VOCAB_SIZE
from tests.reference import assert_same_tokens, generate_reference

TOKENS = 150
LEAST_S = 2.0
"""Instead of ten seconds."""


@pytest.mark.parametrize("role", [Role.DECODE, Role.PREFILL])
def test_a_worker_whose_step_hangs_ends_and_costs_no_token(llama: Path, role: Role) -> None:
    rng = random.Random(4)
    prompts = [[rng.randrange(2, VOCAB_SIZE) for _ in range(40)] for _ in range(4)]
    other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
    workers = [worker_settings(name, role, llama) for name in ("doomed", "spare")]
    with (
        WorkerHost() as steady,
        WorkerHost() as doomed,
        WorkerHost() as spare,
        running_cluster(llama, [(steady, worker_settings("steady", other, llama))]) as cluster,
    ):
        its_address, spares = cluster.add(doomed, workers[0]), spare.start(workers[1])
        cluster.completion(prompts[0], max_tokens=4)
        if role is Role.PREFILL:
            doomed.hang(its_address, least_s=LEAST_S)
        with Streams(cluster, prompts, TOKENS) as running:
            if role is Role.DECODE:
                running.wait_for(5)
                doomed.hang(its_address, least_s=LEAST_S)
            hung_s = time.monotonic()
            cluster.join(spares, "spare")
            wait_until(lambda: not doomed.process.is_alive(), "it ends by itself", 15.0)
            noticed_s = time.monotonic() - hung_s
        assert doomed.process.exitcode == EXIT_HUNG_STEP
        assert [one.error for one in running.streams] == [""] * len(prompts)
    print(f"noticed after {noticed_s:.1f} s, longest pause {longest_s(running):.1f} s")
    model = load_model(open_checkpoint(str(llama)), device="cpu", dtype="float32")
    for one in running.streams:
        expected = generate_reference(model, one.prompt, tokens=TOKENS)
        assert_same_tokens(expected, one.token_ids)


def longest_s(running: Streams) -> float:
    return max(one.longest_pause_s for one in running.streams)
