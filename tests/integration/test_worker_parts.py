"""A worker that can't be put together leaves nothing open."""

from __future__ import annotations

import gc
import queue
from pathlib import Path

import pytest

from cluster.core.settings import WorkerSettings
from cluster.worker import build as parts
from cluster.worker.build import WorkerParts, build_worker
from cluster.worker.events import Incoming
from engine.core.activity import ReportActivity
from engine.runner import Engine
from kvrelay.errors import ModelError
from kvrelay.types import Role
from tests.contract.transport_kit import held
from tests.integration.split_kit import wait_until, worker_settings


def build(llama: Path) -> WorkerParts:
    inbox: queue.SimpleQueue[Incoming] = queue.SimpleQueue()
    return build_worker(worker_settings("prefill-0", Role.PREFILL, llama), inbox)


def fails(settings: WorkerSettings, engine: Engine, report: ReportActivity) -> None:
    raise ModelError("no times")


def test_what_was_open_is_closed_again(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted from a worker that was built and closed: libraries keep what they open at first."""
    build(llama).close()
    gc.collect()
    before = held()
    monkeypatch.setattr(parts, "step_times", fails)
    with pytest.raises(ModelError, match="no times"):
        build(llama)
    gc.collect()
    wait_until(lambda: no_more_than(before), f"no more is held than {before}")


def no_more_than(before: tuple[int, int, int]) -> bool:
    return all(now <= then for now, then in zip(held(), before, strict=True))
