"""Peers of benchmarks: halted while others are measured, gone at the end with all they started."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from bench.peer_vllm import process
from bench.peer_vllm.engines import STREAM, Done, _agreement, _checked
from bench.peer_vllm.process import peer
from bench.peer_vllm.serving import Objectives
from bench.serving.http_load import Sent

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "print('up', flush=True); input()"])
print("there", child.pid, flush=True)
child.wait()
"""


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


@pytest.mark.processes
def test_a_peer_and_its_children_stand_still_but_for_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "PYTHON", Path(sys.executable))
    core = min(os.sched_getaffinity(0))
    with peer(["-c", PARENT], [core]) as started:
        assert started.process.stdout is not None
        said = started.process.stdout.readline().split()
        family = [psutil.Process(started.process.pid), psutil.Process(int(said[1]))]
        assert [one.cpu_affinity() for one in family] == [[core], [core]]

        def stand_still() -> bool:
            return {one.status() for one in family} == {psutil.STATUS_STOPPED}

        started.halt()
        until(stand_still)
        with started.at_work():
            until(lambda: psutil.STATUS_STOPPED not in {one.status() for one in family})
        until(stand_still)
    until(lambda: not any(one.is_running() for one in family))


def test_without_its_environment_it_says_what_to_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(process, "PYTHON", tmp_path / "python")
    with pytest.raises(SystemExit, match="make bench-peers"), peer([], [0]):
        pass


def test_goodput_asks_for_both_objectives() -> None:
    objectives = Objectives(ttft_s=1.0, tpot_s=0.1)

    def sent(first_s: float, gap_s: float) -> Sent:
        return Sent(token_s=(first_s, first_s + gap_s, first_s + 2 * gap_s), ledger_ms={})

    assert objectives.kept(sent(0.9, 0.09))
    assert not objectives.kept(sent(1.1, 0.09))
    assert not objectives.kept(sent(0.9, 0.11))


def test_how_many_tokens_are_the_same() -> None:
    assert _agreement([[1, 2], [3, 4]], [[1, 2], [3, 5]]) == 0.75


def test_too_few_tokens_are_no_measurement() -> None:
    with pytest.raises(AssertionError):
        _checked(Done(seconds=1.0, ids=[[1, 2]]), STREAM)
