"""Which requests are checked, when digests agree, and how a decode worker keeps them apart."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest

from decode_worker.scheduler import DecodeScheduler
from engine.core.step import Command, StepWanted
from kvpool.core.transfer.commands import ScatterSlab, SlabScattered
from kvpool.core.transfer.messages import (
    CONVERTED,
    EXACT,
    LOSSY,
    MOST_RUNS,
    RUN_TOKENS,
    SUMS,
    BlocksDigested,
    Commit,
    Committed,
    DigestBlocks,
    KvDigest,
    PlaneDigest,
    SlabFilled,
    SlabLent,
    allowed_distance,
    is_chosen,
    mismatch,
    run_tokens,
)
from kvpool.core.transfer.write import TokenSpan
from kvrelay.messages import Abort, RequestFailed, Stop
from kvrelay.types import RequestSpec
from prefill_worker.scheduler import PrefillScheduler
from tests.unit.worker_kit import (
    LAYOUT,
    ahead,
    decode_scheduler,
    events,
    from_d,
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

PLANE = PlaneDigest(norms=(2.0, 4.0, 1.0), sums=(1.0,) * 3 * SUMS)
SENT = KvDigest(start=0, planes=(PLANE,))


def changed(run: int, by: float) -> KvDigest:
    """One sum of one run."""
    sums = [*PLANE.sums]
    sums[run * SUMS + 1] += by
    return KvDigest(start=0, planes=(replace(PLANE, sums=tuple(sums)),))


# --- digests ------------------------------------------------------------------------------------


def test_equal_digests_have_no_distance() -> None:
    assert SENT.distance(SENT) == 0
    empty = KvDigest(start=0, planes=(PlaneDigest(norms=(0.0,), sums=(0.0,) * SUMS),))
    assert empty.distance(empty) == 0
    assert mismatch(SENT, (SENT, SENT), EXACT) is None


@pytest.mark.parametrize(("run", "distance"), [(0, 0.25), (1, 0.25), (2, 0.25)])
def test_a_difference_counts_in_norms_of_the_run_or_one_beside_it(
    run: int, distance: float
) -> None:
    assert SENT.distance(changed(run, 1.0)) == distance
    alone = replace(PLANE, norms=(2.0, 1.0, 1.0))
    assert KvDigest(start=0, planes=(alone,)).distance(changed(2, 1.0)) == 1.0


@pytest.mark.parametrize(
    "other",
    [
        changed(0, nan),
        changed(0, inf),
        replace(SENT, start=1),
        replace(SENT, planes=()),
        replace(SENT, planes=(replace(PLANE, sums=PLANE.sums[1:]),)),
    ],
)
def test_what_cannot_be_compared_is_infinitely_far(other: KvDigest) -> None:
    assert SENT.distance(other) == inf
    assert mismatch(SENT, (SENT, other), LOSSY) == (
        "the KV's digest differs by inf of its norm (allowed 0.5)"
    )


def test_what_right_kv_may_differ_by() -> None:
    assert allowed_distance("bfloat16", "bfloat16", codecs=False) == EXACT
    assert allowed_distance("float32", "bfloat16", codecs=False) == CONVERTED
    assert allowed_distance("bfloat16", "float8_e4m3fn", codecs=False) == LOSSY
    assert allowed_distance("bfloat16", "bfloat16", codecs=True) == LOSSY


@pytest.mark.parametrize("tokens", [1, 1000, 20_000, 1_000_000])
def test_a_digest_fits_in_a_message(tokens: int) -> None:
    planes = sum(len(group.planes) for group in LAYOUT.groups)
    run = run_tokens(LAYOUT, tokens)
    assert run >= RUN_TOKENS
    assert planes * -(-tokens // run) <= MOST_RUNS


def test_one_request_in_n_is_chosen_whatever_its_try() -> None:
    ids = [f"cmpl-{i}" for i in range(16_000)]
    assert not any(is_chosen(name, 0) for name in ids)
    assert all(is_chosen(name, 1) for name in ids)
    assert 850 < sum(is_chosen(name, 16) for name in ids) < 1150


# --- the prefill worker -------------------------------------------------------------------------


def computed(*, every: int) -> tuple[PrefillScheduler, list[Command]]:
    """A prompt of 3 tokens has been computed, and read by its decode worker."""
    scheduler = prefill_scheduler(canary_every=every)
    scheduler.handle(prefill_of(spec("a", 3)), 0)
    run(scheduler, (9,))
    job = scheduler.jobs[key("a")]
    job.sender._done.update(range(len(job.sender._pieces)))
    return scheduler, scheduler.handoffs._commit(job)


def test_a_commit_waits_for_the_digest_of_what_was_sent() -> None:
    scheduler, commands = computed(every=1)
    (job,) = commands
    assert isinstance(job, DigestBlocks)
    assert job.span == TokenSpan(start=0, tokens=3, next_position=3)
    assert job.holder.side == "prefill"
    done = BlocksDigested(holder=job.holder, digests=(SENT,))
    (commit,) = to_peer(scheduler.handle(done, 0))
    assert isinstance(commit, Commit)
    assert commit.digest == SENT
    assert names(scheduler.handle(from_d(Committed(key=key("a"))), 0)) == ["Released"]


def test_without_a_check_it_is_committed_at_once() -> None:
    (commit,) = to_peer(computed(every=0)[1])
    assert isinstance(commit, Commit)
    assert commit.digest is None


def test_a_digest_of_a_request_that_is_over_goes_nowhere() -> None:
    scheduler, (job,) = computed(every=1)
    assert isinstance(job, DigestBlocks)
    scheduler.handle(Abort(key=key("a")), 0)
    assert scheduler.handle(BlocksDigested(holder=job.holder, digests=(SENT,)), 0) == []


def test_what_the_decode_worker_holds_is_not_checked() -> None:
    scheduler = prefill_scheduler(canary_every=1)
    scheduler.handle(replace(prefill_of(spec("a", 4)), held_tokens=4), 0)
    (commit,) = to_peer(run(scheduler, (9,)))
    assert isinstance(commit, Commit)
    assert commit.digest is None


# --- the decode worker --------------------------------------------------------------------------


def arrive(scheduler: DecodeScheduler, request: RequestSpec) -> DigestBlocks:
    """Reserve and hand over in one piece; first tokens are 100, 101 ...; what is to be digested."""
    name, prompt = request.key.request_id, len(request.prompt_ids)
    scheduler.handle(reserve(request), 0)
    (lent,) = to_peer(scheduler.handle(from_p(ahead(name, prompt)), 0))
    assert isinstance(lent, SlabLent)
    place = {"key": lent.key, "piece": lent.piece, "slab_id": lent.slab_id}
    filled = SlabFilled(**place, lease_id=lent.lease_id)  # type: ignore[arg-type]
    (scatter,) = scheduler.handle(from_p(filled), 0)
    assert isinstance(scatter, ScatterSlab)
    first = tuple(100 + i for i in range(request.sampling.n))
    commit = Commit(key=request.key, pieces=1, first_token_ids=first, digest=SENT)
    assert scheduler.handle(from_p(commit), 0) == [], "a scatter is in flight"
    moved = SlabScattered(**place, lease_id=lent.lease_id, bytes=1, seconds=0)  # type: ignore[arg-type]
    (job,) = scheduler.handle(moved, 0)
    assert isinstance(job, DigestBlocks)
    assert job.span == TokenSpan(start=0, tokens=prompt, next_position=prompt)
    return job


def check(scheduler: DecodeScheduler, job: DigestBlocks, found: KvDigest) -> list[Command]:
    return scheduler.handle(BlocksDigested(holder=job.holder, digests=(found,)), 0)


def assert_idle(scheduler: DecodeScheduler) -> None:
    scheduler.validate()
    assert scheduler.batch.tables.free_blocks == scheduler.batch.tables.blocks
    assert scheduler.sequences == 0
    assert scheduler.handle(StepWanted(), 9) == []


def counts(scheduler: DecodeScheduler) -> tuple[int, int]:
    return scheduler.reservations.canaries_passed, scheduler.reservations.canaries_mismatched


def cached(scheduler: DecodeScheduler, request: RequestSpec) -> int:
    """Blocks of its prompt that the next request would find."""
    tables, prompt = scheduler.batch.tables, request.prompt_ids
    chain = tables.chain(request.tenant, len(prompt))
    chain.extend(prompt, len(prompt))
    return tables.device.find(chain.full(len(prompt)).hashes(), None)[1]


def test_right_kv_joins_after_its_check() -> None:
    scheduler = decode_scheduler()
    job = arrive(scheduler, request := spec("a", 9))
    assert scheduler.sequences == 1
    assert scheduler.handle(StepWanted(), 0) == []
    commands = check(scheduler, job, SENT)
    assert names(commands) == ["kv_checked", "handoff_committed"]
    assert to_peer(commands) == [Committed(key=key("a"))]
    (decoding,) = the_step(scheduler.handle(StepWanted(), 0)).batch.slices
    assert decoding.token_ids == (100,)
    assert counts(scheduler) == (1, 0)
    assert cached(scheduler, request) == 2


def test_wrong_kv_is_given_up_and_leaves_nothing() -> None:
    scheduler = decode_scheduler()
    job = arrive(scheduler, request := spec("a", 9))
    commands = check(scheduler, job, changed(0, 1.0))
    assert names(commands) == ["RequestFailed", "Released"]
    assert to_peer(commands) == [Committed(key=key("a"))], "the prefill worker has done its part"
    failure = events(commands)[0]
    assert isinstance(failure, RequestFailed)
    assert failure.reason == "kv_mismatch"
    assert failure.message == "the KV's digest differs by 0.25 of its norm (allowed 0.001)"
    assert cached(scheduler, request) == 0
    assert counts(scheduler) == (0, 1)
    assert_idle(scheduler)


@pytest.mark.parametrize("found", [SENT, changed(0, 1.0)])
def test_an_abort_during_the_check_waits_for_its_end(found: KvDigest) -> None:
    scheduler = decode_scheduler()
    job = arrive(scheduler, spec("a", 3))
    assert events(scheduler.handle(Abort(key=key("a")), 0)) == []
    assert scheduler.sequences == 0
    assert scheduler.batch.tables.free_blocks < scheduler.batch.tables.blocks
    assert names(check(scheduler, job, found)) == ["Released"]
    assert counts(scheduler) == (0, 0)
    assert_idle(scheduler)


def test_a_choice_that_is_stopped_during_the_check_is_not_decoded() -> None:
    scheduler = decode_scheduler()
    job = arrive(scheduler, spec("a", 3, n=2))
    assert scheduler.sequences == 2
    scheduler.handle(Stop(key=key("a"), choice=0, valid_tokens=1), 0)
    check(scheduler, job, SENT)
    (left,) = the_step(scheduler.handle(StepWanted(), 0)).batch.slices
    assert left.choice == 1


def test_a_commit_without_a_digest_is_not_checked() -> None:
    scheduler = decode_scheduler()
    scheduler.handle(reserve(spec("a", 3)), 0)
    scheduler.handle(from_p(ahead("a", 3)), 0)
    commit = Commit(key=key("a"), pieces=0, first_token_ids=(100,))
    assert names(scheduler.handle(from_p(commit), 0)) == ["handoff_committed"]
    assert counts(scheduler) == (0, 0)
