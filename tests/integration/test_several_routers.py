"""Several real routers over one set of workers: what each can't know, the workers settle."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import httpx
import pytest

from cluster.cli.status import kv
from kvpool.core.layout.hashes import tenant_label
from kvrelay import Client
from kvrelay.errors import ConfigError
from kvrelay.qos import QosTier, QosTiers
from kvrelay.types import Role
from router import server
from router.core.migration import Moving
from router.core.policy.choice import Policies
from router.core.router_state import MoveCause
from router.text.preload import PreloadText
from router.text.request_fields import TierMatch
from tests.access import ACCESS
from tests.integration.split_kit import (
    ALWAYS_SPLIT,
    PATIENCE_S,
    Cluster,
    RouterThread,
    WorkerHost,
    running_cluster,
    split_workers,
    wait_until,
    worker_settings,
)
from tests.integration.test_cluster_life import TOKENS, ask_all, kv_bytes, load, prompts
from tests.reference import assert_same_tokens, generate_reference
from tests.unit.directory_kit import Blocks, known

Hosts = tuple[WorkerHost, WorkerHost]


@contextmanager
def router_beside(first: Cluster, model: Path, **changes: Any) -> Iterator[Cluster]:
    """One more router over the same workers, clean at the end."""
    thread = RouterThread(model, process="router-1", **changes)
    try:
        workers = first.router.workers()
        for worker in workers:
            thread.call(thread.process.add_worker(worker.address))
        wait_until(lambda: len(thread.workers()) == len(workers), "all workers joined")
        url = f"http://127.0.0.1:{thread.address.public.http}"
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as http:
            cluster = Cluster(thread, http)
            yield cluster
            cluster.assert_clean()
    finally:
        thread.close()


@contextmanager
def routers(
    count: int, model: Path, workers: list[tuple[WorkerHost, Any]], **changes: Any
) -> Iterator[list[Cluster]]:
    with ExitStack() as stack:
        first = stack.enter_context(running_cluster(model, workers, **changes))
        others = (
            stack.enter_context(router_beside(first, model, **changes)) for _ in range(count - 1)
        )
        yield [first, *others]


def held_by_directory(cluster: Cluster) -> Blocks:
    directory = cluster.router.process.dispatcher.core.state.directory
    return cluster.router.read(lambda: known(directory))


def metric(cluster: Cluster, name: str) -> float:
    text = cluster.metrics()
    found = re.findall(rf"^{re.escape(name)}\{{[^}}]*\}} (\S+)$", text, re.M)
    return sum(map(float, found))


def streamed(client: Client, prompt: list[int], begun: Event, tokens: int) -> list[int]:
    found: list[int] = []
    for chunk in client.stream(prompt, max_tokens=tokens, temperature=0, ignore_eos=True):
        found += chunk.token_ids
        begun.set()
    return found


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are short."""
    monkeypatch.setattr(server, "HEARD_S", 0.2)


def leaving(
    model: Path, first: Cluster, pool: ThreadPoolExecutor, tokens: int
) -> tuple[RouterThread, Client, list[int], Future[list[int]]]:
    """One more router that has begun an answer, whose client knows both; and the answer."""
    router = RouterThread(model, process="router-1", policies=ALWAYS_SPLIT)
    for worker in first.router.workers():
        router.call(router.process.add_worker(worker.address))
    wait_until(lambda: len(router.workers()) == len(first.router.workers()), "all joined")
    (prompt,) = prompts(1, 60)
    client = Client([f"127.0.0.1:{router.address.public.grpc}", first.grpc_address])
    begun = Event()
    expected = ask_all(first, [prompt], max_tokens=tokens)[0]
    running = pool.submit(streamed, client, prompt, begun, tokens)
    assert begun.wait(PATIENCE_S)
    return router, client, expected, running


@pytest.mark.usefixtures("soon")
def test_a_router_that_leaves_sends_its_streams_to_one_that_stays(
    llama: Path, hosts: Hosts
) -> None:
    """It has left before the answer ends."""
    with (
        running_cluster(llama, split_workers(hosts, llama)) as first,
        ThreadPoolExecutor(1) as pool,
    ):
        router, client, expected, running = leaving(llama, first, pool, 900)
        router.close(drain_s=PATIENCE_S)
        assert not running.done()
        assert running.result() == expected
        assert client._routers.current == 1
        client.close()


@pytest.mark.usefixtures("soon")
def test_where_both_leave_no_stream_is_sent_to_and_fro(llama: Path, hosts: Hosts) -> None:
    with (
        running_cluster(llama, split_workers(hosts, llama)) as first,
        ThreadPoolExecutor(1) as pool,
    ):
        router, client, expected, running = leaving(llama, first, pool, 900)
        first.router.call(first.router.process._servers.leave())
        router.close(drain_s=PATIENCE_S)
        assert running.done() and running.result() == expected
        assert client._routers.current == 0
        client.close()


