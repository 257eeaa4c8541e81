"""Prompts whose KV only the pool node of another host has: two nodes, each with a worker of its
own, that reach each other over nixl alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest

from cluster.core.settings import host_pool_address
from engine.family.build import load_model
from engine.model.checkpoint import open_checkpoint
from kvpool.core.layout.block_names import BlockNames
from kvrelay.types import Incarnation, RequestKey, Role
from router.core.load.prefill_queue import Ahead
from router.core.state.directory import Directory
from tests.access import OTHER_TOKEN, TOKEN, token_file
from tests.integration.pool_kit import Node
from tests.integration.split_kit import (
    Cluster,
    WorkerHost,
    running_cluster,
    wait_until,
    worker_settings,
)
from tests.models import VOCAB_SIZE, random_checkpoint
from tests.reference import assert_same_tokens, generate_reference

TOKENS = 20
ELSEWHERE = RequestKey("elsewhere", 0)


@pytest.fixture(scope="module")
def third() -> Iterator[WorkerHost]:
    with WorkerHost() as host:
        yield host


@contextmanager
def two_hosts(
    folder: Path,
    hosts: tuple[WorkerHost, WorkerHost],
    third: WorkerHost,
    tokens: tuple[bytes, bytes],
) -> Iterator[tuple[Cluster, list[Node]]]:
    """prefill-0 at the first node, with room for 16 blocks, and prefill-1 at the second."""
    names = [f"far-{uuid4().hex[:8]}" for _ in range(2)]
    nodes = []
    for name, token in zip(names, tokens, strict=True):
        options = ("--host-memory", "64MiB", "--transport", "nixl", "--token-file")
        nodes.append(Node(folder / name, name, *options, token_file(folder, token)))
    near, far = (host_pool_address(name) for name in names)
    common = {"transports": ("shm", "nixl")}
    first = worker_settings(
        "prefill-0", Role.PREFILL, folder, pool_address=near, kv_memory_bytes=2**17, **common
    )
    workers = [
        (hosts[0], first),
        (third, replace(first, name="prefill-1", pool_address=far)),
        (hosts[1], worker_settings("decode-0", Role.DECODE, folder, prefix_caching=False)),
    ]
    try:
        with running_cluster(folder, workers) as cluster:
            wait_until(lambda: all("joined" in node.text for node in nodes), "all have joined")
            for node in nodes:
                cluster.add_pool_node(node.grpc_address)
            yield cluster, nodes
    finally:
        for node in nodes:
            if node.is_alive:
                node.stop()


def prompt(seed: int, tokens: int = 100) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(2, VOCAB_SIZE) for _ in range(tokens)]


def ask(cluster: Cluster, worker: str, ids: list[int]) -> tuple[list[int], int]:
    """The other prefill worker seems busy."""

    async def book() -> None:
        for view in cluster.router.process.dispatcher.core.state.workers.values():
            if view.hello.role is Role.PREFILL:
                view.queue.remove(ELSEWHERE, 0.0)
                if view.hello.name != worker:
                    view.queue.add(ELSEWHERE, Ahead(seconds=1e9, tokens=10**6), 0.0)

    cluster.router.call(book())
    answer = cluster.completion(ids, max_tokens=TOKENS, temperature=0, ignore_eos=True)
    details = answer["usage"]["prompt_tokens_details"]
    return answer["choices"][0]["token_ids"], details["cached_tokens"]


def holders(cluster: Cluster, ids: list[int]) -> dict[Incarnation, int]:
    core = cluster.router.process.dispatcher.core
    hello = next(iter(core.state.workers.values())).hello
    names = BlockNames(fingerprint=hello.fingerprint, physical_format=hello.physical_format)
    chain = names.chain("", len(ids), hello.block_size)
    chain.extend(ids, len(ids))
    directory: Directory = core.state.directory
    return cluster.router.read(lambda: directory.longest(chain.full(len(ids))))


def in_pools(cluster: Cluster, ids: list[int]) -> int:
    """Pool nodes that hold all of it; no worker does."""
    workers = cluster.router.process.dispatcher.core.state.workers
    held = {h: blocks for h, blocks in holders(cluster, ids).items() if blocks == len(ids) // 16}
    return 0 if held.keys() & workers.keys() else len(held)


def metric(cluster: Cluster, name: str, worker: str) -> float:
    text = cluster.metrics()
    rows = [row for row in text.splitlines() if row.startswith(f"kvrelay:{name}")]
    return sum(float(row.rsplit(" ", 1)[1]) for row in rows if f'"{worker}"' in row)


def only_in_the_first_pool(cluster: Cluster, *prompts: list[int]) -> None:
    """What is asked for last drives them out of prefill-0."""
    for ids in (*prompts, prompt(98), prompt(99)):
        ask(cluster, "prefill-0", ids)
    for ids in prompts:
        wait_until(lambda ids=ids: in_pools(cluster, ids) == 1, "only the first pool holds it")


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_prefix_is_read_from_the_pool_of_another_host_and_kept_in_this_ones(
    family: str, tmp_path: Path, hosts: tuple[WorkerHost, WorkerHost], third: WorkerHost
) -> None:
    folder = random_checkpoint(tmp_path, family)
    model = load_model(open_checkpoint(str(folder)), device="cpu", dtype="float32")
    with two_hosts(folder, hosts, third, (TOKEN, TOKEN)) as (cluster, nodes):
        wanted = prompt(1)
        only_in_the_first_pool(cluster, wanted)
        tokens, cached = ask(cluster, "prefill-1", wanted)
        assert_same_tokens(generate_reference(model, wanted, tokens=TOKENS), tokens)
        assert cached == 96
        wait_until(lambda: metric(cluster, "pool_remote_hits", "prefill-1") == 96, "it is told")
        for other in (2, 3):
            ask(cluster, "prefill-1", prompt(other))
        wait_until(lambda: in_pools(cluster, wanted) == 2, "both pools hold it")
        assert "joined" in nodes[0].text
        cluster.assert_clean()


def test_without_the_node_it_is_computed(
    llama: Path, hosts: tuple[WorkerHost, WorkerHost], third: WorkerHost
) -> None:
    """It stops answering while it is asked; then it is killed."""
    model = load_model(open_checkpoint(str(llama)), device="cpu", dtype="float32")
    with two_hosts(llama, hosts, third, (TOKEN, TOKEN)) as (cluster, nodes):
        wanted = [prompt(seed) for seed in (1, 2)]
        only_in_the_first_pool(cluster, *wanted)
        nodes[0].suspend()
        for ids in wanted:
            tokens, cached = ask(cluster, "prefill-1", ids)
            assert_same_tokens(generate_reference(model, ids, tokens=TOKENS), tokens)
            assert cached < 96
            nodes[0].kill()
        assert metric(cluster, "pool_remote_hits", "prefill-1") == 0
        cluster.assert_clean()


def test_a_node_with_another_token_is_left_alone(
    llama: Path, hosts: tuple[WorkerHost, WorkerHost], third: WorkerHost
) -> None:
    """Its own host's workers use it, and routers hear nothing of it."""
    with two_hosts(llama, hosts, third, (OTHER_TOKEN, TOKEN)) as (cluster, nodes):
        wanted = prompt(1)
        for ids in (wanted, prompt(98), prompt(99)):
            ask(cluster, "prefill-0", ids)
        assert in_pools(cluster, wanted) == 0
        assert ask(cluster, "prefill-1", wanted)[1] < 96, "some are left at prefill-0"
        assert metric(cluster, "pool_remote_hits", "prefill-1") == 0
        assert nodes[0].text.count("joined (") == 1
        cluster.assert_clean()


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_handoff_between_hosts_comes_from_the_pool_node_of_the_prefill_worker(
    family: str, tmp_path: Path, hosts: tuple[WorkerHost, WorkerHost]
) -> None:
    """Each worker uses its own host's node. Of a prompt of whole blocks all is fetched."""
    folder = random_checkpoint(tmp_path, family)
    model = load_model(open_checkpoint(str(folder)), device="cpu", dtype="float32")
    with handoff_between_hosts(tmp_path, folder, hosts) as (cluster, nodes):
        for tokens in (1, 16, 100, 144):
            ids = prompt(tokens, tokens)
            answer = cluster.completion(ids, max_tokens=TOKENS, temperature=0, ignore_eos=True)
            expected = generate_reference(model, ids, tokens=TOKENS)
            assert_same_tokens(expected, answer["choices"][0]["token_ids"])
        there = 16 + 96 + 144
        wait_until(lambda: from_afar(cluster) == there, "all came from the other host")
        assert metric(cluster, "pool_remote_hits", "decode-0") > 0
        assert metric(cluster, "kv_transfers", "decode-0") == 0
        nodes[0].kill()
        ids = prompt(7)
        answer = cluster.completion(ids, max_tokens=TOKENS, temperature=0, ignore_eos=True)
        expected = generate_reference(model, ids, tokens=TOKENS)
        assert_same_tokens(expected, answer["choices"][0]["token_ids"])
        cluster.assert_clean()


