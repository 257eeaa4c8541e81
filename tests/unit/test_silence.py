"""Workers that say nothing: when a router suspects one, when it is lost, and what follows."""

from __future__ import annotations

import random

import pytest

from kvrelay.messages import Reserve, Suspect
from kvrelay.types import Incarnation, Role
from router.core.events import Command, Send, WorkerJoined, WorkerLost, WorkerSuspected
from router.core.faults.silence import DETECT_S, PERIOD_S, SUSPECT_S, Silence
from tests.unit.router_kit import core_with, hello, reserved, says, submit, tokens

A, B = Incarnation("a"), Incarnation("b")
P, D, D2 = Incarnation("p"), Incarnation("d"), Incarnation("d2")


class Clock:
    """A look every PERIOD_S."""

    def __init__(self, *workers: Incarnation, detect_s: float = DETECT_S) -> None:
        self.silence = Silence(now_s=0.0, detect_s=detect_s)
        self.now_s = 0.0
        for worker in workers:
            self.silence.joined(worker)

    def run(
        self, seconds: float, *reporting: Incarnation
    ) -> tuple[dict[Incarnation, float], dict[Incarnation, float]]:
        """(when each was suspect, when each was lost) since the start of this run"""
        suspects: dict[Incarnation, float] = {}
        lost: dict[Incarnation, float] = {}
        passed_s = 0.0
        while passed_s < seconds:
            passed_s += PERIOD_S
            self.now_s += PERIOD_S
            for worker in reporting:
                self.silence.heard(worker)
            suspected, gone = self.silence.look(self.now_s)
            assert not (suspects.keys() & {*suspected} or lost.keys() & {*gone}), "told once"
            suspects |= dict.fromkeys(suspected, passed_s)
            lost |= dict.fromkeys(gone, passed_s)
        return suspects, lost


def test_a_silent_worker_is_suspect_then_lost() -> None:
    clock = Clock(A, B)
    assert clock.run(60.0, B) == ({A: SUSPECT_S + PERIOD_S}, {A: DETECT_S + PERIOD_S})
    clock.silence.heard(A)
    assert clock.run(60.0, B) == ({}, {}), "it is forgotten until it joins again"
    clock.silence.joined(A)
    assert clock.run(60.0, B) == ({A: SUSPECT_S + PERIOD_S}, {A: DETECT_S + PERIOD_S})


def test_a_report_ends_the_suspicion() -> None:
    clock = Clock(A)
    for _ in range(3):
        suspects, lost = clock.run(3.0)
        assert suspects == {A: pytest.approx(SUSPECT_S, abs=PERIOD_S)} and not lost
        assert clock.run(1.0, A) == ({}, {})


def test_one_that_has_left_is_not_lost_too() -> None:
    clock = Clock(A)
    clock.silence.left(A)
    clock.silence.left(B)
    assert clock.run(60.0) == ({}, {})


@pytest.mark.parametrize(("detect_s", "suspect_s"), [(1.0, 0.5), (3.0, 1.5), (60.0, SUSPECT_S)])
def test_suspicion_comes_before_the_loss(detect_s: float, suspect_s: float) -> None:
    clock = Clock(A, detect_s=detect_s)
    assert clock.run(90.0) == ({A: suspect_s + PERIOD_S}, {A: detect_s + PERIOD_S})


def test_nobody_is_blamed_for_the_routers_own_pause() -> None:
    clock = Clock(A, B)
    for _ in range(20):
        clock.now_s += 3600.0
        assert clock.run(1.0, A, B) == ({}, {})
    clock.run(1.0)
    clock.now_s += 3600.0
    suspects, lost = clock.run(60.0, B)
    assert [*suspects] == [*lost] == [A], "one that is silent is found all the same"


@pytest.mark.parametrize("seed", range(20))
def test_random_reports_against_a_naive_model(seed: int) -> None:
    """The model adds up each worker's silence between looks, a pause of the router excepted."""
    rng = random.Random(seed)
    names = [Incarnation(f"w{i}") for i in range(6)]
    silence, now_s = Silence(now_s=0.0), 0.0
    silent_s: dict[Incarnation, float] = {}
    suspects: set[Incarnation] = set()
    losses = 0
    for _ in range(4000):
        name = rng.choice(names)
        if name not in silent_s and rng.random() < 0.3:
            silence.joined(name)
            silent_s[name] = 0.0
        elif rng.random() < rng.choice([0.0, 0.5]):
            silence.heard(name)
            if name in silent_s:
                silent_s[name] = 0.0
                suspects.discard(name)
        elif rng.random() < 0.02:
            silence.left(name)
            silent_s.pop(name, None)
            suspects.discard(name)
        passed_s = rng.choice([0.125, 0.25, 0.5, 0.5, 1024.0])  # exact sums
        now_s += passed_s
        for one in silent_s:
            silent_s[one] += min(passed_s, 2 * PERIOD_S)
        lost = [one for one, seconds in silent_s.items() if seconds > DETECT_S]
        silent_s = {one: s for one, s in silent_s.items() if one not in lost}
        newly = [one for one, s in silent_s.items() if s > SUSPECT_S and one not in suspects]
        suspects = (suspects | {*newly}) - {*lost}
        assert silence.look(now_s) == (newly, lost)
        losses += len(lost)
    assert losses > 20


# --- what the router's core makes of it -----------------------------------------------------------


def asked(commands: list[Command]) -> list[Incarnation]:
    sends = [c for c in commands if isinstance(c, Send)]
    return [c.worker for c in sends if isinstance(c.message, Reserve)]


def told(commands: list[Command]) -> list[tuple[Incarnation, Incarnation]]:
    """(who is told, who is silent)"""
    sends = [c for c in commands if isinstance(c, Send)]
    return [(c.worker, c.message.incarnation) for c in sends if isinstance(c.message, Suspect)]


def test_nothing_new_goes_to_a_suspect_while_others_can_take_it() -> None:
    core = core_with(p=Role.PREFILL, d=Role.DECODE, d2=Role.DECODE)
    assert core.handle(WorkerSuspected(incarnation=D), 0.5) == []
    for i in range(3):
        assert asked(submit(core, f"r{i}")) == [D2]
    says(core, "d")
    assert asked(submit(core, "again")) == [D], "its report ends the suspicion; it has less to do"


def test_a_suspect_is_used_where_there_is_no_other() -> None:
    core = core_with(p=Role.PREFILL, d=Role.DECODE)
    for worker in (P, D, Incarnation("never seen")):
        core.handle(WorkerSuspected(incarnation=worker), 0.5)
    assert asked(submit(core)) == [D]


def test_requests_of_a_suspect_stay_there_until_it_is_lost() -> None:
    core = core_with(p=Role.PREFILL, d=Role.DECODE, d2=Role.DECODE)
    submit(core)
    says(core, "d", reserved())
    assert core.handle(WorkerSuspected(incarnation=D), 3) == []
    commands = core.handle(WorkerLost(incarnation=D, was_silent=True), 6)
    assert asked(commands) == [D2]
    assert told(commands) == [(P, D), (D2, D)]
    assert says(core, "d", tokens(0, 10)) == [], "a late word of it is ignored"
    assert D not in core.state.workers
    core.handle(WorkerJoined(hello=hello("d", Role.DECODE)), 7)
    assert says(core, "d", tokens(0, 10)) == []
    core.validate()


def test_only_silence_is_told_to_the_others() -> None:
    core = core_with(p=Role.PREFILL, d=Role.DECODE, d2=Role.DECODE)
    assert told(core.handle(WorkerLost(incarnation=D), 6)) == []
