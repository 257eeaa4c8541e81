"""Pauses of the garbage collector: what a started process spares, measures and shows."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from kvrelay.counters import Counters
from kvrelay.gc_pauses import GcPauses
from kvrelay.wire import decode_counters, encode_batch
from router.core.state.generation import PoolNodeStatus
from router.live.metrics import RouterMetrics
from tests.unit.fake_dispatcher import WORKER, FakeDispatcher

FROZEN = """
import gc
from kvrelay.gc_pauses import PAUSES, freeze
kept = [[] for _ in range(100_000)]
freeze()
assert gc.get_freeze_count() > 100_000
assert PAUSES.count == 0, "the last collection is not one of those to come"
gc.collect()
freeze()
assert gc.callbacks.count(PAUSES) == 1
gc.collect()
assert PAUSES.count == 3, PAUSES
assert 0 < PAUSES.longest_s <= PAUSES.total_s
"""


def test_a_started_process_freezes_and_measures() -> None:
    subprocess.run([sys.executable, "-c", FROZEN], check=True, timeout=60)


IMPORTING = """
import gc
from kvrelay.gc_pauses import PAUSES, paused
gc.callbacks.append(PAUSES)
try:
    with paused():
        kept = [[] for _ in range(100_000)]
        assert PAUSES.count == 0
        raise ImportError
except ImportError:
    assert gc.isenabled()
kept += [[] for _ in range(100_000)]
assert PAUSES.count > 0
gc.disable()
with paused():
    pass
assert not gc.isenabled(), "as before"
"""


def test_nothing_is_collected_while_a_process_imports() -> None:
    subprocess.run([sys.executable, "-c", IMPORTING], check=True, timeout=60)


def test_pauses_add_up() -> None:
    pauses = GcPauses()
    for seconds in (0.25, 0.5, 0.125):
        pauses.saw(seconds)
    assert (pauses.count, pauses.total_s, pauses.longest_s) == (3, 0.875, 0.5)
    GcPauses()("stop", {})  # of a collection that had begun before
    assert pauses.count == 3


def test_routers_workers_and_pool_nodes_show_theirs() -> None:
    worker = replace(
        WORKER, counters=Counters(gc_pauses=2, gc_pause_s=0.5, gc_longest_pause_s=0.375)
    )
    node = PoolNodeStatus(name="pool", orphaned_blocks=0, blocks={}, pauses=GcPauses(1, 0.25, 0.25))
    fake = FakeDispatcher(statuses=(worker,), pools=(node,), pauses=GcPauses(3, 1.0, 0.75))
    text = RouterMetrics("m").exposition(fake.snapshot()).decode()
    shown = {
        (sample.labels["process"], sample.name.removeprefix("kvrelay:gc_")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "gc_" in sample.name
    }
    assert shown == {
        ("router", "pause_seconds_count"): 3,
        ("router", "pause_seconds_sum"): 1.0,
        ("router", "longest_pause_seconds"): 0.75,
        ("both-0", "pause_seconds_count"): 2,
        ("both-0", "pause_seconds_sum"): 0.5,
        ("both-0", "longest_pause_seconds"): 0.375,
        ("pool", "pause_seconds_count"): 1,
        ("pool", "pause_seconds_sum"): 0.25,
        ("pool", "longest_pause_seconds"): 0.25,
    }


def test_a_workers_pauses_travel_with_its_counters() -> None:
    told = Counters(gc_pauses=2, gc_pause_s=0.5, gc_longest_pause_s=0.375)
    assert decode_counters(encode_batch([], told, 0.0).counters) == told
