"""A decode worker that drains, in real processes: what it runs goes on elsewhere with the same
tokens, several answers to one prompt too, and it is empty long before the answers end."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from kvrelay.types import Role
from router.core.policy.choice import Policies
from router.core.router_state import MoveCause
from router.core.state.story import Moment
from tests.integration.split_kit import (
    Cluster,
    RouterThread,
    WorkerHost,
    running_cluster,
    wait_until,
    worker_settings,
)
from tests.integration.test_cluster_life import prompts

UNLIMITED = Policies(admission="none", local_prefill=False)
FOR_EVER_S = 1e6
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0},
    {"temperature": 1.0, "seed": 4, "frequency_penalty": 0.5},
    {"temperature": 1.0, "seed": 5, "n": 3, "presence_penalty": 0.5},
    {"temperature": 0, "n": 2},
)


def answers(cluster: Cluster, kind: int, prompt: list[int]) -> list[list[int]]:
    given = {"max_tokens": 900, "ignore_eos": True, **KINDS[kind]}
    return [one["token_ids"] for one in cluster.completion(prompt, **given)["choices"]]


def views(cluster: Cluster) -> dict[str, Any]:
    workers = cluster.router.process.dispatcher.core.state.workers
    return {view.hello.name: view for view in workers.values()}


def fill(cluster: Cluster, pool: ThreadPoolExecutor, asked: list[list[int]]) -> list[Any]:
    """All decode at the worker that is to leave."""
    views(cluster)["stays"].draining = True
    running = [pool.submit(answers, cluster, kind, p) for kind, p in enumerate(asked)]
    state = cluster.router.process.dispatcher.core.state
    choices = sum(kind.get("n", 1) for kind in KINDS)

    def all_decode() -> bool:
        emitted = [len(c.delivered) for one in [*state.requests.values()] for c in one.choices]
        return len(emitted) == choices and all(emitted)

    wait_until(all_decode, "all decode")
    views(cluster)["stays"].draining = False
    return running


def test_what_a_worker_decodes_leaves_it_and_has_the_same_tokens(
    llama: Path, hosts: tuple[WorkerHost, WorkerHost]
) -> None:
    """The requests of two routers."""
    workers = [
        (hosts[0], worker_settings("prefill", Role.PREFILL, llama)),
        (hosts[0], worker_settings("stays", Role.DECODE, llama)),
    ]
    asked = prompts(len(KINDS), 60)
    with running_cluster(llama, workers, policies=UNLIMITED) as cluster:
        stayed = [answers(cluster, kind, prompt) for kind, prompt in enumerate(asked)]
        leaves = cluster.add(hosts[1], worker_settings("leaves", Role.DECODE, llama))
        second = RouterThread(llama, policies=UNLIMITED)
        url = f"http://127.0.0.1:{second.address.public.http}"
        with (
            httpx.Client(base_url=url, timeout=60) as http,
            ThreadPoolExecutor(2 * len(KINDS)) as pool,
        ):
            other = Cluster(second, http)
            for address in [view.address for view in cluster.router.workers()]:
                other.join(address, address)
            running = [*fill(cluster, pool, asked), *fill(other, pool, asked)]
            began_s = time.monotonic()
            hosts[1].stop(leaves, drain_s=FOR_EVER_S)
            took_s = time.monotonic() - began_s
            ended = sum(one.done() for one in running)
            assert [one.result() for one in running] == [*stayed, *stayed]
            whole_s = time.monotonic() - began_s
            print(f"empty after {took_s:.2f} s; the answers ended after {whole_s:.2f} s")
            assert ended == 0, "it waited for no answer"
            for state in [c.router.process.dispatcher.core.state for c in (cluster, other)]:
                moved = state.moves.moved
                assert moved[MoveCause.LEAVING] == len(KINDS), "several answers move together"
                moments = [e.moment for one in state.stories._served.values() for e in one.events]
                assert Moment.TRIED_AGAIN not in moments
        second.close()
