"""When a step on the device is given up, and what ends the process then."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
import time
from collections import deque
from math import inf
from types import SimpleNamespace

import pytest

from cluster.core.worker.watchdog import (
    COUNTED_S,
    FIRST_USE_S,
    LEAST_S,
    TIMES_PREDICTED,
    UNPREDICTED_S,
    HungStep,
    StepKind,
    StepWatch,
)
from cluster.worker import watchdog
from cluster.worker.watchdog import EXIT_HUNG_STEP, Watchdog
from engine.core.own_time import OwnTime
from engine.core.step import RunStep, SequenceSlice, StepBatch
from engine.core.step_times import LinearTimes
from engine.device.first_use import FirstUses
from kvrelay.types import RequestKey
from tests.forks import forks

PERIOD_S = 0.25
TIMES = LinearTimes(prefill_token_s=0.01, decode_knots=((1, 0.01), (8, 0.08)))
PATIENCE_S = 20.0


def step(*counts: int) -> RunStep:
    """Slices with this many tokens each; one token decodes."""
    slices = [
        SequenceSlice(key=RequestKey(str(i), 0), choice=0, token_ids=(5,) * n, start=7, tables=())
        for i, n in enumerate(counts)
    ]
    return RunStep(batch=StepBatch(slices=tuple(slices)))


class Clock:
    """Looks every PERIOD_S."""

    def __init__(self, watch: StepWatch) -> None:
        self.watch = watch
        self.now_s = 0.0

    def run(self, seconds: float, compiles: str | None = None) -> HungStep | None:
        """Until then, or until the step is given up."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += PERIOD_S
            if (hung := self.watch.look(self.now_s, compiles)) is not None:
                return hung
        return None


def clock(*, guessed: bool = False) -> Clock:
    return Clock(StepWatch(TIMES, 0.0, guessed=guessed))


def test_a_short_step_is_given_up_after_ten_seconds() -> None:
    c = clock()
    c.watch.launched(step(1, 1))
    assert c.run(LEAST_S) is None
    hung = c.run(2 * PERIOD_S)
    assert hung is not None
    assert (hung.kind, hung.sequences, hung.tokens) == (StepKind.DECODE, 2, 2)
    assert hung.predicted_s == TIMES.decode_s(2, 14)
    assert LEAST_S < hung.ran_s <= LEAST_S + PERIOD_S
    told = "a decode step (sequences: 2, tokens: 2) has not ended after 10.2 s, predicted: 0.020 s"
    assert str(hung) == told


@pytest.mark.parametrize(
    ("counts", "kind"), [((600,), StepKind.PREFILL), ((600, 1), StepKind.MIXED)]
)
def test_a_long_step_has_five_times_what_is_predicted(
    counts: tuple[int, ...], kind: StepKind
) -> None:
    c = clock()
    c.watch.launched(step(*counts))
    limit_s = TIMES_PREDICTED * TIMES.step_s(step(*counts).batch.work)
    assert limit_s > 2 * LEAST_S
    assert c.run(limit_s - PERIOD_S) is None
    hung = c.run(3 * PERIOD_S)
    assert hung is not None and hung.kind is kind


def test_a_step_that_no_measurement_covers_has_a_minute() -> None:
    c = clock()
    c.watch.launched(step(*(1,) * 9))
    assert c.run(UNPREDICTED_S) is None
    hung = c.run(2 * PERIOD_S)
    assert hung is not None and hung.predicted_s is None
    assert "predicted: unknown" in str(hung)


def test_a_pause_of_the_process_does_not_count() -> None:
    c = clock()
    c.watch.launched(step(1))
    for _ in range(10):
        assert c.run(0.25) is None
        c.now_s += 3600.0
    assert c.run(LEAST_S - 10 * COUNTED_S - 2.0) is None
    assert c.run(10.0) is not None


def test_a_clock_that_goes_back_counts_nothing() -> None:
    time_ = OwnTime(most_s=1.0, looked_s=5.0)
    assert [time_.since_last(at) for at in (5.5, 3.0, 3.25, 9.0)] == [0.5, 0.0, 0.25, 1.0]


def test_each_step_has_its_own_time() -> None:
    """Also one that was launched while the one before it ran."""
    c = clock()
    for _ in range(3):
        c.watch.launched(step(1))
        assert c.run(9.0) is None
        c.watch.launched(step(1))
        c.watch.ended()
        assert c.run(9.0) is None
        c.watch.ended()
        assert c.run(60.0) is None, "nothing runs"
    c.watch.launched(step(1))
    c.watch.launched(step(600))
    assert c.run(11.0) is not None


def test_compiling_has_a_limit_of_its_own() -> None:
    c = clock()
    c.watch.launched(step(1))
    assert c.run(9.0) is None
    assert c.run(FIRST_USE_S, "the kernel k") is None
    assert c.run(0.5) is None, "the step itself has run for ten seconds only"
    hung = c.run(1.0)
    assert hung is not None and hung.compiles is None
    c = clock()
    c.watch.launched(step(1))
    hung = c.run(inf, "the kernel k")
    assert hung is not None and hung.ran_s == pytest.approx(FIRST_USE_S, abs=1.0)
    assert "while it compiled the kernel k" in str(hung)


