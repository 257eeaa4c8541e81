"""Several steps in a row are as many single ones."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from decode_worker.scheduler import DecodeScheduler
from engine.core.step import RunStep, Sampled, StepDone, StepOutcome, StepWanted
from kvpool.core.blocks.holding import Holder
from kvpool.core.transfer.commands import SlabScattered
from kvpool.core.transfer.messages import Commit, SlabFilled, SlabLent
from kvrelay.messages import Abort, Generate, Released, ReserveRefused, Tokens
from kvrelay.types import RequestKey, RequestSpec
from tests.unit.worker_kit import (
    ahead,
    decode_scheduler,
    events,
    from_p,
    key,
    reserve,
    spec,
    the_step,
    to_peer,
)

Told = tuple[str, RequestKey, int, int | None]


def a_spec(name: str, tokens: int, *, max_tokens: int) -> RequestSpec:
    """Its prompt is no other's."""
    prompt = tuple(int(name) * 100 + i for i in range(tokens))
    return replace(spec(name, tokens, max_tokens=max_tokens), prompt_ids=prompt)


def arrive(scheduler: DecodeScheduler, request: RequestSpec) -> None:
    tokens, name = len(request.prompt_ids), request.key.request_id
    (answer,) = events(scheduler.handle(reserve(request), 0))
    if isinstance(answer, ReserveRefused):
        return
    (lent,) = to_peer(scheduler.handle(from_p(ahead(name, tokens)), 0))
    assert isinstance(lent, SlabLent)
    slab = {"key": lent.key, "piece": 0, "slab_id": lent.slab_id, "lease_id": lent.lease_id}
    scheduler.handle(from_p(SlabFilled(**slab)), 0)
    scheduler.handle(SlabScattered(**slab, bytes=1, seconds=0), 0)
    scheduler.handle(from_p(Commit(key=request.key, pieces=1, first_token_ids=(100,))), 0)


def token(request: RequestKey, index: int) -> int:
    return int(request.request_id) * 1000 + index


def draw(step: RunStep, steps: int) -> StepDone:
    sampled = tuple(
        tuple(
            Sampled(token_id=token(piece.key, piece.index + i))
            for one in piece.samples
            for i in range(steps)
        )
        for piece in step.batch.slices
    )
    return StepDone(outcome=StepOutcome(sampled=sampled), seconds=0.1, steps=steps)


def advance(scheduler: DecodeScheduler, steps: int, most_steps: int, rng: Random) -> list[Told]:
    """So many steps, in runs that are cut anywhere; what is told, token by token."""
    told: list[Told] = []
    while steps:
        commands = scheduler.handle(StepWanted(most_steps=min(steps, most_steps)), 0)
        if not any(isinstance(command, RunStep) for command in commands):
            break
        step = the_step(commands)
        ran = rng.randint(1, step.steps)
        for event in events(scheduler.handle(draw(step, ran), 0)):
            if isinstance(event, Tokens):
                at = range(event.first_index, event.first_index + len(event.token_ids))
                ids = zip(at, event.token_ids, strict=True)
                told += [("token", event.key, index, token_id) for index, token_id in ids]
            if isinstance(event, Released):
                told.append(("released", event.key, 0, None))
        steps -= ran
    scheduler.validate()
    return sorted(told, key=str)


def held(scheduler: DecodeScheduler) -> dict[Holder, int]:
    """# holder |-> its blocks"""
    return {one.holder: len(one.tables[0]) for one in scheduler.reservations.tables.held()}


@pytest.mark.parametrize("seed", range(40))
def test_runs_cut_anywhere_are_as_many_single_steps(seed: int) -> None:
    rng, cuts = Random(seed), Random(seed)
    single = decode_scheduler(blocks=24, max_running=6, slabs=1)
    runs = decode_scheduler(blocks=24, max_running=6, slabs=1)
    for name in map(str, range(1, 9)):
        request = a_spec(name, rng.randint(1, 8), max_tokens=rng.randint(2, 30))
        for scheduler in (single, runs):
            arrive(scheduler, request)
        steps = rng.randint(0, 9)
        assert advance(runs, steps, 9, cuts) == advance(single, steps, 1, Random(0))
        assert held(runs) == held(single)
        if rng.random() < 0.2:
            for scheduler in (single, runs):
                scheduler.handle(Abort(key=request.key), 0)
    assert advance(runs, 500, 9, cuts) == advance(single, 500, 1, Random(0))
    assert held(runs) == held(single) == {}


def test_a_run_ends_with_its_first_sequence() -> None:
    scheduler = decode_scheduler()
    arrive(scheduler, a_spec("1", 3, max_tokens=6))
    arrive(scheduler, a_spec("2", 3, max_tokens=9))
    assert the_step(scheduler.handle(StepWanted(most_steps=100), 0)).steps == 5


def test_what_is_prefilled_here_runs_in_single_steps() -> None:
    scheduler = decode_scheduler(chunk=8)
    arrive(scheduler, a_spec("1", 3, max_tokens=20))
    scheduler.handle(Generate(spec=a_spec("2", 12, max_tokens=8)), 0)
    assert the_step(scheduler.handle(StepWanted(most_steps=100), 0)).steps == 1


def test_room_for_a_run_that_is_cut_is_given_back() -> None:
    scheduler = decode_scheduler(blocks=8)
    arrive(scheduler, a_spec("1", 3, max_tokens=30))
    step = the_step(scheduler.handle(StepWanted(most_steps=20), 0))
    assert step.steps == 20 and len(step.batch.slices[0].tables[0]) == 6
    scheduler.handle(draw(step, 2), 0)
    assert held(scheduler) == {Holder("decode", key("1")): 2}


def test_a_run_is_shorter_where_blocks_are_few() -> None:
    scheduler = decode_scheduler(blocks=4)
    arrive(scheduler, a_spec("1", 3, max_tokens=30))
    assert the_step(scheduler.handle(StepWanted(most_steps=20), 0)).steps == 10


def test_what_comes_ends_a_run() -> None:
    scheduler = decode_scheduler()
    arrive(scheduler, a_spec("1", 3, max_tokens=30))
    the_step(scheduler.handle(StepWanted(most_steps=20), 0))
    assert scheduler.batch.running_set.is_settled
    arrive(scheduler, a_spec("2", 3, max_tokens=30))
    assert not scheduler.batch.running_set.is_settled
