"""The ledger of a worker's start: its phases, what routers count, and how long most starts take."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.core.elastic.starts import MOST_STARTS, LatestStarts
from cluster.process.born import ledger_since
from engine.core.activity import PHASE_OF, Stage
from kvrelay.messages import WorkerHello
from kvrelay.starts import PhaseSeconds, StartLedger, StartPhase, start_text, whole_s
from kvrelay.types import Incarnation, Role
from router.core.load.starts import Starts
from router.live.metrics import RouterMetrics
from tests.unit.fake_dispatcher import FakeDispatcher
from tests.unit.router_kit import hello
from tests.unit.test_docs import REPOSITORY


def seconds(start: Sequence[PhaseSeconds]) -> dict[str, float]:
    return {one.phase: one.seconds for one in start if one.seconds}


def test_phases_sum_to_the_whole_and_those_left_out_are_zero() -> None:
    ledger = StartLedger(100.0)
    for phase, now_s in ((StartPhase.IMPORT, 100.5), (StartPhase.LOAD, 103.5)):
        ledger.enter(phase, now_s)
    ledger.enter(StartPhase.LOAD, 104.0)  # goes on
    ledger.enter(StartPhase.JOIN, 107.0)
    assert ledger.end(107.25)
    assert [one.phase for one in ledger.phases()] == [*StartPhase]
    assert seconds(ledger.phases()) == {"place": 0.5, "import": 3.0, "load": 3.5, "join": 0.25}
    assert whole_s(ledger.phases()) == 7.25


def test_it_ends_once() -> None:
    ledger = StartLedger(0.0)
    assert ledger.end(2.0)
    assert not ledger.end(3600.0), "another router, later"
    assert whole_s(ledger.phases()) == 2.0
    with pytest.raises(ValueError, match="join at 2"):
        ledger.enter(StartPhase.JOIN, 2.0)


def test_marks_out_of_order_are_refused() -> None:
    ledger = StartLedger(0.0)
    ledger.enter(StartPhase.LOAD, 2.0)
    with pytest.raises(ValueError, match=r"import at 3\.000 s follows load at 2\.000 s"):
        ledger.enter(StartPhase.IMPORT, 3.0)
    with pytest.raises(ValueError, match=r"compile at 1\.000 s follows load"):
        ledger.enter(StartPhase.COMPILE, 1.0)
    assert ledger.end(2.5)
    assert seconds(ledger.phases()) == {"place": 2.0, "load": 0.5}


def test_each_stage_that_a_process_tells_is_in_a_phase() -> None:
    assert PHASE_OF.keys() == {*Stage}
    assert {*StartPhase} - {*PHASE_OF.values()} == {StartPhase.NODE, StartPhase.JOIN}, "no stages"


def test_a_start_in_words() -> None:
    taken = {"place": 0.02, "import": 3.14, "fetch": 0.0, "load": 0.9, "join": 3.3}
    assert start_text(taken) == "7.4 s: import 3.1, load 0.9, join 3.3"
    assert start_text({"place": 0.01}) == "0.0 s"


def test_a_process_knows_when_it_was_executed() -> None:
    code = """
