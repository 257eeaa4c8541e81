"""With another tenant's key a prompt whose KV is cached looks like any other, on every tier: by
what the answer says, and by how long it takes. With a key of the same tenant both tell it at once.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cluster.core.settings import host_pool_address
from kvrelay import Client
from kvrelay.types import Role
from router.access.caller import KeySources
from router.access.key_file import changing
from router.access.keys import ApiKey, key_digest
from tests.integration.pool_kit import running_node
from tests.integration.split_kit import (
    Cluster,
    WorkerHost,
    running_cluster,
    wait_until,
    worker_settings,
)
from tests.integration.test_cluster_life import kv_bytes
from tests.integration.test_prefix_pull import _prefer as prefer
from tests.models import VOCAB_SIZE, random_checkpoint

PAIRS = 300
TOKENS = 480
WHOLE = (TOKENS - 1) // 16 * 16
ALIKE = 0.01
APART = 1e-6
BOTH_PROMPTS = 2 * TOKENS // 16 + 10
"""Blocks of a device that has room for two prompts and forgets the third one back."""


def p_of_ranks(some: Sequence[float], others: Sequence[float]) -> float:
    """That both come from one distribution: Mann and Whitney's U (1947), two sides, by its normal
    approximation, with equal values counted as half."""
    ranks: dict[float, float] = {}
    at = 0
    for found, alike in itertools.groupby(sorted([*some, *others])):
        count = len(list(alike))
        ranks[found] = at + (count + 1) / 2
        at += count
    n, m = len(some), len(others)
    u = sum(ranks[one] for one in some) - n * (n + 1) / 2
    deviation = math.sqrt(n * m * (n + m + 1) / 12)
    return math.erfc(abs(u - n * m / 2) / deviation / math.sqrt(2))


def test_the_rank_test_tells_what_differs() -> None:
    draw = random.Random(1)
    some, others = ([draw.gauss(0, 1) for _ in range(PAIRS)] for _ in range(2))
    assert p_of_ranks(some, others) > ALIKE
    assert p_of_ranks(some, [x + 1 for x in others]) < APART
    assert p_of_ranks([1.0] * 9, [1.0] * 9) == 1.0
    assert p_of_ranks([1, 2, 3, 4], [5, 6, 7, 8]) == pytest.approx(0.0209, abs=1e-4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough that computing a prompt takes several times as long as finding it."""
    folder = tmp_path_factory.mktemp("tenants")
    return random_checkpoint(folder, "llama", hidden_size=128, num_hidden_layers=4)


@pytest.fixture(scope="module")
def third() -> Iterator[WorkerHost]:
    with WorkerHost() as host:
        yield host


@dataclass
class Tier:
    """A cluster, and how a prompt's KV gets where another request finds it on this tier."""

    cluster: Cluster
    prime: Callable[[list[int]], None] = field(init=False)
    draw: random.Random = field(default_factory=lambda: random.Random(7))

    def prompt(self) -> list[int]:
        return [self.draw.randrange(2, VOCAB_SIZE) for _ in range(TOKENS)]

    def ask(self, key: str, prompt: list[int], **fields: Any) -> dict[str, Any]:
        body = {"model": "test-model", "prompt": prompt, "max_tokens": 1, "temperature": 0}
        answer = self.cluster.http.post(
            "/v1/completions",
            json=body | {"ignore_eos": True} | fields,
            headers={"authorization": f"Bearer {key}", "x-kvrelay-ledger": "true"},
        )
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def cached(self, key: str, prompt: list[int], **fields: Any) -> int:
        usage = self.ask(key, prompt, **fields)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    def seconds(self, key: str, prompt: list[int]) -> float:
        began_s = time.perf_counter()
        self.ask(key, prompt)
        return time.perf_counter() - began_s


def keys_in(folder: Path) -> KeySources:
    path = folder / "keys.json"
    with changing(path) as keys:
        keys[:] = [
            ApiKey(id=name, digest=key_digest(name), tenant=name) for name in ("owner", "stranger")
        ]
    return KeySources(file=str(path))


@contextmanager
def serving(tier: str, folder: Path, model: Path, hosts: Sequence[WorkerHost]) -> Iterator[Tier]:
    """Two prefill workers and a decode worker that caches nothing; for the pool one prefill worker
    with little memory."""
    name = f"apart-{tier}"
    plain: dict[str, Any] = {"prefill_chunk_tokens": 128, "compile": "off"}
    common = dict(plain)
    if tier == "pool":
        common |= {"pool_address": host_pool_address(name)}
        common |= {"kv_memory_bytes": kv_bytes(model, 16 * BOTH_PROMPTS)}
    roles = [Role.PREFILL] if tier == "pool" else [Role.PREFILL, Role.PREFILL]
    settings = [
        worker_settings(f"prefill-{i}", role, model, **common) for i, role in enumerate(roles)
    ]
    settings.append(worker_settings("decode-0", Role.DECODE, model, prefix_caching=False, **plain))
    workers = [*zip(hosts, settings, strict=False)]
    router = {"keys": keys_in(folder), "cluster_key": b"of the cluster"}
    if tier != "pool":
        with running_cluster(model, workers, **router) as cluster:
            yield _primed(Tier(cluster), tier)
        return
    with running_node(folder, name) as node, running_cluster(model, workers, **router) as cluster:
        wait_until(lambda: "joined" in node.text, "the worker uses the pool")
        yield _primed(Tier(cluster), tier)