def from_afar(cluster: Cluster) -> float:
    """Tokens that the decode worker fetched from there, or found but had sooner otherwise."""
    declined = metric(cluster, "pool_declined", "decode-0")
    return metric(cluster, "pool_remote_hits", "decode-0") + declined


@contextmanager
def handoff_between_hosts(
    folder: Path, model: Path, hosts: tuple[WorkerHost, WorkerHost]
) -> Iterator[tuple[Cluster, list[Node]]]:
    """prefill-0 at the first node, decode-0 at the second."""
    pools = [f"far-{uuid4().hex[:8]}" for _ in range(2)]
    options = (
        "--host-memory",
        "64MiB",
        "--transport",
        "nixl",
        "--token-file",
        token_file(folder, TOKEN),
    )
    nodes = [Node(folder / pool, pool, *options) for pool in pools]
    roles = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}
    settings = [
        worker_settings(
            name,
            role,
            model,
            pool_address=host_pool_address(pool),
            transports=("shm", "nixl"),
            handoff="pool",
        )
        for (name, role), pool in zip(roles.items(), pools, strict=True)
    ]
    try:
        with running_cluster(model, [*zip(hosts, settings, strict=True)]) as cluster:
            wait_until(lambda: all("joined" in node.text for node in nodes), "all have joined")
            for node in nodes:
                cluster.add_pool_node(node.grpc_address)
            wait_until(lambda: knows_both(cluster), "the router knows both nodes")
            yield cluster, nodes
    finally:
        for node in nodes:
            if node.is_alive:
                node.stop()


def knows_both(cluster: Cluster) -> bool:
    directory: Directory = cluster.router.process.dispatcher.core.state.directory
    return cluster.router.read(
        lambda: sum(bool(node.workers) for node in directory.pool_nodes.values()) == 2
    )
