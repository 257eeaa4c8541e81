"""Which requests are checked, what is compared, and how a decode worker keeps them apart."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest

from decode_worker.scheduler import DecodeScheduler
from engine.step import Command, Sampled, StepDone, StepOutcome, StepWanted
from kvpool.canary import LogitSketch, is_chosen
from kvpool.handoff import Commit, HandoffMode, SlabFilled, SlabLent
from kvpool.handoff_events import ScatterSlab, SlabScattered
from kvpool.pool.client_events import PrefixFetched, PrefixFound, SeekPrefix, SpoilPrefix
from kvpool.tiers.restore_cost import RestoreCost
from kvpool.tiers.restores import Restores
from kvrelay.messages import Abort, RequestFailed, Stop
from kvrelay.types import RequestSpec
from tests.unit.worker_kit import (
    BLOCK,
    ahead,
    decode_scheduler,
    events,
    from_p,
    key,
    names,
    prefill_of,
    prefill_scheduler,
    reserve,
    run,
    spec,
    the_step,
    to_peer,
)

SKETCH = LogitSketch(token_ids=(5, 9), logits=(4.0, 3.0), log_sum_exp=4.5, spread=2.0)
BOUND = 0.25


def off(by: float) -> LogitSketch:
    """At this distance."""
    return replace(SKETCH, logits=(4.0, 3.0 + 2 * by))


def test_the_distance_is_the_largest_difference_in_spreads() -> None:
    assert SKETCH.distance(SKETCH) == 0
    assert SKETCH.distance(off(-0.5)) == 0.5
    assert SKETCH.distance(replace(SKETCH, log_sum_exp=7.5)) == 1.5


@pytest.mark.parametrize(
    "other",
    [
        replace(SKETCH, logits=(4.0, nan)),
        replace(SKETCH, logits=(4.0, inf)),
        replace(SKETCH, log_sum_exp=nan),
        replace(SKETCH, token_ids=(5, 8)),
        replace(SKETCH, logits=(4.0,)),
    ],
)
def test_what_cannot_be_compared_is_infinitely_far(other: LogitSketch) -> None:
    assert SKETCH.distance(other) == other.distance(SKETCH) == inf


def test_one_request_in_n_is_chosen_whatever_its_try() -> None:
    ids = [f"cmpl-{i}" for i in range(16_000)]
    assert not any(is_chosen(name, 0) for name in ids)
    assert all(is_chosen(name, 1) for name in ids)
    assert 850 < sum(is_chosen(name, 16) for name in ids) < 1150


# --- the prefill worker -------------------------------------------------------------------------


def commit_of(canary_every: int) -> Commit:
    scheduler = prefill_scheduler(canary_every=canary_every)
    scheduler.handle(prefill_of(spec("a", 10)), 0)
    (chunk,) = the_step(scheduler.handle(StepWanted(), 0)).batch.slices
    assert not chunk.samples
    ran(scheduler, {})
    (last,) = the_step(scheduler.handle(StepWanted(), 0)).batch.slices
    assert last.sketch_ids == (() if canary_every else None)
    ran(scheduler, {0: SKETCH} if canary_every else {}, tokens=((9,),))
    job = scheduler.jobs[key("a")]
    job.sender._done.update(range(len(job.sender._pieces)))
    (commit,) = to_peer(scheduler.handoffs._commit(job))
    assert isinstance(commit, Commit)
    return commit


def ran(
    scheduler: object, sketches: dict[int, LogitSketch], tokens: tuple[tuple[int, ...], ...] = ((),)
) -> list[Command]:
    sampled = tuple(tuple(Sampled(token_id=t) for t in one) for one in tokens)
    outcome = StepOutcome(sampled=sampled, sketches=sketches)
    return scheduler.handle(StepDone(outcome=outcome, seconds=0.1), 0)  # type: ignore[attr-defined,no-any-return]


def test_the_prefill_worker_tells_what_its_logits_were() -> None:
    assert commit_of(0).sketch is None
    assert commit_of(1).sketch == SKETCH


# --- the decode worker --------------------------------------------------------------------------


def arrive(
    scheduler: DecodeScheduler,
    request: RequestSpec,
    sketch: LogitSketch | None = SKETCH,
    *,
    start: int = 0,
) -> list[str]:
    """Reserve and hand over in one piece; first tokens are 100, 101 ...; what the router hears."""
    name, prompt = request.key.request_id, len(request.prompt_ids)
    scheduler.handle(reserve(request), 0)
    announced = ahead(name, prompt, start=start, checked=True)
    (lent,) = to_peer(scheduler.handle(from_p(announced), 0))
    assert isinstance(lent, SlabLent)
    place = {"key": lent.key, "piece": lent.piece, "slab_id": lent.slab_id}
    filled = SlabFilled(**place, lease_id=lent.lease_id)  # type: ignore[arg-type]
    (scatter,) = scheduler.handle(from_p(filled), 0)
    assert isinstance(scatter, ScatterSlab)
    moved = SlabScattered(**place, lease_id=lent.lease_id, bytes=1, seconds=0)  # type: ignore[arg-type]
    scheduler.handle(moved, 0)
    first = tuple(100 + i for i in range(request.sampling.n))
    commit = Commit(key=request.key, pieces=1, first_token_ids=first, sketch=sketch)
    return names(scheduler.handle(from_p(commit), 0))


def check(scheduler: DecodeScheduler, found: LogitSketch) -> list[Command]:
    """Run the step that the canary wants."""
    the_step(scheduler.handle(StepWanted(), 0))
    return ran(scheduler, {0: found}, tokens=((1,),))


def assert_idle(scheduler: DecodeScheduler) -> None:
    scheduler.validate()
    assert scheduler.batch.tables.free_blocks == scheduler.batch.tables.blocks
    assert scheduler.sequences == 0
    assert scheduler.handle(StepWanted(), 9) == []


def counts(scheduler: DecodeScheduler) -> tuple[int, int, int]:
    canary = scheduler.canary
    return canary.passed, canary.mismatched, canary.skipped


@pytest.mark.parametrize("prompt", [1, 3, 4, 5, 8])
def test_the_last_token_is_run_again_in_a_copy_of_its_block(prompt: int) -> None:
    scheduler = decode_scheduler(canary_bound=BOUND)
    assert arrive(scheduler, spec("a", prompt)) == ["handoff_committed"]
    assert scheduler.sequences == 1
    step = the_step(scheduler.handle(StepWanted(), 0))
    (piece,), ((pairs,),) = step.batch.slices, step.copies
    ((source, copy),) = pairs
    (table,) = piece.tables
    assert (piece.token_ids, piece.start, piece.sketch_ids) == ((prompt - 1,), prompt - 1, (5, 9))
    assert source == (prompt - 1) // 4
    assert table[source] == copy
    assert source not in table, "what was handed over is never written"
    assert piece.prompt_tokens == prompt
    assert names(ran(scheduler, {0: off(0.2)}, tokens=((1,),))) == ["kv_checked"]
    (decoding,) = the_step(scheduler.handle(StepWanted(), 0)).batch.slices
    assert decoding.token_ids == (100,)
    assert source in decoding.tables[0]
    assert copy not in decoding.tables[0][: source + 1]
    assert counts(scheduler) == (1, 0, 0)


def test_wrong_kv_is_given_up_and_leaves_nothing() -> None:
    scheduler = decode_scheduler(canary_bound=BOUND)
    arrive(scheduler, request := spec("a", 9))
    commands = check(scheduler, off(0.3))
    assert names(commands) == ["RequestFailed", "Released"]
    failure = events(commands)[0]
    assert isinstance(failure, RequestFailed)
    assert failure.reason == "kv_mismatch"
    assert failure.message == "logits differ by 0.3 of their spread (allowed 0.25)"
    assert scheduler.batch.tables.cache.find(request_hashes(scheduler, request), None) == []
    assert counts(scheduler) == (0, 1, 0)
    assert_idle(scheduler)


@pytest.mark.parametrize(("theirs", "passes"), [(0.2, False), (0.35, True)])
def test_the_larger_of_both_workers_bounds_holds(theirs: float, passes: bool) -> None:
    """The prefill worker's dtype may be the coarser one."""
    scheduler = decode_scheduler(canary_bound=BOUND)
    arrive(scheduler, spec("a", 9), sketch=replace(SKETCH, bound=theirs))
    assert names(check(scheduler, off(0.3)))[0] == ("kv_checked" if passes else "RequestFailed")
    assert counts(scheduler) == (int(passes), int(not passes), 0)


