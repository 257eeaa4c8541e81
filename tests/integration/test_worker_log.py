"""A worker logs what it does, and says once that it is idle."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from cluster.core.worker.reports import IDLE_LINE
from cluster.worker import process
from kvrelay.types import Role
from tests.integration.local_kit import LocalHost
from tests.integration.split_kit import running_cluster, wait_until, worker_settings


def test_a_worker_logs_its_activity(
    llama: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "PERIOD_S", 0.05)
    caplog.set_level(logging.INFO, logger="cluster")
    worker = worker_settings("both-0", Role.BOTH, llama)
    with LocalHost() as host, running_cluster(llama, [(host, worker)]) as cluster:
        wait_until(lambda: IDLE_LINE in caplog.messages, "it says that it is idle")
        cluster.completion(list(range(2, 100)), max_tokens=32, ignore_eos=True)
        wait_until(lambda: any(" out; requests: " in m for m in caplog.messages), "it tells")
        wait_until(lambda: caplog.messages.count(IDLE_LINE) == 2, "it is idle again")