# --- the same answers ---------------------------------------------------------------------------


def test_requests_through_each_are_those_of_one(llama: Path, hosts: Hosts) -> None:
    """All at once, through three; afterwards each tells of the same KV and of its own requests."""
    asked = prompts(9, 200)
    with routers(3, llama, split_workers(hosts, llama)) as three:
        with ThreadPoolExecutor(3) as pool:
            parts = list(pool.map(lambda i: ask_all(three[i], asked[i::3]), range(3)))
        for cluster in three:
            cluster.assert_clean()
            assert metric(cluster, "kvrelay:request_success_total") == 3
            assert metric(cluster, "kvrelay:num_requests_running") == 0
        kept = [{w["worker"]: w["cached_blocks"] for w in cluster.kv()} for cluster in three]
        assert kept[0] == kept[1] == kept[2]
    reference = load(llama)
    for number, prompt in enumerate(asked):
        found = parts[number % 3][number // 3]
        assert_same_tokens(generate_reference(reference, prompt, tokens=TOKENS), found)


def test_each_directory_knows_what_came_by_the_others_and_before(llama: Path, hosts: Hosts) -> None:
    with routers(2, llama, split_workers(hosts, llama)) as (one, other):
        ask_all(one, [list(range(2, 90))])
        wait_until(lambda: len(held_by_directory(other)) == 2, "the other hears of new blocks")
        with router_beside(one, llama) as late:
            wait_until(lambda: len(held_by_directory(late)) == 2, "it hears of all there are")
            ask_all(other, [list(range(100, 190))])

            def all_agree() -> bool:
                return held_by_directory(one) == held_by_directory(other) == held_by_directory(late)

            wait_until(all_agree, "all know the same")
            blocks = [len(b) for of in held_by_directory(late).values() for b in of.values()]
            assert len(blocks) == 2 and min(blocks) >= 10, "both prompts, at both workers"


def test_a_request_id_may_run_at_two_routers(llama: Path, hosts: Hosts) -> None:
    prompt = prompts(1, 60)[0]
    with routers(2, llama, split_workers(hosts, llama)) as pair:
        headers = {"x-request-id": "mine"}
        with ThreadPoolExecutor(2) as pool:
            body = {"model": "test-model", "prompt": prompt, "max_tokens": 200, "temperature": 0}
            body |= {"ignore_eos": True, "return_token_ids": True}

            def ask(cluster: Cluster) -> httpx.Response:
                return cluster.http.post("/v1/completions", json=body, headers=headers)

            answers = list(pool.map(ask, pair))
    assert [answer.status_code for answer in answers] == [200, 200]
    first, second = (answer.json()["choices"][0]["token_ids"] for answer in answers)
    assert first == second


def test_what_all_preload_is_computed_once(llama: Path, hosts: Hosts) -> None:
    preload = (PreloadText(text="the quick brown fox " * 12, is_system=False),)
    with routers(3, llama, split_workers(hosts, llama), preload=preload) as three:

        def pinned() -> list[int]:
            return [
                sum(held["holder"].startswith("pinned") for held in worker["held"])
                for worker in three[2].kv()
                if worker["worker"] == "prefill-0"
            ]

        wait_until(lambda: pinned() == [1], "it is preloaded")
        three[2].completion("hello", max_tokens=2)
        views = three[2].router.process.dispatcher.core.state.workers.values()
        (computed,) = [v.counters.prompt_tokens for v in views if v.hello.name == "prefill-0"]
        (spec,) = three[0].router.process.dispatcher.core.preloads
        assert computed < len(spec.prompt_ids) + 10


def test_status_names_the_tenants_of_all_routers(long_llama: Path, hosts: Hosts) -> None:
    with routers(2, long_llama, split_workers(hosts, long_llama)) as (one, other):
        with Client(other.grpc_address) as client:
            stream = client.stream([5, 6, 7], max_tokens=8000, ignore_eos=True, tenant="acme")
            with stream:
                next(stream)
                alone = kv.of_router(one.internal_grpc, ACCESS)
                at = ["127.0.0.1:1", one.internal_grpc, other.internal_grpc]
                found = kv.of_routers(at, ACCESS)
        with pytest.raises(ConfigError, match=r"127.0.0.1:1: no router answers"):
            kv.of_routers(["127.0.0.1:1", "127.0.0.1:1"], ACCESS)
    assert {held.tenant for worker in alone.workers for held in worker.held} == {""}
    tenants = {held.tenant for worker in found.workers for held in worker.held}
    assert tenants == {tenant_label("acme")}


# --- what none of them knows alone --------------------------------------------------------------


def test_places_are_the_workers_to_give(long_llama: Path, hosts: Hosts) -> None:
    """Three routers at once, each with more than the two places there are."""
    workers = split_workers(hosts, long_llama, max_running_requests=2)
    with routers(3, long_llama, workers) as three, ThreadPoolExecutor(9) as pool:
        body = {"model": "test-model", "prompt": [5, 6, 7], "max_tokens": 8000, "ignore_eos": True}
        body["stream"] = True
        together = Barrier(9)

        def ask(number: int) -> httpx.Response:
            """Those that run leave when all have been told."""
            together.wait(PATIENCE_S)
            with three[number % 3].http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                together.wait(PATIENCE_S)
            return response

        answers = list(pool.map(ask, range(9)))
        codes = [answer.status_code for answer in answers]
        assert codes.count(200) == 2 and codes.count(429) == 7, codes
        refused = [answer for answer in answers if answer.status_code == 429]
        assert {answer.json()["error"]["code"] for answer in refused} == {"slots_exhausted"}
        assert all(float(answer.headers["retry-after-ms"]) > 0 for answer in refused)
        views = three[0].router.process.dispatcher.core.state.workers.values()
        assert sum(view.counters.preemptions for view in views) == 0


def test_a_tier_gets_its_share_back_from_what_another_router_lent(
    long_llama: Path, hosts: Hosts
) -> None:
    """Free requests of one router take all four places; two are premium's, who asks another."""
    tiers = (QosTier(name="premium", share=0.5), QosTier(name="free", priority=1))
    qos = QosTiers(tiers=tiers, default="free")
    asked = prompts(4, 30)
    workers = split_workers(hosts, long_llama, max_running_requests=4, qos=qos)
    told = {"qos": qos, "tier_match": TierMatch(values={"premium": "premium"})}
    with routers(2, long_llama, workers, **told) as (one, other), ThreadPoolExecutor(4) as pool:
        fields = {"max_tokens": 1500}
        free = [pool.submit(ask_all, one, [prompt], **fields) for prompt in asked]
        known = other.router.process.dispatcher.core.state.workers
        views = {view.hello.name: view for view in known.values()}
        decode = views["decode-0"]
        wait_until(lambda: decode.counters.decode_sequences == 4, "free ones have all places")
        body = {"model": "test-model", "prompt": [5, 6, 7], "max_tokens": 4}
        premium = other.http.post(
            "/v1/completions", json=body, headers={"x-customer-tier": "premium"}
        )
        assert premium.status_code == 200, premium.text
        assert not any(future.done() for future in free), "they were still running"
        found = [future.result()[0] for future in free]
        assert decode.counters.preemptions >= 1
        undisturbed = ask_all(one, asked, **fields)
    assert found == undisturbed, "who yielded lost nothing"


def test_moves_that_two_routers_decide_at_once_harm_nobody(llama: Path, hosts: Hosts) -> None:
    """Memory for 1,500 tokens, and a request of 900 from each; the other worker opens when both
    run."""
    moves = Policies(admission="none", move_hot_spots=True, local_prefill=False)
    small = worker_settings("small", Role.DECODE, llama, kv_memory_bytes=kv_bytes(llama, 1500))
    workers = [
        (hosts[0], worker_settings("prefill", Role.PREFILL, llama)),
        (hosts[1], small),
        (hosts[0], worker_settings("large", Role.DECODE, llama)),
    ]
    asked = prompts(2, 60)
    with routers(2, llama, workers, policies=moves) as pair:
        cores = [cluster.router.process.dispatcher.core for cluster in pair]
        views = [{v.hello.name: v for v in core.state.workers.values()} for core in cores]
        stayed = [ask_all(pair[0], [prompt], max_tokens=900)[0] for prompt in asked]
        for seen in views:
            seen["large"].draining = True
        with ThreadPoolExecutor(2) as pool:
            found = [
                pool.submit(ask_all, cluster, [prompt], max_tokens=900)
                for cluster, prompt in zip(pair, asked, strict=True)
            ]
            small_ones = [seen["small"] for seen in views]
            wait_until(
                lambda: all(one.counters.decode_sequences == 2 for one in small_ones), "both decode"
            )
            for seen in views:
                seen["large"].draining = False
            assert [future.result()[0] for future in found] == stayed
        assert sum(core.state.moves.moved[MoveCause.HOT_SPOT] for core in cores) > 0
        pending = [one.pending for core in cores if isinstance(one := core.state.moves, Moving)]
        assert len(pending) == len(cores)
        wait_until(lambda: not any(pending), "no move is left")