def request_hashes(scheduler: DecodeScheduler, request: RequestSpec) -> list[bytes]:
    chain = scheduler.batch.tables.chain(request.tenant, len(request.prompt_ids))
    chain.extend(request.prompt_ids, len(request.prompt_ids))
    return list(chain.full(len(request.prompt_ids)))


def test_right_kv_is_found_by_the_next_request() -> None:
    scheduler = decode_scheduler(canary_bound=BOUND)
    arrive(scheduler, request := spec("a", 9))
    check(scheduler, SKETCH)
    assert len(scheduler.batch.tables.cache.find(request_hashes(scheduler, request), None)) == 2


def test_a_cached_beginning_may_be_what_is_wrong() -> None:
    """So the next try finds none of it here."""
    scheduler = decode_scheduler(canary_bound=BOUND)
    arrive(scheduler, spec("a", 8, max_tokens=2))
    check(scheduler, SKETCH)
    run(scheduler, (7,))
    request = spec("b", 10)
    assert len(scheduler.batch.tables.cache.find(request_hashes(scheduler, request), None)) == 2
    arrive(scheduler, request, start=8)
    assert names(check(scheduler, off(1))) == ["RequestFailed", "Released"]
    assert scheduler.batch.tables.cache.find(request_hashes(scheduler, request), None) == []
    assert_idle(scheduler)


