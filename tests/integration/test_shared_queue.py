"""Prompts in one queue at the router, for two real prefill workers, one of which dies."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvrelay.messages import Prefill, ToWorker
from kvrelay.types import Role
from router.core.policy.choice import Policies
from router.core.shared_queue import is_free
from router.live.link import WorkerLink
from tests.integration.split_kit import (
    PATIENCE_S,
    Cluster,
    WorkerHost,
    running_cluster,
    wait_until,
    worker_settings,
)
from tests.integration.test_cluster_life import TOKENS, ask_all, load, prompts
from tests.reference import assert_same_tokens, generate_reference

SHARED = Policies(admission="none", shared_queue=True, local_prefill=False)


def oldest_lease_s(cluster: Cluster) -> float:
    held = [one for worker in cluster.kv() for one in worker["held"]]
    return max((one["age_s"] for one in held if one["state"] == "leased"), default=0.0)


@contextmanager
def serving(llama: Path, doomed: WorkerHost, ttl_s: float = 30.0) -> Iterator[Cluster]:
    with WorkerHost() as steady, WorkerHost() as decode:
        workers = [
            (steady, worker_settings("steady", Role.PREFILL, llama)),
            (decode, worker_settings("decode", Role.DECODE, llama, lease_ttl_s=ttl_s)),
        ]
        with running_cluster(llama, workers, policies=SHARED) as cluster:
            cluster.add(doomed, worker_settings("doomed", Role.PREFILL, llama))
            yield cluster


def prefill_sent(link: WorkerLink, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once this worker is given a prompt."""
    send, sent = link.send, threading.Event()

    def hooked(message: ToWorker) -> None:
        send(message)
        if isinstance(message, Prefill):
            sent.set()

    monkeypatch.setattr(link, "send", hooked)
    return sent


def test_a_worker_that_is_killed_costs_no_token_and_holds_only_what_it_had(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prompts go on at the other one; those in the queue have not lost a moment."""
    asked = prompts(12, 600)
    with WorkerHost() as doomed, serving(llama, doomed) as cluster:
        links = cluster.router.process.dispatcher.attached.values()
        (link,) = [one for one in links if one.hello and one.hello.name == "doomed"]
        has_a_prompt = prefill_sent(link, monkeypatch)
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(ask_all, cluster, asked)
            assert has_a_prompt.wait(PATIENCE_S)
            doomed.kill()
            answers = found.result()
        wait_until(lambda: len(cluster.kv()) == 2, "the dead worker is gone")
    model = load(llama)
    for prompt, tokens in zip(asked, answers, strict=True):
        assert_same_tokens(generate_reference(model, prompt, tokens=TOKENS), tokens)


def test_what_waits_at_the_router_keeps_its_place_at_the_decode_worker(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No prefill worker is free for longer than leases last."""
    asked, busy = prompts(6, 600), threading.Event()
    monkeypatch.setattr(
        "router.core.shared_queue.is_free", lambda worker: is_free(worker) and not busy.is_set()
    )
    with WorkerHost() as other, serving(llama, other, ttl_s=2.0) as cluster:
        core = cluster.router.process.dispatcher.core
        busy.set()
        first = next(core.state.attempts)
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(ask_all, cluster, asked)
            wait_until(lambda: oldest_lease_s(cluster) > 4.5, "leases would be over")
            assert core.state.dispatch.waiting == 6
            busy.clear()
            answers = found.result()
        assert all(len(tokens) == TOKENS for tokens in answers)
        assert next(core.state.attempts) == first + 7, "none was tried again"