def _primed(served: Tier, tier: str) -> Tier:
    cluster = served.cluster

    def device(prompt: list[int]) -> None:
        served.ask("owner", prompt)

    def peer(prompt: list[int]) -> None:
        prefer(cluster, "prefill-0")
        served.ask("owner", prompt)
        prefer(cluster, "prefill-1")

    def pool(prompt: list[int]) -> None:
        """Two more prompts push it out of the device."""
        for one in (prompt, served.prompt(), served.prompt()):
            served.ask("owner", one)

    if tier != "pool":
        prefer(cluster, "prefill-0")
    served.prime = {"device": device, "peer": peer, "pool": pool}[tier]
    return served


TIERS = ("device", "peer", "pool")


@pytest.mark.parametrize("tier", TIERS)
def test_an_answer_tells_nothing_of_another_tenants_cache(
    tier: str, tmp_path: Path, model: Path, hosts: tuple[WorkerHost, WorkerHost], third: WorkerHost
) -> None:
    """Whatever it says with the request."""
    with serving(tier, tmp_path, model, (hosts[0], third, hosts[1])) as served:
        for _ in range(2):
            prompt, unknown = served.prompt(), served.prompt()
            served.prime(prompt)
            for fields in ({}, {"cache_salt": "owner"}, {"cache_salt": _space(served)}):
                assert served.cached("stranger", prompt, **fields) == 0
            told, other = (served.ask("stranger", one) for one in (served.prompt(), unknown))
            assert (_shape(told), told["usage"]) == (_shape(other), other["usage"])
        with Client(served.cluster.grpc_address, api_key="stranger") as client:
            served.prime(prompt := served.prompt())
            for tenant in ("", "owner", _space(served)):
                found = client.generate(prompt, max_tokens=1, ignore_eos=True, tenant=tenant)
                assert found.cached_tokens == 0
        found_by_owner = []
        for _ in range(4):
            prompt = served.prompt()
            served.prime(prompt)
            found_by_owner.append(served.cached("owner", prompt))
        assert WHOLE in found_by_owner, f"the owner finds it: {found_by_owner}"


def _space(served: Tier) -> str:
    """The name of the owner's cache inside the cluster, which nobody outside knows."""
    door = served.cluster.router.process._servers.service.door
    return door.caller({"authorization": "Bearer owner"}).space("")


def _shape(told: Any) -> Any:
    if isinstance(told, dict):
        return {key: _shape(value) for key, value in told.items()}
    return type(told).__name__


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("tier", TIERS)
def test_time_tells_nothing_of_another_tenants_cache(
    tier: str,
    tmp_path: Path,
    model: Path,
    hosts: tuple[WorkerHost, WorkerHost],
    third: WorkerHost,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By chance one of 100 runs has p < 0.01: so it must come twice."""
    with serving(tier, tmp_path, model, (hosts[0], third, hosts[1])) as served:
        times = timed(served, 10)  # links are measured, code is compiled
        for _ in range(2):
            times = timed(served, PAIRS)
            stranger, owner = (
                p_of_ranks(times[key, True], times[key, False]) for key in ("stranger", "owner")
            )
            with capsys.disabled():
                print(f"\n{tier}: {_told(times)}; p {stranger:.3g} and {owner:.3g}")
            assert owner < APART, "the same tenant can tell"
            if stranger > ALIKE:
                return
        raise AssertionError(f"another tenant can tell: p = {stranger}")


Times = dict[tuple[str, bool], list[float]]
"""# (whose key, was it cached) |-> seconds of each request"""


def timed(served: Tier, pairs: int) -> Times:
    """Each round in an order of its own. The owner tells at once: every third round is enough."""
    kinds = [*itertools.product(("stranger", "owner"), (True, False))]
    times: Times = {kind: [] for kind in kinds}
    for number in range(pairs):
        for key in ("stranger", "owner")[: 1 if number % 3 else 2]:
            prompt = served.prompt()
            served.prime(prompt)
            prompts = {True: prompt, False: served.prompt()}
            for is_cached in served.draw.sample([True, False], 2):
                times[key, is_cached].append(served.seconds(key, prompts[is_cached]))
    return times


def _told(times: Times) -> str:
    median = {kind: sorted(found)[len(found) // 2] for kind, found in times.items()}
    return ", ".join(
        f"{key} {'cached' if is_cached else 'not'} {1000 * s:.2f} ms"
        for (key, is_cached), s in median.items()
    )