def test_all_that_wait_are_checked_in_one_step() -> None:
    scheduler = decode_scheduler(canary_bound=BOUND)
    arrive(scheduler, spec("a", 3))
    arrive(scheduler, replace(spec("b", 3), tenant="other"))
    step = the_step(scheduler.handle(StepWanted(), 0))
    assert [piece.key.request_id for piece in step.batch.slices] == ["a", "b"]
    commands = ran(scheduler, {0: off(1), 1: SKETCH}, tokens=((1,), (1,)))
    assert names(commands) == ["RequestFailed", "Released", "kv_checked"]
    assert scheduler.sequences == 1


def test_an_abort_before_the_check() -> None:
    scheduler = decode_scheduler(canary_bound=BOUND)
    arrive(scheduler, spec("a", 3))
    assert names(scheduler.handle(Abort(key=key("a")), 0)) == ["Released"]
    assert_idle(scheduler)


@pytest.mark.parametrize("found", [SKETCH, off(1)])
def test_an_abort_during_the_check_waits_for_the_step(found: LogitSketch) -> None:
    scheduler = decode_scheduler(canary_bound=BOUND)
    arrive(scheduler, spec("a", 3))
    scheduler.handle(StepWanted(), 0)
    assert scheduler.handle(Abort(key=key("a")), 0) == []
    assert scheduler.sequences == 0
    assert scheduler.batch.tables.free_blocks < scheduler.batch.tables.blocks
    assert names(ran(scheduler, {0: found}, tokens=((1,),))) == ["Released"]
    assert_idle(scheduler)


def test_a_choice_that_is_stopped_during_the_check_is_not_decoded() -> None:
    scheduler = decode_scheduler(canary_bound=BOUND)
    arrive(scheduler, spec("a", 3, n=2))
    assert scheduler.sequences == 2
    scheduler.handle(Stop(key=key("a"), choice=0, valid_tokens=1), 0)
    check(scheduler, SKETCH)
    (left,) = the_step(scheduler.handle(StepWanted(), 0)).batch.slices
    assert left.choice == 1


def test_without_a_block_for_the_copy_it_joins_unchecked() -> None:
    scheduler = decode_scheduler(canary_bound=BOUND, blocks=1)
    assert arrive(scheduler, spec("a", 3, max_tokens=2)) == ["handoff_committed"]
    assert counts(scheduler) == (0, 0, 1)
    assert names(run(scheduler, (7,)))[-1] == "Released"
    assert_idle(scheduler)


def test_what_was_held_here_already_is_not_checked() -> None:
    scheduler = decode_scheduler(canary_bound=BOUND)
    arrive(scheduler, spec("a", 8, max_tokens=2))
    check(scheduler, SKETCH)
    scheduler.handle(reserve(spec("b", 8)), 0)
    commit = Commit(key=key("b"), pieces=0, first_token_ids=(100,), sketch=SKETCH)
    assert names(scheduler.handle(from_p(commit), 0)) == ["handoff_committed"]
    assert counts(scheduler) == (1, 0, 1)


def test_a_commit_without_a_sketch_is_not_checked() -> None:
    scheduler = decode_scheduler(canary_bound=BOUND)
    arrive(scheduler, spec("a", 3), sketch=None)
    assert counts(scheduler) == (0, 0, 0)
    (piece,) = the_step(scheduler.handle(StepWanted(), 0)).batch.slices
    assert piece.token_ids == (100,)


def test_workers_that_choose_differently_hand_nothing_over() -> None:
    """Their files have different numbers: said so, not crashed."""
    scheduler = decode_scheduler()
    scheduler.handle(reserve(spec("a", 3)), 0)
    (answer,) = to_peer(scheduler.handle(from_p(ahead("a", 3, checked=True)), 0))
    assert "is transfer.canary_every the same for both workers?" in str(answer)


