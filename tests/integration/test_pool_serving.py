"""Requests of a real split cluster whose KV outlives its workers in the host's pool node."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from cluster.core.settings import WorkerSettings, host_pool_address
from cluster.worker.pool.links import FAREWELL_S
from cluster.worker.process import STORE_S
from engine.family.build import load_model
from engine.model.checkpoint import open_checkpoint
from kvpool.core.layout.block_names import BlockNames
from kvrelay.types import Role
from kvrelay.v1.pool_node_pb2 import PoolReportRequest
from kvrelay.v1.pool_node_pb2_grpc import PoolNodeStub
from tests.access import ACCESS
from tests.integration.pool_kit import Node, running_node
from tests.integration.split_kit import (
    Cluster,
    WorkerHost,
    running_cluster,
    wait_until,
    worker_settings,
)
from tests.integration.test_cluster_life import prompts, tokens_of
from tests.models import VOCAB_SIZE, random_checkpoint
from tests.reference import assert_same_tokens, generate_reference

TOKENS = 40
LONG = 600
Hosts = tuple[WorkerHost, WorkerHost]


def _prompt(seed: int, tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(2, VOCAB_SIZE) for _ in range(tokens)]


def _ask(cluster: Cluster, prompt: list[int], **fields: Any) -> tuple[list[int], int]:
    plain = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    answer = cluster.completion(prompt, **{**plain, **fields})
    details = answer["usage"]["prompt_tokens_details"]
    return answer["choices"][0]["token_ids"], details["cached_tokens"]


def _metric(cluster: Cluster, name: str) -> float:
    """Summed over the workers."""
    text = cluster.metrics()
    rows = [line for line in text.splitlines() if line.startswith(f"kvrelay:{name}_total{{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in rows)


def _pair(folder: Path, pool: str, **changes: Any) -> list[WorkerSettings]:
    address = host_pool_address(pool)
    return [
        worker_settings("prefill-0", Role.PREFILL, folder, pool_address=address, **changes),
        worker_settings("decode-0", Role.DECODE, folder, pool_address=address, **changes),
    ]


def _joined(node: Node, workers: int) -> bool:
    return node.text.count("joined") >= workers


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mistral"])
def test_the_next_turn_finds_prompt_and_answer_after_all_workers_have_gone(
    family: str, tmp_path: Path, hosts: Hosts
) -> None:
    folder = random_checkpoint(tmp_path, family)
    model = load_model(open_checkpoint(str(folder)), device="cpu", dtype="float32")
    name = f"turns-{family.split('_')[0]}"
    with running_node(tmp_path, name) as node:
        settings = _pair(folder, name)
        prompt = _prompt(1, 150)
        with running_cluster(folder, [*zip(hosts, settings, strict=True)]) as cluster:
            wait_until(lambda: _joined(node, 2), "both workers use the pool")
            tokens, cached = _ask(cluster, prompt)
            assert cached == 0
        longer = [*prompt, *tokens, *_prompt(2, 30)]
        with running_cluster(folder, [*zip(hosts, settings, strict=True)]) as cluster:
            wait_until(lambda: _joined(node, 4), "both new workers use the pool")
            again, cached = _ask(cluster, longer)
            assert_same_tokens(generate_reference(model, longer, tokens=TOKENS), again)
            assert cached == 176  # 11 whole blocks of prompt and answer
            wait_until(lambda: _metric(cluster, "pool_host_hits") == 176, "it is counted")
            cluster.assert_clean()


def test_what_was_on_disk_is_found_by_a_new_node(tmp_path: Path, llama: Path, hosts: Hosts) -> None:
    disk = ("--disk", str(tmp_path / "disk"), "--disk-size", "64MiB")
    model = load_model(open_checkpoint(str(llama)), device="cpu", dtype="float32")
    prompt = _prompt(3, 100)
    settings = _pair(llama, "disk")
    workers = [*zip(hosts, settings, strict=True)]
    with running_node(tmp_path, "disk", *disk) as node, running_cluster(llama, workers) as cluster:
        wait_until(lambda: _joined(node, 2), "both workers use the pool")
        first, _ = _ask(cluster, prompt)
    (tmp_path / "disk.log").unlink()
    with running_node(tmp_path, "disk", *disk) as node, running_cluster(llama, workers) as cluster:
        wait_until(lambda: _joined(node, 2), "both workers use the pool")
        again, cached = _ask(cluster, prompt)
        assert cached == 96
        assert again == first
        assert_same_tokens(generate_reference(model, prompt, tokens=TOKENS), again)
        wait_until(lambda: _metric(cluster, "pool_disk_hits") == 96, "it is counted")


def test_without_its_node_a_worker_serves_all_the_same(
    tmp_path: Path, llama: Path, hosts: Hosts
) -> None:
    """None is there, one comes, it is killed, another comes."""
    model = load_model(open_checkpoint(str(llama)), device="cpu", dtype="float32")
    settings = _pair(llama, "coming")

    def exact(seed: int) -> int:
        prompt = _prompt(seed, 90)
        tokens, cached = _ask(cluster, prompt)
        assert_same_tokens(generate_reference(model, prompt, tokens=TOKENS), tokens)
        return cached

    with running_cluster(llama, [*zip(hosts, settings, strict=True)]) as cluster:
        assert exact(10) == 0
        with running_node(tmp_path, "coming") as node:
            wait_until(lambda: _joined(node, 2), "both workers use the pool", 20.0)
            cluster.add_pool_node(node.grpc_address)
            exact(11)
            wait_until(lambda: _known_in_pools(cluster, _prompt(11, 90)) == 5, "routers know it")
            node.kill()
            wait_until(lambda: _known_in_pools(cluster, _prompt(11, 90)) == 0, "it is forgotten")
            exact(12)
        (tmp_path / "coming.log").unlink()
        with running_node(tmp_path, "coming") as node:
            wait_until(lambda: _joined(node, 2), "both workers use the new pool", 30.0)
            exact(13)
            cluster.assert_clean()


def _known_in_pools(cluster: Cluster, prompt: list[int]) -> int:
    """Blocks of the prompt that the router knows a pool node to hold."""
    core = cluster.router.process.dispatcher.core
    hello = next(iter(core.state.workers.values())).hello
    names = BlockNames(fingerprint=hello.fingerprint, physical_format=hello.physical_format)
    chain = names.chain("", len(prompt), hello.block_size)
    chain.extend(prompt, len(prompt))
    held = cluster.router.read(lambda: core.state.directory.longest(chain.full(len(prompt))))
    return max(
        (blocks for holder, blocks in held.items() if holder not in core.state.workers), default=0
    )


def _ask_both(cluster: Cluster, prompts: list[list[int]]) -> list[list[int]]:
    """100 tokens each at once, when the pool has the prompts."""
    for prompt in prompts:
        _ask(cluster, prompt, max_tokens=1)
        wait_until(lambda p=prompt: _known_in_pools(cluster, p) == 6, "it is stored")  # type: ignore[misc]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda p: _ask(cluster, p, max_tokens=100)[0], prompts))


def _came_back(cluster: Cluster) -> bool:
    return _metric(cluster, "num_preemptions") >= 1 and _metric(cluster, "pool_host_hits") > 0


def test_preempted_requests_come_back_from_the_pool(
    tmp_path: Path, llama: Path, hosts: Hosts
) -> None:
    """The decode worker holds 16 blocks: two requests of 8 blocks that grow. They are short: now
    and then one is over before the other comes."""
    model = load_model(open_checkpoint(str(llama)), device="cpu", dtype="float32")
    block_bytes = 4 * 2 * 16 * _kv_elements(llama)
    prefill, decode = _pair(llama, "swap")
    tight = worker_settings(
        "decode-0",
        Role.DECODE,
        llama,
        pool_address=decode.pool_address,
        kv_memory_bytes=16 * block_bytes,
    )
    with running_node(tmp_path, "swap") as node:
        workers = [(hosts[0], prefill), (hosts[1], tight)]
        with running_cluster(llama, workers) as cluster:
            wait_until(lambda: _joined(node, 2), "both workers use the pool")
            cluster.add_pool_node(node.grpc_address)
            for seed in range(21, 31, 2):
                prompts = [_prompt(one, 100) for one in (seed, seed + 1)]
                for prompt, tokens in zip(prompts, _ask_both(cluster, prompts), strict=True):
                    assert_same_tokens(generate_reference(model, prompt, tokens=100), tokens)
                if _came_back(cluster):
                    break
            assert _came_back(cluster)
            cluster.assert_clean()


def _there(cluster: Cluster) -> float:
    """Fetched, or found but faster computed: the model is tiny."""
    return _metric(cluster, "pool_host_hits") + _metric(cluster, "pool_declined")


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_handoffs_through_the_pool_are_exact(family: str, tmp_path: Path, hosts: Hosts) -> None:
    folder = random_checkpoint(tmp_path, family)
    model = load_model(open_checkpoint(str(folder)), device="cpu", dtype="float32")
    name = f"handoff-{family.split('_')[0]}"
    with running_node(tmp_path, name) as node:
        settings = _pair(folder, name, handoff="pool")
        with running_cluster(folder, [*zip(hosts, settings, strict=True)]) as cluster:
            wait_until(lambda: _joined(node, 2), "both workers use the pool")
            for tokens in (1, 16, 100, 150):
                prompt = _prompt(tokens, tokens)
                expected = generate_reference(model, prompt, tokens=TOKENS)
                assert_same_tokens(expected, _ask(cluster, prompt)[0])
            assert _metric(cluster, "kv_transfers") == 0
            wait_until(lambda: _there(cluster) == 16 + 96 + 144, "all was there")
            prompt = _prompt(9, 70)
            answer = cluster.completion(
                prompt, max_tokens=TOKENS, temperature=0, ignore_eos=True, n=2
            )
            expected = generate_reference(model, prompt, tokens=TOKENS)
            for choice in answer["choices"]:
                assert_same_tokens(expected, choice["token_ids"])
            node.kill()
            prompt = _prompt(10, 70)
            expected = generate_reference(model, prompt, tokens=TOKENS)
            assert_same_tokens(expected, _ask(cluster, prompt)[0])
            cluster.assert_clean()


def _kv_elements(folder: Path) -> int:
    """Of one plane and token, all layers."""

    config = json.loads((folder / "config.json").read_text())
    dim = config["hidden_size"] // config["num_attention_heads"]
    return int(config["num_hidden_layers"] * config["num_key_value_heads"] * dim)


class Streamed:
    """A stream that one client reads in a thread of its own."""

    def __init__(self, cluster: Cluster, prompt: list[int]) -> None:
        self.tokens: list[int] = []
        self._http, self._prompt = cluster.http, prompt

    def run(self) -> None:
        body = {"model": "test-model", "prompt": self._prompt, "max_tokens": LONG, "stream": True}
        body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        with self._http.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                for _, ids in tokens_of(line):
                    self.tokens += ids


def _pooled_blocks(node: PoolNodeStub) -> int:
    """Blocks that it has in memory, readable."""
    tiers = node.Report(PoolReportRequest(), timeout=60.0, metadata=ACCESS.metadata).tiers
    states = [state for tier in tiers if tier.tier == "host" for state in tier.states]
    return sum(one.blocks for one in states if one.state == "cached")


def _computed(cluster: Cluster) -> dict[str, int]:
    """# worker |-> prompt tokens that it has computed"""
    views = [*cluster.router.process.dispatcher.core.state.workers.values()]
    return {view.hello.name: view.counters.prompt_tokens for view in views}


