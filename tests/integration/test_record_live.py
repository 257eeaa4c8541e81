"""What a live router recorded of mixed traffic makes a fresh core say the same, in another process.

Several tiers, refusals and those who come back, output that is cut, waits, stop strings, clients
that go, deadlines that pass, a worker that is killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvrelay.qos import QosTier, QosTiers
from kvrelay.types import Objectives, Role
from router.core.policy.choice import Policies
from router.text.request_fields import TierMatch
from tests.integration.split_kit import (
    Cluster,
    WorkerHost,
    running_cluster,
    wait_until,
    worker_settings,
)

TIERS = QosTiers(
    tiers=(
        QosTier(name="premium", share=0.25, objectives=Objectives(ttft_s=30.0, tpot_s=10.0)),
        QosTier(name="free", priority=1, objectives=Objectives(ttft_s=60.0, tpot_s=20.0)),
        QosTier(name="patient", priority=2, patience_s=30.0),
    ),
    default="free",
)
MATCH = TierMatch(values={tier.name: tier.name for tier in TIERS.tiers})
PLACES = 4
LONG, LONGER, ENDLESS = 400, 900, 8000


@pytest.mark.parametrize("placement", ["kv_aware", "random"])
def test_a_live_record_replays_to_identical_commands(
    long_llama: Path,
    hosts: tuple[WorkerHost, WorkerHost],
    tmp_path: Path,
    placement: str,
) -> None:
    record = tmp_path / "record.jsonl"
    with WorkerHost() as doomed:
        live(long_llama, hosts, doomed, record, placement)
    found = replayed(record)
    assert found["different"] is None
    assert found["events"].keys() - {"WorkerSuspected"} == {
        *("WorkerJoined", "WorkerSaid", "WorkerLost", "WorkerEnded", "Submitted", "Aborted"),
        *("DeadlinePassed", "ChoiceStopped"),
    }
    assert found["commands"].keys() >= {"Send", "Admit", "Deliver", "Refuse", "Fail"}


def replayed(record: Path) -> dict[str, Any]:
    """Where strings have other hashes."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.integration.replay", str(record)],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def live(
    model: Path,
    hosts: tuple[WorkerHost, WorkerHost],
    doomed: WorkerHost,
    record: Path,
    placement: str,
) -> None:
    """All that a router may go through, and its record closed at the end."""
    workers = [
        (host, worker_settings(f"{role}-0", role, model, max_running_requests=PLACES, qos=TIERS))
        for host, role in zip(hosts, (Role.PREFILL, Role.DECODE), strict=True)
    ]
    recording = {"record": str(record), "record_bytes": 1 << 30}
    patient = {"detect_s": 60.0}  # a worker is stopped for some seconds
    policies = Policies(placement=placement)
    with ExitStack() as stack:
        cluster = stack.enter_context(
            running_cluster(
                model,
                workers,
                qos=TIERS,
                tier_match=MATCH,
                policies=policies,
                **recording,
                **patient,
            )
        )
        threads = stack.enter_context(ThreadPoolExecutor(32))
        traffic = Traffic(cluster, threads)
        traffic.short()
        traffic.crowd(hosts[1])
        traffic.go_away()
        second = worker_settings(
            "doomed", Role.DECODE, model, max_running_requests=PLACES, qos=TIERS
        )
        cluster.add(doomed, second)
        traffic.death(doomed)


class Traffic:
    def __init__(self, cluster: Cluster, threads: ThreadPoolExecutor) -> None:
        self._cluster = cluster
        self._threads = threads
        self._core = cluster.router.process.dispatcher.core

    def ask(self, tier: str, tokens: int, *, deadline_ms: int = 0, **more: Any) -> httpx.Response:
        headers = {"x-customer-tier": tier}
        if deadline_ms:
            headers["x-deadline-ms"] = str(deadline_ms)
        body = {"prompt": [*range(2, 42)], "max_tokens": tokens, "temperature": 0} | more
        body = {"ignore_eos": True, **body}
        return self._cluster.http.post("/v1/completions", json=body, headers=headers)

    def submit(self, tier: str, tokens: int, **more: Any) -> Future[httpx.Response]:
        return self._threads.submit(self.ask, tier, tokens, **more)

    def short(self) -> None:
        """Of each tier, several choices, a stop string."""
        for i, tier in enumerate(TIERS.tiers):
            assert self.ask(tier.name, 8, n=1 + i).status_code == 200
        text = self.ask("free", 40).json()["choices"][0]["text"]
        assert text.strip()
        ended = self.ask("free", 40, stop=[text[len(text) // 2 :][:3]]).json()["choices"][0]
        assert ended["finish_reason"] == "stop"

    def crowd(self, decode: WorkerHost) -> None:
        """All places are taken, one of them by a request that was too late and that the worker has
        not released: who has a reserve gets it, one waits, others are refused."""
        self.wait_free()
        os.kill(decode.pid, signal.SIGSTOP)
        try:
            assert self.ask("free", 16, deadline_ms=2000).status_code == 504
            crowd = [self.submit("free", LONG) for _ in range(PLACES - 1)]
            wait_until(lambda: len(self._core.state.requests) == PLACES - 1, "all places are taken")
            refused = self.ask("free", LONG)
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                429,
                "slots_exhausted",
            )
            crowd += [self.submit("premium", LONG), self.submit("patient", LONG)]
            wait_until(lambda: len([*self._core.state.waiting]) == 1, "one waits")
            wait_until(lambda: len(self._core.state.requests) == PLACES + 1, "one has its own")
        finally:
            os.kill(decode.pid, signal.SIGCONT)
        assert {one.result().status_code for one in crowd} == {200}

    def wait_free(self) -> None:
        """The router has heard of all that have ended."""
        views = self._core.state.workers.values()
        wait_until(lambda: not any(v.outlook.sequences for v in views), "all places are free")

    def go_away(self) -> None:
        """Once a token has come."""
        self.wait_free()
        body = {"prompt": [5, 6, 7], "max_tokens": ENDLESS, "stream": True, "ignore_eos": True}
        headers = {"x-customer-tier": "premium"}
        with self._cluster.http.stream(
            "POST", "/v1/completions", json=body, headers=headers
        ) as response:
            assert response.status_code == 200
            next(line for line in response.iter_lines() if line.startswith("data: {"))

    def death(self, doomed: WorkerHost) -> None:
        """With requests on it, all of which end nevertheless."""
        views = self._core.state.workers.values()
        (view,) = [view for view in views if view.hello.name == "doomed"]
        asked = [self.submit("patient", LONGER) for _ in range(2 * PLACES)]
        wait_until(lambda: view.counters.decode_sequences > 0, "it decodes")
        doomed.kill()
        assert {one.result().status_code for one in asked} <= {200, 429}