from cluster.process.born import ledger_of_process, _exec_s
import time
told = _exec_s()
ledger = ledger_of_process()
ledger.end(time.monotonic())
print(told + time.time() - time.monotonic(), ledger.phases()[1].seconds)
"""
    before = time.time()
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    at, place_s = map(float, done.stdout.split())
    assert before - 0.05 <= at <= time.time()
    assert 0 < place_s < time.time() - at


def test_it_is_the_time_that_the_kernel_says() -> None:
    from cluster.process.born import _exec_s

    at = _exec_s() + time.time() - time.monotonic()
    assert at == pytest.approx(psutil.Process(os.getpid()).create_time(), abs=1.1)


def test_on_ray_a_start_begins_with_the_wish_for_it() -> None:
    ledger = ledger_since(time.time() - 30, raylet=1)
    ledger.end(time.monotonic())
    assert seconds(ledger.phases())["place"] == pytest.approx(30, abs=0.5)
    ledger = ledger_since(time.time() + 5, raylet=1)  # another host's clock
    ledger.end(time.monotonic())
    assert ledger.phases()[1].seconds == 0


def test_a_node_that_came_for_a_worker_is_a_phase_of_its_start() -> None:
    with subprocess.Popen(["sleep", "60"]) as raylet:
        ledger = ledger_since(time.time() - 30, raylet.pid)
        raylet.kill()
    ledger.end(time.monotonic())
    node, place, *_ = ledger.phases()
    assert (node.phase, place.phase) == ("node", "place")
    assert node.seconds == pytest.approx(30, abs=0.5) and place.seconds < 0.5


# --- what routers count, and say ----------------------------------------------------------------


def start(**taken: float) -> tuple[PhaseSeconds, ...]:
    return tuple(PhaseSeconds(phase=name, seconds=s) for name, s in taken.items())


def test_a_histogram_for_each_phase_and_the_whole() -> None:
    starts = Starts()
    starts.note(start(load=0.25, join=1.0))
    starts.note(start(load=3.0, join=700.0))
    told = starts.told()
    assert [*told] == ["load", "join", "whole"]
    assert told["load"].up_to()[0.1] == 0
    assert told["load"].up_to()[0.25] == 1, "at most"
    assert told["load"].up_to()[2.5] == 1
    assert told["load"].up_to()[5.0] == 2
    assert told["whole"].sum == 704.25
    assert [*told["join"].up_to().values()][-2:] == [1, 2], "the last one has no border"


def test_the_histogram_in_a_scrape() -> None:
    starts = Starts()
    starts.note(start(load=0.3))
    dispatcher = FakeDispatcher(starts=starts.told())
    text = RouterMetrics("m").exposition(dispatcher.snapshot()).decode()
    families = {one.name: one for one in text_string_to_metric_families(text)}
    samples = families["kvrelay:start_seconds"].samples
    found = {
        (one.name.rpartition("_")[2], one.labels["phase"], one.labels.get("le")): one.value
        for one in samples
    }
    assert found["bucket", "load", "0.25"] == 0
    assert found["bucket", "load", "0.5"] == 1
    assert found["bucket", "load", "+Inf"] == 1
    assert found["count", "load", None] == 1
    assert found["sum", "whole", None] == 0.3


# --- how far ahead a worker has to be wanted ----------------------------------------------------


def told(number: int, whole: float) -> WorkerHello:
    name = f"w{number}"
    return replace(
        hello(name, Role.BOTH), incarnation=Incarnation(name), start=start(load=whole - 1, join=1)
    )


def test_the_p90_of_starts_counts_each_once() -> None:
    latest = LatestStarts(guess_s=60.0)
    assert latest.p90_s == 60.0
    for number in range(1, 11):
        latest.hear(told(number, float(number)))
    assert latest.p90_s == 9.0
    for _ in range(5):
        latest.hear(told(10, 10.0))
    assert latest.p90_s == 9.0
    latest.hear(hello("unknown", Role.BOTH))
    assert latest.p90_s == 9.0


def test_old_starts_are_forgotten() -> None:
    latest = LatestStarts(guess_s=60.0)
    latest.hear(told(0, 500.0))
    for number in range(1, MOST_STARTS + 1):
        latest.hear(told(number, 2.0))
    assert latest.p90_s == 2.0
    assert len(latest._seconds) == MOST_STARTS


def test_the_documented_starts_have_the_phases_of_today() -> None:
    told = (REPOSITORY / "docs/operating.md").read_text(encoding="utf-8")
    starts = re.findall(r"(?m)^\S+ serves after ([\d.]+) s: (.*)$", told)
    assert starts
    for whole, parts in starts:
        seconds = {name: float(s) for name, s in (part.split() for part in parts.split(", "))}
        order = [str(phase) for phase in StartPhase if phase in seconds]
        assert [*seconds] == order and order[0] == StartPhase.PLACE
        assert sum(seconds.values()) == pytest.approx(float(whole), abs=0.5)
