"""A request that may have killed a worker shares no step with others."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from decode_worker.scheduler import DecodeScheduler
from engine.core.step import OverlapStepWanted, RunStep, StepWanted
from kvrelay.messages import Generate, Tokens
from kvrelay.types import RequestSpec
from tests.unit.test_decode_runs import a_spec, advance, arrive, draw
from tests.unit.worker_kit import (
    decode_scheduler,
    events,
    prefill_of,
    prefill_scheduler,
    the_step,
)

ALONE = 3


def requests(rng: Random, count: int = 8) -> list[RequestSpec]:
    """Some of them have emitted tokens in an earlier attempt."""
    made = []
    for name in map(str, range(1, count + 1)):
        one = a_spec(name, rng.randint(1, 8), max_tokens=rng.randint(2, 20))
        emitted = tuple(range(rng.randrange(one.sampling.max_tokens)))
        alone = rng.choice((0, 0, ALONE))
        made.append(replace(one, emitted_ids=emitted, alone_tokens=alone))
    return made


def joins(scheduler: DecodeScheduler, request: RequestSpec, rng: Random) -> int:
    """The tokens that the prefill worker has drawn."""
    if request.emitted_ids or rng.random() < 0.5:
        scheduler.handle(Generate(spec=request), 0)
        return 0
    arrive(scheduler, request)
    return 1


@pytest.mark.parametrize("seed", range(40))
def test_a_decode_step_has_one_such_request_or_none(seed: int) -> None:
    rng = Random(seed)
    scheduler = decode_scheduler(blocks=40, max_running=8, slabs=1, chunk=8)
    coming, made = requests(rng), Counter[str]()
    specs = {one.key.request_id: one for one in coming}
    while coming or scheduler.has_work:
        if coming and rng.random() < 0.3:
            one = coming.pop()
            made[one.key.request_id] += joins(scheduler, one, rng)
        commands = scheduler.handle(StepWanted(most_steps=rng.randint(1, 4)), 0)
        if not any(isinstance(command, RunStep) for command in commands):
            assert not scheduler.has_work, "somebody stands still"
            continue
        step = the_step(commands)
        names = {piece.key.request_id for piece in step.batch.slices}
        for name in names:
            alone = specs[name].alone_tokens
            assert made[name] >= alone or names == {name}, f"{names} with {made[name]} tokens"
        for event in events(scheduler.handle(draw(step, rng.randint(1, step.steps)), 0)):
            if isinstance(event, Tokens):
                made[event.key.request_id] += len(event.token_ids)
        scheduler.validate()
    left = {n: one.sampling.max_tokens - len(one.emitted_ids) for n, one in specs.items()}
    assert made == Counter(left), "each yields all its tokens"


@pytest.mark.parametrize("seed", range(10))
def test_it_changes_no_token(seed: int) -> None:
    told = []
    for alone in (0, ALONE):
        scheduler = decode_scheduler(blocks=200, max_running=8, slabs=8)
        for request in requests(Random(seed)):
            marked = replace(request, alone_tokens=alone if request.alone_tokens else 0)
            scheduler.handle(Generate(spec=marked), 0)
        told.append(advance(scheduler, 500, 1, Random(0)))
    assert told[0] == told[1]


def test_no_step_is_launched_while_such_a_request_is_there() -> None:
    scheduler = decode_scheduler()
    arrive(scheduler, a_spec("1", 3, max_tokens=20))
    arrive(scheduler, replace(a_spec("2", 3, max_tokens=20), alone_tokens=ALONE))
    overlapped = []
    for _ in range(8):
        step = the_step(scheduler.handle(StepWanted(), 0))
        overlapped.append(bool(scheduler.handle(OverlapStepWanted(), 0)))
        scheduler.handle(draw(step, 1), 0)
        if overlapped[-1]:
            break
    assert overlapped == [False] * (2 * (ALONE - 1) - 1) + [True]


@pytest.mark.parametrize("seed", range(20))
def test_a_prefill_step_has_one_such_prompt_or_none(seed: int) -> None:
    rng = Random(seed)
    scheduler = prefill_scheduler(blocks=60, chunk=16)
    specs = {one.key.request_id: replace(one, emitted_ids=()) for one in requests(rng)}
    coming, computed = [*specs.values()], Counter[str]()
    while coming or scheduler.has_work:
        for _ in range(min(len(coming), rng.choice((0, 1, 4)))):
            scheduler.handle(prefill_of(coming.pop()), 0)
        commands = scheduler.handle(StepWanted(), 0)
        if not any(isinstance(command, RunStep) for command in commands):
            assert not scheduler.has_work, "somebody stands still"
            continue
        step = the_step(commands)
        names = {piece.key.request_id for piece in step.batch.slices}
        assert len(names) == 1 or not any(specs[name].alone_tokens for name in names)
        computed += {p.key.request_id: len(p.token_ids) for p in step.batch.slices}
        scheduler.handle(draw(step, 1), 0)
        scheduler.validate()
    assert computed == Counter({name: len(one.prompt_ids) for name, one in specs.items()})