# --- what comes from the pool -------------------------------------------------------------------


def fetched_later(prompt: int, **fields: int) -> DecodeScheduler:
    """It is committed, and its KV is got when it runs: nothing is in the pool."""
    scheduler = decode_scheduler(canary_bound=BOUND, mode=HandoffMode.POOL)
    request = spec("a", prompt, **fields)
    scheduler.handle(reserve(request), 0)
    first = tuple(100 + i for i in range(request.sampling.n))
    commit = Commit(key=request.key, pieces=0, first_token_ids=first, sketch=SKETCH)
    assert names(scheduler.handle(from_p(commit), 0)) == ["handoff_committed"]
    return scheduler


@pytest.mark.parametrize("prompt", [1, 4, 7, 8])
def test_the_end_of_a_prompt_from_the_pool_is_run_by_itself(prompt: int) -> None:
    scheduler = fetched_later(prompt)
    (piece,) = the_step(scheduler.handle(StepWanted(), 0)).batch.slices
    assert (piece.start + len(piece.token_ids), piece.prompt_tokens) == (prompt, prompt)
    assert piece.sketch_ids == (5, 9)
    assert names(ran(scheduler, {0: off(0.2)}, tokens=((1,),))) == ["kv_checked"]
    commands = scheduler.handle(StepWanted(), 0)
    assert names(commands) == ["decode_joined"]
    (decoding,) = the_step(commands).batch.slices
    assert (decoding.token_ids, decoding.start, decoding.sketch_ids) == ((100,), prompt, None)
    assert counts(scheduler) == (1, 0, 0)


def test_a_long_rest_is_compared_at_its_end_and_named_then() -> None:
    scheduler = fetched_later(10)
    cache, request = scheduler.batch.tables.cache, spec("a", 10)
    (first,) = the_step(scheduler.handle(StepWanted(), 0)).batch.slices
    assert (len(first.token_ids), first.samples, first.sketch_ids) == (8, (), None)
    assert ran(scheduler, {}) == []
    assert cache.find(request_hashes(scheduler, request), None) == []
    assert names(check(scheduler, SKETCH)) == ["kv_checked"]
    assert len(cache.find(request_hashes(scheduler, request), None)) == 2


def restored(scheduler: DecodeScheduler, prompt: int) -> None:
    """Its whole blocks but what is run come from the pool."""
    openings, whole = scheduler.batch.openings, (prompt - 1) // BLOCK
    scheduler.handle(StepWanted(), 0)
    (seek,) = openings.take_outbox()
    assert isinstance(seek, SeekPrefix) and len(seek.hashes) == whole
    assert openings.answer(PrefixFound(key=seek.key, host_blocks=whole, disk_blocks=0), 0) is None
    assert len(openings.take_outbox()) == 1
    found = openings.answer(PrefixFetched(key=seek.key, blocks=whole), 0)
    assert found is not None
    scheduler.handle(found, 0)


@pytest.mark.parametrize("prompt", [9, 12])
def test_wrong_kv_from_the_pool_is_given_up_here_and_there(prompt: int) -> None:
    scheduler = fetched_later(prompt)
    tables, openings = scheduler.batch.tables, scheduler.batch.openings
    openings.restores = Restores(tables=tables, cost=RestoreCost(BLOCK))
    restored(scheduler, prompt)
    (piece,) = the_step(scheduler.handle(StepWanted(), 0)).batch.slices
    assert piece.start == 8
    assert names(ran(scheduler, {0: off(0.3)}, tokens=((1,),))) == ["RequestFailed", "Released"]
    hashes = request_hashes(scheduler, spec("a", prompt))
    assert tables.cache.find(hashes, None) == []
    assert openings.take_outbox() == [SpoilPrefix(hashes=tuple(hashes[:2]))]
    assert counts(scheduler) == (0, 1, 0)
    assert_idle(scheduler)


def test_one_choice_with_wrong_kv_from_the_pool_ends_the_others() -> None:
    scheduler = fetched_later(9, n=2)
    assert scheduler.sequences == 2
    the_step(scheduler.handle(StepWanted(), 0))
    ran(scheduler, {})
    both = the_step(scheduler.handle(StepWanted(), 0)).batch.slices
    assert [piece.sketch_ids for piece in both] == [(5, 9), None]
    commands = ran(scheduler, {0: off(1)}, tokens=((1,), ()))
    assert names(commands) == ["RequestFailed", "Released"]
    assert_idle(scheduler)
