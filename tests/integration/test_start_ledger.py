"""A worker's ledger of its start, as routers have it: its sum is the time that it took. And its
command's rule."""

from __future__ import annotations

import re
import time
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from cluster.cli.status.asked import of_router
from tests.access import ACCESS, HEADERS
from tests.integration.plain_kit import Process, RouterAddresses, start_router, start_worker
from tests.integration.plain_kit import here as here
from tests.integration.ray_head import Marked, until


def end(*processes: Process) -> None:
    for process in processes:
        process.terminate()
        assert process.wait(30) == 0


def started(router: RouterAddresses) -> dict[str, float]:
    """# phase |-> seconds, of the one worker; empty: it is not there yet"""
    workers = of_router(router.internal, ACCESS)["workers"]
    assert isinstance(workers, list)
    return {one["phase"]: one["seconds"] for worker in workers for one in worker["start"]}


def samples(log: Path, family: str) -> list[Sample]:
    """As this router tells them."""
    (at,) = re.findall(r"(?m)^internal HTTP on (\S+:\d+)", log.read_text())
    text = httpx.get(f"http://{at}/metrics", headers=HEADERS, timeout=30).text
    families = {one.name: one for one in text_string_to_metric_families(text)}
    return families[family].samples


def counted(log: Path) -> dict[str, float]:
    """# phase |-> starts that this router counts"""
    found = samples(log, "kvrelay:start_seconds")
    return {one.labels["phase"]: one.value for one in found if one.name.endswith("_count")}


def test_the_phases_of_a_start_sum_to_it(here: Marked, tmp_path: Path) -> None:
    """The first router counts it; one that comes later is told the same."""
    serving, router = start_router(here, tmp_path / "r")
    from_s = time.monotonic()
    rule = ("--takes", "{max_prompt_tokens: 4000}")
    worker = start_worker(here, [router], "both", tmp_path / "w", *rule)
    phases = until(lambda: started(router))
    took_s = time.monotonic() - from_s
    assert sum(phases.values()) == pytest.approx(took_s, rel=0.05, abs=0.3)
    assert phases["import"] > 0.5
    assert phases["load"] > 0
    assert phases["compile"] > 0
    assert phases["time"] > 0
    assert phases["fetch"] == phases["record"] == 0
    (line,) = re.findall(r"both-\d+ serves after ([\d.]+) s: (.*)", (tmp_path / "w").read_text())
    assert float(line[0]) == pytest.approx(sum(phases.values()), abs=0.06)
    assert re.search(r"import [\d.]+, ", line[1])
    assert counted(tmp_path / "r") == dict.fromkeys([*phases, "whole"], 1.0)
    (takes,) = samples(tmp_path / "r", "kvrelay:pool_takes_info")
    assert (takes.labels["pool"], "4000" in takes.labels["takes"]) == ("both", True)
    end(serving)
    second, router = start_router(here, tmp_path / "r2", again=router)
    assert until(lambda: started(router)) == phases
    assert counted(tmp_path / "r2") == {}
    end(worker, second)
