"""A tier's requests before they are refused, and its ladder, in real processes: output cut, a wait,
each step up and down told with its cause.

A worker that is stopped answers nothing, so what the router decides meanwhile does not depend on
how fast anything is.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvrelay.qos import LadderRules, QosTier, QosTiers
from kvrelay.types import Objectives, Role
from router.core.core import RouterCore
from router.core.policy.choice import Policies
from router.text.request_fields import TierMatch
from tests.integration.split_kit import (
    Cluster,
    WorkerHost,
    running_cluster,
    wait_until,
    worker_settings,
)
from tests.integration.test_cluster_life import kv_bytes

SLOW_STEPS = """
prefill_overhead_s: 0.01
prefill_token_s: 0.0
prefill_pair_s: 0.0
prefill_sequence_s: 0.0
decode_knots: [[1, 0.05], [16, 0.05]]
decode_kv_token_s: 0.0
"""
"""What workers say of themselves: that whoever decodes stays for long."""
BLOCKS, BLOCK = 20, 16


def tier(name: str, **more: Any) -> QosTier:
    return QosTier(name=name, objectives=Objectives(tpot_s=10.0), **more)


@contextmanager
def serving(
    llama: Path, hosts: tuple[WorkerHost, WorkerHost], tiers: QosTiers, **more: Any
) -> Iterator[Cluster]:
    match = TierMatch(values={one.name: one.name for one in tiers.tiers})
    policies = more.pop("policies", Policies())
    workers = [
        (host, worker_settings(f"{role}-0", role, llama, qos=tiers, **more))
        for host, role in zip(hosts, (Role.PREFILL, Role.DECODE), strict=True)
    ]
    options = {"qos": tiers, "tier_match": match, "policies": policies, "detect_s": 60.0}
    with running_cluster(llama, workers, **options) as cluster:
        yield cluster


@contextmanager
def stopped(host: WorkerHost) -> Iterator[None]:
    os.kill(host.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(host.pid, signal.SIGCONT)


def core_of(cluster: Cluster) -> RouterCore:
    return cluster.router.process.dispatcher.core


def ask(cluster: Cluster, name: str, prompt: int, tokens: int) -> httpx.Response:
    return cluster.http.post(
        "/v1/completions",
        json={
            "prompt": [*range(2, 2 + prompt)],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        },
        headers={"x-customer-tier": name},
    )


def tokens_of(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


def test_output_is_cut_or_a_wait_allowed_before_a_request_is_refused(
    llama: Path, hosts: tuple[WorkerHost, WorkerHost], tmp_path: Path
) -> None:
    """Of 20 blocks one that is there is expected to fill 9; the next would take 11 for 250 tokens,
    but 4 for 8."""
    tiers = QosTiers(
        tiers=(tier("plain"), tier("free", capped_tokens=8), tier("patient", patience_s=60.0)),
        default="plain",
    )
    profile = tmp_path / "times.yaml"
    profile.write_text(SLOW_STEPS)
    small = {"kv_memory_bytes": kv_bytes(llama, BLOCKS * BLOCK), "max_model_len": 304}
    with (
        serving(llama, hosts, tiers, profile=str(profile), **small) as cluster,
        ThreadPoolExecutor() as threads,
    ):
        core = core_of(cluster)

        def submit(name: str, prompt: int) -> Future[httpx.Response]:
            before = len(core.state.requests)
            asked = threads.submit(ask, cluster, name, prompt, 250)
            wait_until(lambda: len(core.state.requests) > before, f"the router has heard of {name}")
            return asked

        with stopped(hosts[1]):
            there, cut = submit("plain", 16), submit("free", 48)
            late = submit("patient", 48)
            wait_until(lambda: len([*core.state.waiting]) == 1, "it waits")
            refused = ask(cluster, "plain", 48, 250)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "kv_exhausted"
        assert int(refused.headers["retry-after-ms"]) > 0
        assert cut.result().headers["x-kvrelay-capped"] == "8"
        assert len(tokens_of(cut.result())) == 8
        for whole in (there.result(), late.result()):
            assert len(tokens_of(whole)) == 250
            assert "x-kvrelay-capped" not in whole.headers


def ladder_step(cluster: Cluster) -> int:
    (ladder,) = core_of(cluster).state.ladders
    return ladder.step


def test_the_ladder_climbs_and_comes_down_and_says_why(
    llama: Path, hosts: tuple[WorkerHost, WorkerHost], caplog: pytest.LogCaptureFixture
) -> None:
    """All are taken, and none can keep the objective."""
    eager = QosTier(name="eager", capped_tokens=4, objectives=Objectives(ttft_s=1e-6))
    rules = LadderRules(window_s=15.0, hold_s=0.0, calm_s=1.0)
    tiers = QosTiers(tiers=(eager,), default="eager", ladder=rules)
    none = Policies(admission="none")
    with (
        serving(llama, hosts, tiers, policies=none) as cluster,
        ThreadPoolExecutor(8) as threads,
    ):
        answers: list[httpx.Response] = []
        while not any(one.status_code == 429 for one in answers):
            answers += threads.map(lambda _: ask(cluster, "eager", 16, 6), range(16))
        lengths = {len(tokens_of(one)) for one in answers if one.status_code == 200}
        assert lengths == {6, 4}
        capped = {one.headers.get("x-kvrelay-capped") for one in answers}
        assert capped == {None, "4"}
        codes = {one.json()["error"]["code"] for one in answers if one.status_code == 429}
        assert codes == {"tier_share_exhausted"}
        wait_until(lambda: ladder_step(cluster) == 0, "it has come down")
        assert len(tokens_of(ask(cluster, "eager", 16, 6))) == 6
    told = [r.getMessage() for r in caplog.records if r.getMessage().startswith("tier eager")]
    steps = ((1, "tighten"), (2, "cap"), (3, "trip"), (2, "cap"), (1, "tighten"), (0, "normal"))
    causes = [r"TTFT of \d+ of \d+ was over 0 ms"] * 3 + ["within its objectives for 1 s"] * 3
    for message, (step, name), cause in zip(told, steps, causes, strict=True):
        expected = rf"tier eager: admission at step {step} \({name}\): {cause}"
        assert re.fullmatch(expected, message), told
