"""bench.chaos, short: whatever is killed or stopped under load, no stream and no block is lost."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench.chaos.clusters.plain import Shape
from bench.chaos.prompts import Lengths
from bench.chaos.run import Plan, run
from bench.chaos.shown import show, verdict
from bench.chaos.streams import Outcome

PLAN = Plan(
    seed=5,
    minutes=0.75,
    every_s=5.0,
    streams=8,
    share=0.4,
    lengths=Lengths(prompt=(32, 256), output=(32, 160)),
    shape=Shape(kv_mib=64, pool_mib=64),
    second_host=False,
)


def test_faults_under_load_lose_nothing(tmp_path: Path) -> None:
    found = asyncio.run(run(replace(PLAN, logs=tmp_path), partial(print, flush=True)))
    given = verdict(found)
    show(PLAN, found, given)
    assert len(found.seen) >= 6
    assert found.count(Outcome.COMPLETED) >= 50
    assert found.unrepeatable == 0
    assert [(one.request_id, one.error) for one in given.failed] == []
    assert [(one.request_id, why) for one, why in given.wrong] == []
    assert given.leaked == []
    assert given.unasked == []
