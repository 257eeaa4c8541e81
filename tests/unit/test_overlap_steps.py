"""Steps launched before the tokens of the one before are known draw what single steps draw."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from random import Random

import pytest

from decode_worker.scheduler import DecodeScheduler
from engine.core.step import (
    Command,
    OverlapStepWanted,
    RunStep,
    Sampled,
    SequenceSlice,
    StepDone,
    StepOutcome,
    StepWanted,
)
from kvpool.core.blocks.holding import CopyPairs, Holder
from kvpool.core.layout.layout import Tables
from kvrelay.messages import Abort, Generate, Released, Stop, Tokens
from kvrelay.types import FinishReason, RequestKey, RequestSpec
from tests.unit.test_decode_runs import a_spec, arrive
from tests.unit.worker_kit import BLOCK, decode_scheduler, events, key, the_step

WRONG = -7


def token(request: RequestKey, index: int) -> int:
    return int(request.request_id) * 1000 + index


@dataclass
class Memory:
    """One layer's KV, as the tokens that it was computed from; who reads others than its own
    fails."""

    tokens: dict[tuple[int, int], int] = field(default_factory=dict)  # (block, offset) |->

    def write(self, tables: Tables, start: int, token_ids: list[int]) -> None:
        for position, token_id in enumerate(token_ids, start):
            self.tokens[tables[0][position // BLOCK], position % BLOCK] = token_id

    def read(self, tables: Tables, end: int) -> list[int]:
        return [self.tokens[tables[0][p // BLOCK], p % BLOCK] for p in range(end)]

    def copy(self, pairs: CopyPairs) -> None:
        for source, target in pairs[0]:
            for offset in range(BLOCK):
                if (source, offset) in self.tokens:
                    self.tokens[target, offset] = self.tokens[source, offset]


class Driver:
    """A worker whose device runs a step as late as it can: right before it is told to be over."""

    def __init__(self, rng: Random, *, behind: bool, blocks: int = 24) -> None:
        self.scheduler = decode_scheduler(blocks=blocks, max_running=6, slabs=1)
        self.memory = Memory()
        self.told: dict[RequestKey, list[int]] = {}
        self.ends: dict[RequestKey, FinishReason] = {}
        self.released: list[RequestKey] = []
        self.specs: dict[RequestKey, RequestSpec] = {}
        self.behind = 0
        self._rng, self._looks_behind = rng, behind
        self._in_flight: deque[RunStep] = deque()
        self._drawn: list[int] = []  # of the step before, as the device has them

    def add(self, request: RequestSpec, *, by_handoff: bool) -> None:
        self.specs[request.key] = request
        self.told[request.key] = [100] if by_handoff else []
        if not by_handoff:
            self.hear(self.scheduler.handle(Generate(spec=request), 0))
            return
        arrive(self.scheduler, request)
        if Holder("decode", request.key) in self.scheduler.reservations.tables:
            tables = self.scheduler.reservations.tables.tables(Holder("decode", request.key))
            self.memory.write(tables, 0, list(request.prompt_ids))

    def turn(self) -> bool:
        """A step ends; whether there was one."""
        if not self._in_flight:
            self._launch(self.scheduler.handle(StepWanted(), 0))
        if self._looks_behind and self._in_flight and self._rng.random() < 0.9:
            found = self.scheduler.handle(OverlapStepWanted(), 0)
            self.behind += any(isinstance(one, RunStep) for one in found)
            self._launch(found)
        if not self._in_flight:
            return False
        step = self._in_flight.popleft()
        self.hear(self.scheduler.handle(self._run(step), 0))
        self.scheduler.validate()
        return True

    def _launch(self, commands: list[Command]) -> None:
        self.hear(commands)
        if any(isinstance(one, RunStep) for one in commands):
            step = the_step(commands)
            for pairs in step.copies:
                self.memory.copy(pairs)
            self._in_flight.append(step)

    def _run(self, step: RunStep) -> StepDone:
        drawn = [self._draw(piece) for piece in step.batch.slices]
        sampled = tuple(() if found is None else (Sampled(token_id=found),) for found in drawn)
        self._drawn = [WRONG if t is None else t for t in drawn]
        return StepDone(outcome=StepOutcome(sampled=sampled), seconds=0.1)

    def _draw(self, piece: SequenceSlice) -> int | None:
        ids = list(piece.token_ids) if piece.follows is None else [self._drawn[piece.follows]]
        self.memory.write(piece.tables, piece.start, ids)
        seen = self.memory.read(piece.tables, piece.start + len(ids))
        if not piece.samples:
            return None
        index = piece.index
        request = self.specs[piece.key]
        before = [*request.prompt_ids, *self.told[piece.key]]
        if piece.follows is not None and len(before) < len(seen):
            before.append(ids[0])
        assert seen == before[: len(seen)], (piece.key, seen, before)
        return token(piece.key, index)

    def hear(self, commands: list[Command]) -> None:
        for event in events(commands):
            if isinstance(event, Released):
                self.released.append(event.key)
            if isinstance(event, Tokens):
                assert event.first_index == len(self.told[event.key])
                self.told[event.key] += event.token_ids
                if event.finish_reason is not None:
                    assert event.key not in self.ends
                    self.ends[event.key] = event.finish_reason


def run_both(seed: int) -> tuple[Driver, Driver]:
    rng = Random(seed)
    plain = Driver(Random(seed), behind=False)
    ahead = Driver(Random(seed), behind=True)
    for name in map(str, range(1, 11)):
        request = a_spec(name, rng.randint(1, 12), max_tokens=rng.randint(2, 24))
        if rng.random() < 0.5:
            stops = (token(request.key, rng.randint(1, 23)),)
            sampling = replace(request.sampling, stop_token_ids=stops)
            request = replace(request, sampling=sampling)
        by_handoff = rng.random() < 0.7
        turns = rng.randint(0, 6)
        for driver in (plain, ahead):
            driver.add(request, by_handoff=by_handoff)
            for _ in range(turns):
                driver.turn()
    for driver in (plain, ahead):
        while driver.turn():
            pass
    return plain, ahead


@pytest.mark.parametrize("seed", range(40))
def test_as_many_single_steps(seed: int) -> None:
    plain, ahead = run_both(seed)
    both = ahead.ends.keys() & plain.ends.keys()
    assert len(both) > 3
    for request in both:
        assert ahead.told[request] == plain.told[request]
        assert ahead.ends[request] == plain.ends[request]
    for driver in (plain, ahead):
        assert driver.released.count(key("1")) <= 1
        assert {*driver.ends} <= {*driver.released}
        assert max(Counter(driver.released).values()) == 1
        assert not list(driver.scheduler.reservations.tables.held())
    assert ahead.behind > 5


def pair(**more: object) -> Driver:
    """Two sequences on the device, and the overlapped step."""
    driver = Driver(Random(0), behind=False, **more)  # type: ignore[arg-type]
    for name in ("1", "2"):
        driver.add(a_spec(name, 3, max_tokens=9), by_handoff=True)
    return driver


def wanted(scheduler: DecodeScheduler) -> list[RunStep]:
    found = scheduler.handle(OverlapStepWanted(), 0)
    return [one for one in found if isinstance(one, RunStep)]


def test_an_overlapped_step_starts_where_the_first_will_end() -> None:
    driver = pair()
    the_step(driver.scheduler.handle(StepWanted(), 0))
    (step,) = wanted(driver.scheduler)
    first, second = step.batch.slices
    assert (first.follows, second.follows) == (0, 1)
    assert first.start == 4 and first.index == 2
    assert len(first.tables[0]) == 2, "room for the token after the next"
    assert wanted(driver.scheduler) == [], "one at a time"


def test_who_ends_by_its_length_is_not_in_it() -> None:
    driver = pair()
    driver.add(a_spec("3", 3, max_tokens=2), by_handoff=True)
    the_step(driver.scheduler.handle(StepWanted(), 0))
    (step,) = wanted(driver.scheduler)
    assert [piece.key.request_id for piece in step.batch.slices] == ["1", "2"]


def test_a_sequence_that_joins_is_in_the_overlapped_step() -> None:
    driver = pair()
    the_step(driver.scheduler.handle(StepWanted(), 0))
    arrive(driver.scheduler, a_spec("3", 5, max_tokens=9))
    (step,) = wanted(driver.scheduler)
    joined = step.batch.slices[2]
    assert joined.follows is None and joined.token_ids == (100,) and joined.start == 5


def end(driver: Driver, *tokens: int) -> list[Command]:
    sampled = tuple((Sampled(token_id=t),) for t in tokens)
    done = StepDone(outcome=StepOutcome(sampled=sampled), seconds=0.1)
    return driver.scheduler.handle(done, 0)


def test_a_sequence_that_ended_gives_its_blocks_back_after_the_overlapped_step() -> None:
    driver = Driver(Random(0), behind=False)
    request = a_spec("1", 3, max_tokens=9)
    sampling = replace(request.sampling, stop_token_ids=(55,))
    driver.add(replace(request, sampling=sampling), by_handoff=True)
    the_step(driver.scheduler.handle(StepWanted(), 0))
    assert wanted(driver.scheduler)
    (told,) = events(end(driver, 55))
    assert isinstance(told, Tokens) and told.finish_reason is FinishReason.STOP
    assert list(driver.scheduler.reservations.tables.held())
    assert [type(e) for e in events(end(driver, 56))] == [Released]
    assert not list(driver.scheduler.reservations.tables.held())


def test_a_sequence_that_ended_holds_up_no_overlapped_step() -> None:
    driver, request = pair(), a_spec("3", 3, max_tokens=9)
    sampling = replace(request.sampling, stop_token_ids=(55,))
    driver.add(replace(request, sampling=sampling), by_handoff=True)
    the_step(driver.scheduler.handle(StepWanted(), 0))
    assert wanted(driver.scheduler)
    end(driver, 5, 6, 55)
    (step,) = wanted(driver.scheduler)
    found = [(piece.key.request_id, piece.follows) for piece in step.batch.slices]
    assert found == [("1", 0), ("2", 1)]


@pytest.mark.parametrize(
    "message", [Abort(key=key("1")), Stop(key=key("1"), choice=0, valid_tokens=1)]
)
def test_who_is_dropped_keeps_its_blocks_for_both_steps(message: Abort | Stop) -> None:
    driver = pair()
    the_step(driver.scheduler.handle(StepWanted(), 0))
    assert wanted(driver.scheduler)
    driver.scheduler.handle(message, 0)
    held = driver.scheduler.reservations.tables.held
    first = events(end(driver, 5, 6))
    assert [e.key.request_id for e in first] == ["2"] and len(list(held())) == 2
    second = events(end(driver, 7, 8))
    assert Released in map(type, second) and len(list(held())) == 1


def never(driver: Driver) -> None:
    the_step(driver.scheduler.handle(StepWanted(), 0))
    assert wanted(driver.scheduler) == []


def test_who_needs_its_last_token_takes_single_steps() -> None:
    driver = pair()
    request = a_spec("3", 3, max_tokens=9)
    sampling = replace(request.sampling, repetition_penalty=1.1)
    driver.add(replace(request, sampling=sampling), by_handoff=True)
    never(driver)


@pytest.mark.parametrize("is_in_step", [True, False])
def test_prompts_that_wait_have_the_next_step(is_in_step: bool) -> None:
    driver, prompt = pair(), a_spec("3", 30, max_tokens=9)
    if is_in_step:
        driver.add(prompt, by_handoff=False)
    the_step(driver.scheduler.handle(StepWanted(), 0))
    if not is_in_step:
        driver.add(prompt, by_handoff=False)
    assert wanted(driver.scheduler) == []


def test_a_prompt_in_the_step_holds_the_next_one_up_when_it_is_dropped_too() -> None:
    """Its slice draws nothing, so the others' tokens would be at other places."""
    driver = pair()
    driver.add(a_spec("3", 30, max_tokens=9), by_handoff=False)
    the_step(driver.scheduler.handle(StepWanted(), 0))
    driver.scheduler.handle(Abort(key=key("3")), 0)
    assert wanted(driver.scheduler) == []


@pytest.mark.parametrize("blocks", [2, 3])
def test_no_overlapped_step_where_blocks_run_out(blocks: int) -> None:
    """3 are enough for one of both."""
    driver = Driver(Random(0), behind=False, blocks=blocks)
    driver.add(a_spec("1", 3, max_tokens=5), by_handoff=True)
    driver.add(a_spec("2", 3, max_tokens=5), by_handoff=True)
    never(driver)
