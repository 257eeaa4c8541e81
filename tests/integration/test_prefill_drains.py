"""A prefill worker that stops under load: it empties, though requests keep coming."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvrelay.types import Role
from tests.integration.split_kit import (
    Cluster,
    WorkerHost,
    running_cluster,
    wait_until,
    worker_settings,
)
from tests.integration.test_cluster_life import ask_all, prompts

FOR_EVER_S = 1e6
CLIENTS = 12


def keep_asking(cluster: Cluster, client: int, enough: threading.Event) -> int:
    """Long prompts, none of which is idle for long, until it is enough, and then once more."""
    asked = prompts(40, 900, seed=client)
    answers, last = 0, False
    while not last:
        last = enough.is_set()
        (ids,) = ask_all(cluster, [asked[answers % len(asked)]], max_tokens=1)
        assert len(ids) == 1
        answers += 1
    return answers


def test_a_prefill_worker_drains_while_requests_keep_coming(
    llama: Path, hosts: tuple[WorkerHost, WorkerHost]
) -> None:
    workers = [
        (hosts[0], worker_settings("prefill-0", Role.PREFILL, llama)),
        (hosts[1], worker_settings("decode-0", Role.DECODE, llama)),
    ]
    with running_cluster(llama, workers) as cluster, ThreadPoolExecutor(CLIENTS) as pool:
        address = cluster.add(hosts[1], worker_settings("leaves", Role.PREFILL, llama))
        views = cluster.router.process.dispatcher.core.state.workers.values()
        view = next(one for one in views if one.hello.name == "leaves")
        enough = threading.Event()
        answers = [pool.submit(keep_asking, cluster, i, enough) for i in range(CLIENTS)]
        wait_until(lambda: view.counters.prefill_waiting_tokens > 0, "prompts wait on it")
        try:
            hosts[1].stop(address, drain_s=FOR_EVER_S)
        finally:
            enough.set()
        assert view.draining, "the router heard of it"
        assert all(answer.result() > 0 for answer in answers)
        assert [worker.name for worker in cluster.router.workers()] == ["prefill-0", "decode-0"]