def test_a_worker_that_drains_has_stored_what_is_worth_keeping(
    tmp_path: Path, llama: Path, hosts: Hosts
) -> None:
    """Its stores are slow, and it is told to stop as soon as the answer has ended."""
    settings = _pair(llama, "leaves")
    prompt = _prompt(41, 200)
    with (
        running_node(tmp_path, "leaves") as node,
        grpc.insecure_channel(node.grpc_address) as channel,
        running_cluster(llama, [(hosts[0], settings[0])]) as cluster,
    ):
        leaves = cluster.add(hosts[1], settings[1])
        wait_until(lambda: _joined(node, 2), "both workers use the pool")
        hosts[1].slow_stores(leaves, seconds=0.4)
        tokens, _ = _ask(cluster, prompt)
        hosts[1].stop(leaves, drain_s=60.0)
        known = len(prompt) + len(tokens) - 1
        assert _pooled_blocks(PoolNodeStub(channel)) == known // 16


@pytest.mark.parametrize("what", ["node", "copy"])
def test_a_pool_node_that_takes_nothing_holds_up_a_drain_for_a_while_only(
    what: str, tmp_path: Path, llama: Path, hosts: Hosts
) -> None:
    """The node does not answer, or a copy to it hangs."""
    name = f"mute-{what}"
    settings = _pair(llama, name)
    with (
        running_node(tmp_path, name) as node,
        running_cluster(llama, [(hosts[0], settings[0])]) as cluster,
    ):
        leaves = cluster.add(hosts[1], settings[1])
        wait_until(lambda: _joined(node, 2), "both workers use the pool")
        if what == "node":
            node.suspend()
        else:
            hosts[1].slow_stores(leaves, seconds=60.0)
        _ask(cluster, _prompt(42, 200))
        began_s = time.monotonic()
        hosts[1].stop(leaves, drain_s=60.0)
        took_s = time.monotonic() - began_s
        node.signal(signal.SIGCONT)
        assert STORE_S <= took_s < STORE_S + FAREWELL_S + 4.0


