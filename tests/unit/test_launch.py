"""What `kvrelay serve` does while its controller does not answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

import pytest
import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError

from cluster.core.supervision import Phase
from cluster.on_ray import launch
from cluster.on_ray.launch import Driver
from cluster.on_ray.reports import ControllerReport
from kvrelay.errors import KvrelayError

Answer: TypeAlias = ControllerReport | RayError | None


class SilentController:
    """Answers with a report; None stands for a call that times out."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = iter(answers)
        self.heartbeat = self

    def remote(self, seen: int, stop: bool) -> Answer:
        report = next(self._answers)
        if isinstance(report, ControllerReport):
            return replace(report, notes=report.notes[seen:])
        return report


def report(
    phase: Phase, controller: str = "first", notes: tuple[str, ...] = ()
) -> ControllerReport:
    return ControllerReport(
        settled=True,
        controller=controller,
        phase=phase,
        error=None,
        troubles=(),
        notes=notes,
        noted=len(notes),
        model="m",
        routers=(),
        downloads={},
    )


READY, STARTING = report(Phase.READY), report(Phase.STARTING)


def get(answer: Answer, timeout: float) -> ControllerReport:
    if isinstance(answer, RayError):
        raise answer
    if answer is None:
        raise GetTimeoutError(f"nothing for {timeout:g} s")
    return answer


def driver(monkeypatch: pytest.MonkeyPatch, said: list[str], *answers: Answer) -> Driver:
    monkeypatch.setattr(ray, "get", get)
    controller: Any = SilentController(*answers)
    return Driver("mine", controller, idle_beat_s=0.0, say=said.append)


def test_the_notes_of_a_restarted_controller_are_all_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    first = report(Phase.READY, notes=("a", "b"))
    restarted = report(Phase.READY, controller="second", notes=("c", "d"))
    one = driver(monkeypatch, said, first, first, restarted, restarted, restarted)
    for _ in range(4):
        one._beat()
    assert said == ["a", "b", "c", "d"]


def test_a_cluster_that_is_ready_outlives_a_pause_of_its_controller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    one = driver(monkeypatch, said, READY, None, None, READY)
    assert one.wait_ready().phase is Phase.READY
    assert one._beat().phase is Phase.READY
    assert said == ["the controller has not answered for 60 s"] * 2


def test_a_start_outlives_a_pause_of_its_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    one = driver(monkeypatch, said, STARTING, None, READY)
    assert one.wait_ready().phase is Phase.READY
    assert said == ["the controller has not answered for 60 s"]


def test_a_stop_gives_up_a_controller_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    one = driver(monkeypatch, [], READY, None)
    one._beat()
    one.stop()
    with pytest.raises(KvrelayError, match="the controller is lost"):
        one._beat()


STOPPING = report(Phase.STOPPING)


@pytest.mark.parametrize("last", [READY, STOPPING, replace(STOPPING, error="it can't start")])
@pytest.mark.parametrize("has_record", [False, True])
def test_a_controller_that_ended_its_cluster_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, last: ControllerReport, has_record: bool
) -> None:
    """Another command stopped it, and it was gone before this one asked again."""
    monkeypatch.setattr(launch, "has_ended", lambda name: not has_record)
    monkeypatch.setattr(launch, "_wait_gone", lambda name: None)
    one = driver(monkeypatch, [], last, ActorDiedError())
    if has_record:
        with pytest.raises(KvrelayError, match="the controller is lost"):
            one.follow()
    elif last.error is not None:
        with pytest.raises(KvrelayError, match="it can't start"):
            one.follow()
    else:
        assert one.follow().phase is Phase.STOPPED


def test_nobody_waits_for_a_process_that_will_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = replace(READY, settled=False, troubles=("router-0 refused d: another model",))
    one = driver(monkeypatch, [], replace(READY, settled=False), refused)
    monkeypatch.setattr(launch, "BEAT_S", 0.0)
    with pytest.raises(KvrelayError, match="router-0 refused d: another model"):
        one.wait_settled()
