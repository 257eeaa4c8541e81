"""Roles of real workers follow what clients ask for, though most of it is refused."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from threading import Event, Thread

import httpx
import yaml

from cluster.core.elastic.rules import RoleRules
from cluster.elastic.keeper import Keeper
from cluster.elastic.owners import ProcessesOfTheirOwn
from cluster.watch.latest import LatestReports
from kvrelay import Client, Slo
from kvrelay.errors import Refused
from kvrelay.types import Role
from tests.access import ACCESS, HEADERS
from tests.integration.split_kit import Cluster, WorkerHost, running_cluster, worker_settings
from tests.integration.test_cluster_life import ask_all, prompts

P, D = Role.PREFILL, Role.DECODE
SLOW = {
    "prefill_overhead_s": 0.0,
    "prefill_token_s": 1e-3,
    "prefill_pair_s": 0.0,
    "decode_knots": [[1, 0.1], [64, 0.2]],
    "decode_kv_token_s": 0.0,
}
"""Much slower than this machine: little traffic is more than four such workers could serve."""
RULES = RoleRules(window_s=3.0, dwell_s=2.0)
CLIENTS, WAIT_S = 8, 60.0
SOON = Slo(ttft_s=0.3)
"""An idle worker keeps it, by these times; one with a queue does not."""


@contextmanager
def offering(grpc_address: str, tokens: int, max_tokens: int) -> Iterator[None]:
    """More than these workers could serve, and so most of it is refused. No two prompts begin
    alike: one that was refused and comes back is no more work."""
    enough, numbers = Event(), count()

    def ask(client: Client) -> None:
        while not enough.is_set():
            number = next(numbers)
            prompt = [2 + number // 100, 2 + number % 100] * (tokens // 2)
            with suppress(Refused):
                client.generate(prompt, max_tokens=max_tokens, ignore_eos=True, slo=SOON)
            time.sleep(0.02)

    with Client(grpc_address) as client, ThreadPoolExecutor(CLIENTS) as pool:
        asking = [pool.submit(ask, client) for _ in range(CLIENTS)]
        try:
            yield
        finally:
            enough.set()
        assert [one.result() for one in asking] == [None] * CLIENTS


@contextmanager
def keeping(cluster: Cluster) -> Iterator[None]:
    at = cluster.internal_grpc
    owner = ProcessesOfTheirOwn(role_rules=RULES, routers=lambda: [at], access=ACCESS)
    keeper = Keeper(routers=lambda: [at], owner=owner, reports=LatestReports(ACCESS))
    thread = Thread(target=keeper.run)
    thread.start()
    try:
        yield
    finally:
        keeper.stop()
        thread.join()


def prefill_workers(cluster: Cluster) -> int:
    return sum(one.role is P for one in cluster.router.workers())


def wait_for(cluster: Cluster, count: int) -> None:
    until_s = time.monotonic() + WAIT_S
    while prefill_workers(cluster) != count:
        assert time.monotonic() < until_s, f"{prefill_workers(cluster)} prefill workers"
        time.sleep(0.05)


def test_roles_follow_what_is_asked_for(
    llama: Path, hosts: tuple[WorkerHost, WorkerHost], tmp_path: Path
) -> None:
    times = tmp_path / "times.yaml"
    times.write_text(yaml.safe_dump(SLOW))
    workers = [
        (hosts[number % 2], worker_settings(f"w{number}", role, llama, profile=str(times)))
        for number, role in enumerate((P, P, D, D))
    ]
    asked = prompts(2, 40)
    with running_cluster(llama, workers) as cluster:
        at, expected = cluster.grpc_address, ask_all(cluster, asked)
        with keeping(cluster):
            with offering(at, tokens=200, max_tokens=1):
                wait_for(cluster, 3)
            with offering(at, tokens=2, max_tokens=250):
                wait_for(cluster, 1)
            metrics = httpx.get(f"{cluster.internal_url}/metrics", headers=HEADERS).text
            assert "kvrelay:desired_workers{model_name" in metrics
            assert ask_all(cluster, asked) == expected