@pytest.mark.parametrize("all_die", [False, True])
def test_after_a_death_only_what_stands_behind_the_last_pooled_block_is_computed(
    all_die: bool, tmp_path: Path, llama: Path
) -> None:
    """A decode worker is stopped in the middle of an answer and then killed, so that the pool holds
    the same blocks as at its death. Its prefill worker goes on; if that dies too, a newcomer that
    has nothing."""
    name = f"deaths-{all_die}".lower()
    (prompt,) = prompts(1, 200)
    with (
        running_node(tmp_path, name) as node,
        WorkerHost() as prefill,
        WorkerHost() as decode,
        WorkerHost() as newcomer,
        ThreadPoolExecutor(1) as pool,
    ):
        settings = _pair(llama, name)
        workers = [*zip((prefill, decode), settings, strict=True)]
        with (
            running_cluster(llama, workers, detect_s=60.0) as cluster,
            grpc.insecure_channel(node.grpc_address) as channel,
        ):
            stub = PoolNodeStub(channel)
            wait_until(lambda: _joined(node, 2), "both workers use the pool")
            stream = Streamed(cluster, prompt)
            running = pool.submit(stream.run)
            prompt_blocks = len(prompt) // 16
            wait_until(lambda: _pooled_blocks(stub) >= prompt_blocks + 3, "answers are pooled")
            os.kill(decode.pid, signal.SIGSTOP)
            _until_still(lambda: (len(stream.tokens), _pooled_blocks(stub)))
            known, pooled = len(prompt) + len(stream.tokens), _pooled_blocks(stub)
            assert 0 < len(stream.tokens) < LONG - 32, "it is in the middle"
            before = _computed(cluster)
            if all_die:
                prefill.kill()
            decode.kill()
            if all_die:
                heir = "newcomer"
                address = host_pool_address(name)
                late = worker_settings(heir, Role.BOTH, llama, pool_address=address)
                at = newcomer.start(late)
                wait_until(lambda: _joined(node, 3), "it uses the pool")
                cluster.join(at, heir)
            else:
                heir = "prefill-0"
            running.result()
            cluster.assert_clean()
            wait_until(lambda: _computed(cluster)[heir] > before.get(heir, 0), "it is counted")
            again = _computed(cluster)[heir] - before.get(heir, 0)
    reference = load_model(open_checkpoint(str(llama)), device="cpu", dtype="float32")
    assert_same_tokens(generate_reference(reference, prompt, tokens=LONG), stream.tokens)
    assert pooled >= prompt_blocks + 3
    assert again == known - 16 * pooled


def _until_still(read: Callable[[], tuple[int, int]]) -> None:
    """Returns when it has been the same for half a second."""
    seen, since_s = read(), time.monotonic()
    while time.monotonic() < since_s + 0.5:
        if (now := read()) != seen:
            seen, since_s = now, time.monotonic()
