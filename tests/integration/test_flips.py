"""Workers change their roles under load, in real processes: no request fails, and each has the
tokens of one that nobody disturbed."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from cluster.process.admin import NotKnown, NotPossible, drain, flip
from kvrelay.errors import ConfigError
from kvrelay.types import Role
from kvrelay.v1.admin_pb2 import ChangeRequest
from router.core.policy.choice import Policies
from tests.access import ACCESS
from tests.integration.split_kit import Cluster, WorkerHost, running_cluster, worker_settings
from tests.integration.test_cluster_life import ask_all, prompts

UNLIMITED = Policies(admission="none", local_prefill=False)
CLIENTS, FLIPS = 6, 20
P, D = Role.PREFILL, Role.DECODE


def keep_asking(
    cluster: Cluster, asked: list[list[int]], expected: list[list[int]], enough: Event
) -> int:
    """The number of answers, each of which is right."""
    answers = 0
    while not enough.is_set():
        at = answers % len(asked)
        assert ask_all(cluster, [asked[at]]) == [expected[at]]
        answers += 1
    return answers


def role_of(cluster: Cluster, worker: str) -> Role:
    return next(Role(one.role) for one in cluster.router.workers() if one.name == worker)


def wait_for_role(cluster: Cluster, worker: str, role: Role) -> float:
    """Seconds until the router goes by it."""
    began_s = time.monotonic()
    while role_of(cluster, worker) is not role:
        assert time.monotonic() < began_s + 30
        time.sleep(0.001)
    return time.monotonic() - began_s


def test_roles_change_under_load(llama: Path, hosts: tuple[WorkerHost, WorkerHost]) -> None:
    """Also when for a moment all are of one role."""
    names = ("a", "b", "c")
    workers = [
        (hosts[i % 2], worker_settings(name, role, llama))
        for i, (name, role) in enumerate(zip(names, (P, D, D), strict=True))
    ]
    asked = prompts(8, 200)
    with running_cluster(llama, workers, policies=UNLIMITED) as cluster:
        expected = [ask_all(cluster, [prompt])[0] for prompt in asked]
        enough, took_s = Event(), []
        with ThreadPoolExecutor(CLIENTS) as pool:
            told = [
                pool.submit(keep_asking, cluster, asked, expected, enough) for _ in range(CLIENTS)
            ]
            try:
                for number in range(FLIPS):
                    name = names[number % 3]
                    other = D if role_of(cluster, name) is P else P
                    flip(name, other, cluster.internal_grpc, ACCESS)
                    took_s.append(wait_for_role(cluster, name, other))
            finally:
                enough.set()
            assert all(one.result() > 0 for one in told)
        print(f"{FLIPS} flips, the slowest known after {1000 * max(took_s):.0f} ms")


def test_what_can_not_be_is_told(llama: Path, hosts: tuple[WorkerHost, WorkerHost]) -> None:
    half = worker_settings("half", D, llama, dtype="bfloat16", allow_mixed_precision=False)
    workers = [
        (hosts[0], worker_settings("first", Role.BOTH, llama, allow_mixed_precision=False)),
        (hosts[1], half),
    ]
    with running_cluster(llama, workers) as cluster:
        with pytest.raises(NotKnown, match="no worker is named x: there are first, half"):
            flip("x", P, cluster.internal_grpc, ACCESS)
        with pytest.raises(NotPossible, match="give both the same dtype"):
            flip("first", P, cluster.internal_grpc, ACCESS)
        with pytest.raises(ConfigError, match="not the internal gRPC address"):
            flip("first", P, cluster.grpc_address, ACCESS)
        assert role_of(cluster, "first") is Role.BOTH


def test_a_worker_that_is_drained_by_a_router_ends_by_itself(
    llama: Path, hosts: tuple[WorkerHost, WorkerHost]
) -> None:
    workers = [(hosts[0], worker_settings("stays", Role.BOTH, llama))]
    with running_cluster(llama, workers) as cluster:
        address = cluster.add(hosts[1], worker_settings("leaves", Role.BOTH, llama))
        asked = ChangeRequest(drain={"name": "leaves", "replace": True}, drain_s=30.0)
        drain(asked, cluster.internal_grpc, ACCESS, wait=True)
        assert [one.name for one in cluster.router.workers()] == ["stays"]
        hosts[1].stop(address)
        cluster.router.call(cluster.router.process.remove_worker(address))