def test_the_first_step_of_a_kind_has_time_where_times_are_guessed() -> None:
    c = clock(guessed=True)
    c.watch.launched(step(1))
    assert c.run(FIRST_USE_S - 1.0) is None
    c.watch.ended()
    c.watch.launched(step(600))
    assert c.run(FIRST_USE_S - 1.0) is None
    c.watch.ended()
    c.watch.launched(step(1))
    assert c.run(LEAST_S + 1.0) is not None


@pytest.mark.parametrize("seed", range(20))
def test_random_schedules_keep_to_the_limit(seed: int) -> None:
    """Against a model that knows when each step really ran."""
    rng, c = random.Random(seed), clock()
    running: deque[tuple[RunStep, float]] = deque()  # with the time for which it has run
    given_up, ends = 0, 0.3
    for _ in range(3000):
        if len(running) < 2 and rng.random() < 0.3:
            one = step(*rng.choice([(1,), (1, 1), (400,), (300, 1), (1,) * 9]))
            running.append((one, 0.0))
            c.watch.launched(one)
        if running and rng.random() < ends:
            running.popleft()
            c.watch.ended()
            ends = rng.choice([0.3, 0.003])
        passed_s = rng.choice([0.1, 0.25, 0.4, 5000.0])
        c.now_s += passed_s
        hung = c.watch.look(c.now_s)
        if running:
            one, ran_s = running.popleft()
            ran_s += min(passed_s, COUNTED_S)
            running.appendleft((one, ran_s))
            work = one.batch.work
            covered = work.decode_sequences < 9
            limit_s = TIMES_PREDICTED * TIMES.step_s(work) if covered else UNPREDICTED_S
            limit_s = max(limit_s, LEAST_S)
            assert hung is None or ran_s > limit_s, (ran_s, hung)
            assert hung is not None or ran_s <= limit_s + 2 * COUNTED_S, (ran_s, one)
            given_up += hung is not None
        else:
            assert hung is None
    assert given_up


# --- the thread -----------------------------------------------------------------------------------


def hung_device(least_s: float = 0.3) -> StepWatch:
    watch = StepWatch(TIMES, time.monotonic(), least_s=least_s)
    watch.launched(step(1))
    return watch


@pytest.mark.parametrize("log_hangs", [False, True])
def test_the_process_ends_after_one_line(
    log_hangs: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "LAST_WORDS_S", 0.2)
    ended = threading.Event()
    statuses: list[int] = []

    def end(status: int) -> None:
        statuses.append(status)
        ended.set()

    dog = Watchdog(hung_device(), lambda: None, end)
    if log_hangs:
        caplog.handler.acquire()
    try:
        dog.start()
        assert ended.wait(PATIENCE_S)
    finally:
        if log_hangs:
            caplog.handler.release()
    dog.close()
    assert statuses == [EXIT_HUNG_STEP]
    if not log_hangs:
        (record,) = caplog.records
        assert record.levelno == logging.CRITICAL
        assert "the device hangs: a decode step (sequences: 1, tokens: 1)" in record.getMessage()


def _hang() -> None:
    dog = Watchdog(hung_device(1.0), lambda: None)
    dog.start()
    threading.Event().wait()


def test_a_stopped_process_goes_on_and_a_hung_one_ends() -> None:
    process = forks().Process(target=_hang)
    process.start()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(3.0)
    os.kill(process.pid, signal.SIGCONT)
    process.join(0.4)
    assert process.exitcode is None, "it has hardly run"
    process.join(PATIENCE_S)
    assert process.exitcode == EXIT_HUNG_STEP


# --- compilers ------------------------------------------------------------------------------------


def test_what_torch_compiles_is_heard() -> None:
    import torch
    import torch._dynamo
    from torch._dynamo.callback import callback_handler

    uses, seen = FirstUses(), list[str | None]()

    def compiler(module: torch.fx.GraphModule, _: object) -> object:
        seen.append(uses.now)
        return module.forward

    before = callback_handler.start_callbacks[:], callback_handler.end_callbacks[:]
    uses.listen()
    uses.listen()
    try:
        compiled = torch.compile(lambda x: x + 1, backend=compiler)
        assert compiled(torch.ones(1)).item() == 2.0
    finally:
        callback_handler.start_callbacks[:], callback_handler.end_callbacks[:] = before
        torch._dynamo.reset()
    assert seen == ["a graph of operations"]
    assert uses.now is None


def test_what_triton_compiles_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", None)
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", None)
    uses = FirstUses()
    uses._listen_to_triton()
    kernel = SimpleNamespace(name="k")
    begin, end = knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook
    assert begin is not None and end is not None
    assert not begin(fn=kernel, key="", repr="", compile={}, already_compiled=False)
    assert uses.now == "the kernel k"
    assert not end(fn=kernel, key="", repr="", compile={}, already_compiled=False)
    assert uses.now is None
