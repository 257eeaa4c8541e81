"""What a worker did lately: as it logs it, and as a router tells it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.core.worker.reports import IDLE_LINE, ActivityLog
from kvrelay.counters import Activity, Counters, activity
from router.live.status import WINDOW_S, RecentActivity

BUSY = Counters(
    free_blocks=50,
    cached_blocks=25,
    running=3,
    waiting=2,
    prompt_tokens=1_000,
    generated_tokens=200,
    prefix_queried_tokens=800,
    prefix_hit_tokens=200,
    transfer_bytes=5_000_000_000,
)
"""Ten seconds after a worker with all 100 blocks free began."""


def test_rates_are_means_over_the_time_between_two_readings() -> None:
    found = activity(Counters(free_blocks=100), BUSY, 10.0, 100)
    assert found == Activity(
        prompt_tokens_per_s=100.0,
        generated_tokens_per_s=20.0,
        running=3,
        waiting=2,
        kv_used=0.25,
        hit_rate=0.25,
        transfer_bytes_per_s=500_000_000.0,
    )


def test_without_time_or_lookups_there_is_no_rate() -> None:
    found = activity(BUSY, BUSY, 0.0, 100)
    assert found.prompt_tokens_per_s == 0 and found.hit_rate is None
    assert not found.idle  # requests run


def test_a_worker_logs_its_activity() -> None:
    log = ActivityLog(total_blocks=100)
    assert log.line(Counters(free_blocks=100), 0.0) is None
    assert log.line(BUSY, 10.0) == (
        "tokens/s: 100.0 in, 20.0 out; requests: 3 running, 2 waiting; "
        "KV: 25% used, 25% prefix hits, 500.0 MB/s moved"
    )


def test_an_idle_worker_says_so_once() -> None:
    log = ActivityLog(total_blocks=100)
    idle = replace(BUSY, running=0, waiting=0)
    lines = [log.line(idle, 10.0 * i) for i in range(4)]
    assert lines == [None, IDLE_LINE, None, None]
    assert "3 running" in (log.line(replace(BUSY, prompt_tokens=2_000), 40.0) or "")
    done = replace(BUSY, prompt_tokens=2_000, running=0, waiting=0)
    assert [log.line(done, 50.0), log.line(done, 60.0)] == [IDLE_LINE, None]


def test_a_router_tells_the_rates_of_the_last_seconds() -> None:
    recent = RecentActivity(total_blocks=100)
    assert recent.activity() == Activity()
    for tenth in range(601):  # ten reports a second for a minute; 100 tokens/s, then 10
        seconds = tenth / 10
        tokens = 100 * min(seconds, 30.0) + 10 * max(0.0, seconds - 30.0)
        recent.heard(Counters(generated_tokens=round(tokens), running=tenth), seconds)
    assert recent.activity().generated_tokens_per_s == pytest.approx(10.0, rel=0.05)
    assert recent.activity().running == 600
    assert len(recent._samples) <= WINDOW_S + 2
